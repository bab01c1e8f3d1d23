"""What README promises to hackers, done: each hack is applied to a copy of the project, trained, and reported."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[1]
CONFIG = """
dataset = "toy"
n_layer, n_head, n_embd, block_size = 2, 2, 16, 16
batch_size, max_iters, warmup_iters, eval_interval, log_interval, learning_rate = 8, 20, 2, 10, 1, 3e-3
device = "cpu"
seeds = range(2)
"""
BLOCK = """        x = join(x, self.attn(self.ln_1(x), mask, tap), c.attn_residual, c.attn_gain)
        return join(x, self.mlp(self.ln_2(x)), c.ffn_residual, c.ffn_gain)
"""
FLAG = "    # the ablations"  # a new field stands before these


@pytest.fixture
def copy(tmp_path):
    """hack(old, new, arms) changes the copy's model.py; train(...) and losses(...) work on it."""
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    shutil.copytree(ROOT / "config", tmp_path / "config")
    (tmp_path / "data/toy").mkdir(parents=True)
    walk = (np.cumsum(np.random.default_rng(0).integers(1, 4, 5000)) % 32).astype("<u2")
    walk[:4000].tofile(tmp_path / "data/toy/train.bin")
    walk[4000:].tofile(tmp_path / "data/toy/val.bin")
    return tmp_path


def hack(place, *changes):
    source = (place / "model.py").read_text()
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    (place / "model.py").write_text(source)


def run(place, arms, *flags, processes=0, V=32):
    (place / "mine.py").write_text(f"{CONFIG}arms = {arms}\ncontrasts = [('B', 'A')]\nvocab_size = {V}\n")
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes else []
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    both = "import train, analyze; train.main(['mine.py']); analyze.main(['runs', 'out/mine'])"
    for command in ([*torchrun, "train.py", "mine.py", *flags],) if flags else (["-c", both],):
        done = subprocess.run(
            [sys.executable, *command], cwd=place, env=env, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr
        if flags:  # another output folder
            return None
    report = json.loads((place / "out/mine/report.json").read_text())
    assert report["status"] == "confirmatory" and report["audit"]["checked"] == 2 * len(report["arms"])
    return report


def losses(place, arm, out="out/mine"):
    rows = [json.loads(x) for x in (place / out / arm / "seed0/log.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def test_readmes_own_hack_qk_norm_and_a_rezero_gate(copy):
    """
    README's hack as it prints it, a field, a line and a config; and two that people ask for, beside it.

    S11: the gate starts as the zero that was written, so that arm starts as the identity and is no baseline.
    """
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    field, line = (x for x in blocks[0].splitlines() if "v_scale" in x)
    assert "v_scale" in blocks[1] and "contrasts" in blocks[1]
    attend = "        y = F.scaled_dot_product_attention(\n"
    qk_norm = "        q, k = (F.rms_norm(x, x.shape[-1:]) if self.config.qk_norm else x for x in (q, k))\n"
    gated = BLOCK.replace("c.attn_gain", "gate[0]").replace("c.ffn_gain", "gate[1]").replace("join", "gated")
    gated = "        gate = self.gate if c.rezero else (c.attn_gain, c.ffn_gain)\n" + gated
    mlp = "        self.mlp = MLP(config)\n"
    hack(
        copy,
        (FLAG, f"{field}\n    qk_norm: bool = False\n    rezero: bool = False\n{FLAG}"),
        (attend, f"{line}\n{qk_norm}{attend}"),
        (mlp, mlp + "        self.gate = nn.Parameter(torch.zeros(2))\n"),
        (BLOCK, gated),
        ("class Block", "def gated(x, branch, residual, gain):\n    return x + gain * branch\n\n\nclass Block"),
    )
    report = run(copy, "{'A': {}, 'B': {'v_scale': 3 * 0.1}, 'C': {'qk_norm': True}, 'D': {'rezero': True}}")
    assert report["arms"]["B"]["settings"] == {"v_scale": 0.30000000000000004}
    assert "| v_scale=0.3 " in (copy / "out/mine/report.md").read_text()
    assert len({tuple(losses(copy, arm)) for arm in "ABCD"}) == 4
    ends = {arm: torch.load(copy / f"out/mine/{arm}/seed0/ckpt.pt", weights_only=True)["model"] for arm in "AD"}
    assert not ends["A"]["h.0.gate"].any() and (ends["D"]["h.0.gate"] != 0).all()


def test_c1_a_part_that_is_left_out_trains_under_torchrun_as_on_one_process(copy):
    """Its parameters get no gradient, for which DDP would wait."""
    first, second = BLOCK.splitlines(keepends=True)
    left_out = first + "        if not c.mlp:\n            return x\n" + second
    hack(copy, (FLAG, f"    mlp: bool = True\n{FLAG}"), (BLOCK, left_out))
    arms = "{'A': {}, 'B': {'mlp': False}}"
    run(copy, arms)
    run(copy, arms, "--out_dir=out/two", "--seeds=0", processes=2)
    for arm in "AB":
        one, two = losses(copy, arm), losses(copy, arm, "out/two")
        assert len(one) == 20 and one == pytest.approx(two, abs=1e-5)
    assert losses(copy, "A") != losses(copy, "B")


def test_a_soft_cap_of_the_logits_with_a_large_vocabulary(copy):
    """Above 8,192 tokens the loss is fused, which must not pass the hack by."""
    plain = "        return self.lm_head(x)\n"
    capped = "        x = self.lm_head(x)\n        return 0.1 * torch.tanh(x / 0.1) if self.config.cap else x\n"
    hack(copy, (FLAG, f"    cap: bool = False\n{FLAG}"), (plain, capped))
    run(copy, "{'A': {}, 'B': {'cap': True}}", V=9000)
    code = """
import sys, json, torch, model
m = model.GPT(model.GPTConfig(block_size=16, vocab_size=9000, n_layer=2, n_head=2, n_embd=16, cap=True), 0)
ids = torch.arange(34).view(2, 17) % 32
with torch.no_grad():
    x = m.wte(ids[:, :-1]) + m.wpe.weight[:16]
    for block in m.h:
        x = block(x, None, None)
    logits = 0.1 * torch.tanh(m.lm_head(m.ln_f(x)) / 0.1)
    slow = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
print(json.dumps([float(slow), float(m(ids[:, :-1], ids[:, 1:], reduction="mean")[1])]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True, check=True)
    slow, fast = json.loads(done.stdout)
    assert fast == pytest.approx(slow, abs=1e-5) and losses(copy, "A")[0] != losses(copy, "B")[0]
