"""train.py: one config in, the same bits out, whatever happens on the way."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import configurator
import prepare
import train
from configurator import UserError
from model import GPT

ROOT = Path(__file__).parent.parent
CONFIG = """
dataset = "toy"
n_layer, n_head, n_embd, block_size = 2, 2, 16, 16
bias = False
batch_size = 8
max_iters = 40
learning_rate = 3e-3
warmup_iters = 5
eval_interval = 20
log_interval = 1
checkpoint_interval = 10
device = "cpu"
arms = {"Full": {}, "FFNOnly": {"attn_residual": False}, "Self": {"removal": "self"}}
seeds = range(2)
contrasts = [("FFNOnly", "Full"), ("Self", "Full"), ("FFNOnly", "unigram")]
"""
WORDS = "the cat sat on a mat and saw that the rat ate all of it at last\n"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with data/toy and toy.py, the current one while a test runs."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    text = " ".join(rng.choice(WORDS.split(), 1500))
    Path("toy.txt").write_text(text)
    prepare.main(["toy.txt"])
    Path("toy.py").write_text(CONFIG)
    return tmp_path


def run(*flags):
    train.main(["toy.py", *flags])


def command(*flags, torchrun=0, **env):
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={torchrun}"]
    program = (program if torchrun else [sys.executable]) + [str(ROOT / "train.py"), "toy.py", *flags]
    return program, {**os.environ, "OMP_NUM_THREADS": "1", **env}


def call(*flags, torchrun=0, **env):
    program, env = command(*flags, torchrun=torchrun, **env)
    return subprocess.run(program, env=env, capture_output=True, text=True, timeout=120)


def ckpt(out, arm="Full", seed=0):
    return torch.load(Path(out) / arm / f"seed{seed}" / "ckpt.pt", weights_only=True)


def rows(out, arm="Full", seed=0, timeless=True):
    lines = (Path(out) / arm / f"seed{seed}" / "log.jsonl").read_text().splitlines()
    times = ("tokens_per_second", "seconds") if timeless else ()
    return [{k: v for k, v in json.loads(x).items() if k not in times} for x in lines]


def fingerprint(out, arm="Full", seed=0):
    c = ckpt(out, arm, seed)
    return train.digest([c["model"], c["window_losses"], c["training_path_loss"]])


def test_batch_against_a_slow_loop():
    tokens = np.arange(100, dtype=np.uint16)
    b = train.batch(tokens, 3, 7, 5, 10)
    assert b.shape == (5, 11) and b.dtype == torch.int64
    key = hashlib.sha256(repr((3, "batch", 7)).encode()).digest()
    g = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
    for row in range(5):
        start = int(torch.randint(90, (1,), generator=g))
        assert b[row].tolist() == [start + j for j in range(11)]
    assert torch.equal(b, train.batch(tokens, 3, 7, 5, 10))
    assert not torch.equal(b, train.batch(tokens, 3, 8, 5, 10))
    assert not torch.equal(b, train.batch(tokens, 4, 7, 5, 10))


def test_batches_reach_both_ends_of_the_text():
    starts = torch.cat([train.batch(np.arange(20, dtype=np.uint16), 0, s, 50, 10)[:, 0] for s in range(20)])
    assert starts.min() == 0 and starts.max() == 9  # 9 + 10 = 19, the last token


def test_learning_rate_by_hand():
    c = train.Config(learning_rate=1.0, min_lr=0.1, warmup_iters=4, lr_decay_iters=14, max_iters=20)
    rates = [train.learning_rate(c, s) for s in range(20)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[9] == pytest.approx(0.55)  # half way down the cosine
    assert rates[14:] == pytest.approx([0.1] * 6)
    c.decay_lr = False
    assert train.learning_rate(c, 0) == 1.0


def test_decay_is_on_matrices_only(place):
    config = train.read_config("toy.py", {"weight_decay": 0.25})
    config.vocab_size = 17
    config.bias = True
    model = train.first_model(config, "Full", 0)
    decays = {id(p): g["weight_decay"] for g in train.make_optimizer(model, config).param_groups for p in g["params"]}
    assert {n: decays[id(p)] for n, p in model.named_parameters()} == {
        n: 0.25 if p.dim() == 2 else 0.0 for n, p in model.named_parameters()
    }


def test_every_arm_starts_alike_and_sees_the_same_batches(place, monkeypatch):
    flags = [
        {}, {"attn_residual": False}, {"ffn_residual": False}, {"removal": "self"}, {"removal": "fixed"},
        {"removal": "rotated"}, {"removal": "previous"}, {"routing": False}, {"self_bias": 4.0}, {"attn_gain": 0.5},
    ]  # fmt: skip
    Path("toy.py").write_text(CONFIG + f"arms = dict(zip('abcdefghij', {flags}))\ncontrasts = []\nmax_iters = 3\n")
    seen = {}
    plain_forward = GPT.forward

    def forward(self, idx, targets=None, reduction=None):
        if targets is not None and reduction != "none":
            seen.setdefault(id(self), []).append(hashlib.sha256(idx.numpy().tobytes()).hexdigest())
        elif id(self) not in seen and targets is not None:  # the evaluation before the first step
            weights = [p for _, p in self.named_parameters()]
            seen[id(self)] = [train.digest(weights)]
            kept.append(self)
        return plain_forward(self, idx, targets, reduction)

    kept = []  # ids stay unique as long as the models live
    monkeypatch.setattr(GPT, "forward", forward)
    run("--seeds=0")
    assert len(seen) == 10 and {len(s) for s in seen.values()} == {5}  # weights, 3 batches, the audit's batch
    assert len({tuple(s) for s in seen.values()}) == 1


def test_same_command_same_bits_and_what_must_not_matter(place):
    run("--out_dir=a")
    prints = {(arm, seed): fingerprint("a", arm, seed) for arm in ("Full", "FFNOnly", "Self") for seed in range(2)}
    assert len(set(prints.values())) == 6
    # other arms and seeds in another order, other intervals
    text = CONFIG.replace(
        '"Full": {}, "FFNOnly": {"attn_residual": False}', '"FFNOnly": {"attn_residual": False}, "Full": {}'
    )
    Path("toy.py").write_text(text + "seeds = [1, 5]\n")
    run("--out_dir=b", "--eval_interval=7", "--log_interval=3", "--checkpoint_interval=9")
    for arm in ("Full", "FFNOnly", "Self"):
        assert fingerprint("b", arm, 1) == prints[arm, 1]
    # one arm alone, in another process
    Path("toy.py").write_text(CONFIG + "arms = {'Self': {'removal': 'self'}}\ncontrasts = []\n")
    threads = str(torch.get_num_threads())
    assert call("--out_dir=c", "--seeds=1", OMP_NUM_THREADS=threads).returncode == 0
    assert fingerprint("c", "Self", 1) == prints["Self", 1]


def test_what_a_run_leaves(place):
    run("--seeds=1", "--arms=Self")
    c, log = ckpt("out/toy", "Self", 1), rows("out/toy", "Self", 1, timeless=False)
    assert (c["arm"], c["seed"], c["step"], c["status"]) == ("Self", 1, 40, "finished")
    assert "optimizer" not in c and c["config"]["removal"] == "self" and c["config"]["n_embd"] == 16
    assert [i for i, _ in c["val_history"]] == [0, 20, 40]
    assert [r["iter"] for r in log] == list(range(41))
    assert {"iter", "loss", "lr", "grad_norm", "tokens_per_second", "val_loss"} == set(log[20])
    last = log[-1]
    assert last["status"] == "finished" and last["val_loss"] == pytest.approx(np.mean(last["window_losses"]), abs=1e-12)
    assert last["window_losses"] == c["window_losses"].tolist()
    assert last["config"] == c["config"] and last["source"] == c["source"] and last["data"] == c["data"]
    assert sorted(p.name for p in Path("out/toy/Self/seed1").iterdir()) == ["ckpt.pt", "log.jsonl"]
    # the windows again, by hand
    model = GPT.from_checkpoint("out/toy/Self/seed1")
    assert model.config.removal == "self" and not model.training
    val = np.fromfile("data/toy/val.bin", "<u2").astype(np.int64)
    for k in (0, 3, len(last["window_losses"]) - 1):
        w = torch.from_numpy(val[16 * k : 16 * k + 17])[None]
        with torch.no_grad():
            assert float(model(w[:, :-1], w[:, 1:])[1]) == pytest.approx(last["window_losses"][k], abs=1e-5)
    assert len(last["window_losses"]) == (len(val) - 1) // 16
    # and it is skipped the next time
    before = (Path("out/toy/Self/seed1/ckpt.pt")).stat().st_mtime_ns
    run("--seeds=1", "--arms=Self")
    assert (Path("out/toy/Self/seed1/ckpt.pt")).stat().st_mtime_ns == before


def test_the_plan_is_written_first_and_whole(place):
    run("--plan")
    plan = json.loads(Path("out/toy/plan.json").read_text())
    assert list(plan["arms"]) == ["Full", "FFNOnly", "Self"] and plan["seeds"] == [0, 1] and plan["amendments"] == []
    assert plan["contrasts"] == [["FFNOnly", "Full"], ["Self", "Full"], ["FFNOnly", "unigram"]]
    assert plan["config"]["dtype"] == "float32" and plan["config"]["vocab_size"] == len(
        set(Path("toy.txt").read_text())
    )
    assert plan["source"]["model.py"]["bytes"] == hashlib.sha256((ROOT / "model.py").read_bytes()).hexdigest()
    assert plan["data"]["val_sha256"] == hashlib.sha256(Path("data/toy/val.bin").read_bytes()).hexdigest()
    assert not list(Path("out/toy").glob("*/seed*"))
    mean = plan["references"]["unigram"]
    assert mean == pytest.approx(np.mean(plan["reference_windows"]["unigram"])) and 1 < mean < 4


def test_gradient_accumulation_changes_only_the_order_of_sums(place):
    run("--out_dir=a", "--seeds=0", "--max_iters=20")
    run("--out_dir=b", "--seeds=0", "--max_iters=20", "--micro_batch_size=2")
    for arm in ("Full", "FFNOnly", "Self"):
        a, b = ([r["loss"] for r in rows(out, arm)[:-1]] for out in "ab")
        assert len(a) == 20 and a == pytest.approx(b, abs=1e-5)


def test_two_processes_take_the_same_steps(place):
    """T2: two gloo processes with accumulation, uneven windows; losses to 1e-5, the same bits on both ranks."""
    run("--out_dir=one", "--seeds=0", "--max_iters=20")
    Path("ranks.py").write_text(  # train.py that also notes the weights of each rank, whenever it validates
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import train; real = train.window_losses\n"
        "def seen(model, windows, rank, world):\n"
        "    print(train.digest(dict(model.named_parameters())), file=open(f'rank{rank}', 'a'))\n"
        "    return real(model, windows, rank, world)\n"
        "train.window_losses = seen; train.experiment(sys.argv[1:])\n"
    )
    program, env = command("--out_dir=two", "--seeds=0", "--max_iters=20", "--micro_batch_size=2", torchrun=2)
    program[program.index(str(ROOT / "train.py"))] = "ranks.py"
    done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for arm in ("Full", "FFNOnly", "Self"):
        a, b = ([r["loss"] for r in rows(out, arm)[:-1]] for out in ("one", "two"))
        assert len(a) == 20 and a == pytest.approx(b, abs=1e-5)
        one, two = ckpt("one", arm), ckpt("two", arm)
        assert two["processes"] == 2 and one["window_losses"].shape == two["window_losses"].shape
        assert one["window_losses"].tolist() == pytest.approx(two["window_losses"].tolist(), abs=1e-4)
    ranks = [Path(f"rank{r}").read_text().split() for r in (0, 1)]
    assert ranks[0] == ranks[1] and len(set(ranks[0])) == 4 and len(ranks[0]) % 3 == 0  # one start, three ends


def killed_at(step, *flags):
    """Start the command and kill it when the saved log of Full, seed 0, has reached a step."""
    program, env = command(*flags)
    process = subprocess.Popen(program, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    out = next(f.split("=")[1] for f in flags if f.startswith("--out_dir"))
    log = Path(out, "Full/seed0/log.jsonl")
    for _ in range(6000):
        if log.exists() and len(log.read_text().splitlines()) > step:
            break
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.005)
    process.kill()
    process.wait()


def test_a_killed_run_resumes_to_the_bit(place, capsys):
    """T4, T5: tiny text, several kills, every step once in the log, the same weights."""
    Path("small.txt").write_text("abcdefghij " * 50)
    prepare.main(["small.txt"])  # 3 windows
    flags = [
        "--dataset=small",
        "--arms=Full",
        "--seeds=0",
        "--max_iters=400",
        "--dropout=0.1",
        "--checkpoint_interval=7",
    ]
    run("--out_dir=calm", *flags)
    for step in (11, 200):
        killed_at(step, "--out_dir=rough", *flags)
        assert Path("rough/Full/seed0/lock").exists() and not Path("rough/Full/seed0/ckpt.pt").exists()
    run("--out_dir=rough", *flags)  # the run of a killed process is taken over at once
    assert "resumes at step" in capsys.readouterr().out
    assert fingerprint("rough") == fingerprint("calm")
    assert rows("rough") == rows("calm")
    assert not list(Path("rough/Full/seed0").glob("*.tmp"))


def damaged(state):
    """T7: files that a loader might swallow. Yields (what, bytes or object)."""
    for key in list(state):
        yield f"no {key}", {k: v for k, v in state.items() if k != key}
    moments = {k: dict(v) for k, v in state["optimizer"]["state"].items()}
    del moments[0]["exp_avg"]
    yield "no moment", state | {"optimizer": state["optimizer"] | {"state": moments}}
    yield "another step", state | {"step": 30}
    weights = {k: v.clone() for k, v in state["model"].items()}
    weights["wte.weight"][0, 0] += 1
    yield "another weight", state | {"model": weights}


def test_a_damaged_state_restarts_the_run(place, capsys):
    flags = ["--arms=Full", "--seeds=0", "--max_iters=25"]
    run("--out_dir=calm", *flags)
    killed_at(9, "--out_dir=rough", *flags, "--max_iters=25")
    path = Path("rough/Full/seed0/state.pt")
    good = path.read_bytes()
    record = torch.load(path, weights_only=True)["record"]
    assert train.load_state(path.parent, record)["step"] in (10, 20)
    whole = torch.load(path, weights_only=True)
    capsys.readouterr()
    for what, state in damaged(whole):
        torch.save(state, path)
        assert train.load_state(path.parent, record) is None, what
        assert "starts from its beginning" in capsys.readouterr().out
    middle = len(good) // 2
    flipped = bytes(b ^ 255 if middle <= i < middle + 64 else b for i, b in enumerate(good))
    for data in (good[: len(good) // 2], b"", b"\x80\x04N.", flipped):
        path.write_bytes(data)
        assert train.load_state(path.parent, record) is None
    assert train.load_state(path.parent, record | {"config": record["config"] | {"beta1": 0.5}}) is None
    run("--out_dir=rough", *flags)
    assert "starts from its beginning" in capsys.readouterr().out
    assert rows("rough") == rows("calm")


def test_a_state_that_was_rewritten_with_care_is_not_resumed(place, capsys):
    """Its seal is in another file, and of a run with dropout the number of processes counts."""
    killed_at(9, "--out_dir=x", "--arms=Full", "--seeds=0", "--max_iters=800", "--dropout=0.1")
    path = Path("x/Full/seed0/state.pt")
    state = torch.load(path, weights_only=True)
    record = state["record"]
    assert record["processes"] == 1 and train.load_state(path.parent, record)["step"] == state["step"]
    assert train.load_state(path.parent, record | {"processes": 2}) is None
    assert "masks of other processes" in capsys.readouterr().out
    torch.save(state | {"step": 700}, path)
    assert train.load_state(path.parent, record) is None
    torch.save(state, path)
    (path.parent / "state.sha256").unlink()
    assert train.load_state(path.parent, record) is None


def test_a_diverged_run_is_kept_and_the_rest_goes_on(place):
    run("--learning_rate=1e30", "--min_lr=1e30", "--seeds=0", "--grad_clip=0.0", "--arms=Full,FFNOnly")
    for arm in ("Full", "FFNOnly"):
        c, last = ckpt("out/toy", arm), rows("out/toy", arm)[-1]
        assert c["status"] == last["status"] == "diverged" and c["step"] < 40
        assert last["val_loss"] is None and last["window_losses"] is None


def test_two_writers_where_locks_do_not_work(place, monkeypatch, capsys):
    """T12b: such a place is refused; and of two machines that don't see each other's locks the second says so."""
    with monkeypatch.context() as patch:
        patch.setattr(configurator.fcntl, "flock", lambda *a: None)
        with pytest.raises(UserError, match="x is on a file system without working locks.*one lock.*--out_dir"):
            run("--out_dir=x")
    with monkeypatch.context() as patch:
        patch.setattr(configurator.os, "link", lambda *a: os.stat("/nowhere"))
        with pytest.raises(UserError, match="x is on a file system without working locks"):
            run("--out_dir=x")
    assert not list(Path("x").iterdir())
    run("--out_dir=x", "--arms=Full", "--seeds=0")
    first = {p.name: p.read_bytes() for p in Path("x/Full/seed0").iterdir()}
    train_run, done = train.train_run, Path("x/Full/seed0/ckpt.pt").read_bytes()

    def late(*a):  # the other process ends this run while we are in it
        Path("x/Full/seed0/ckpt.pt").write_bytes(done)
        return train_run(*a)

    Path("x/Full/seed0/ckpt.pt").unlink()
    monkeypatch.setattr(train, "train_run", late)
    run("--out_dir=x", "--arms=Full", "--seeds=0")
    assert "another process has finished this run" in capsys.readouterr().out
    assert {p.name: p.read_bytes() for p in Path("x/Full/seed0").iterdir() if p.suffix != ""} == first


def test_a_plan_binds(place, capsys):
    run("--seeds=0", "--arms=Full")
    before = Path("out/toy/plan.json").read_bytes()
    with pytest.raises(UserError, match="plans another experiment.*--out_dir.*--amend"):
        run("--seeds=0", "--learning_rate=1e-3", "--margin=0.5")
    said = capsys.readouterr().out
    assert "config.learning_rate: planned 0.003, now 0.001" in said and "margin: planned 0.02, now 0.5" in said
    assert Path("out/toy/plan.json").read_bytes() == before
    run("--seeds=0", "--arms=Full", "--log_interval=5")  # what can't move a bit may change
    run("--seeds=0", "--learning_rate=1e-3", "--amend=too fast", "--plan")
    plan = json.loads(Path("out/toy/plan.json").read_text())
    assert plan["config"]["learning_rate"] == 1e-3 and plan["time"] == json.loads(before)["time"]
    (note,) = plan["amendments"]
    assert note["reason"] == "too fast" and note["changes"] == ["config.learning_rate: planned 0.003, now 0.001"]
    Path("toy.txt").write_text("other text " * 300)
    prepare.main(["toy.txt"])
    with pytest.raises(UserError, match="plans another experiment"):
        run("--learning_rate=1e-3")
    assert "data.train_sha256: planned" in capsys.readouterr().out


BAD = [
    (["--learning_rte=1"], "unknown flag --learning_rte, did you mean --learning_rate?"),
    (["--max_iters=ten"], "--max_iters='ten' is of type str, it must be int"),
    (["--compile=1"], "compile='1' must be one of True, False, auto"),
    (["--device"], "--device needs a value"),
    (["--batch_size=8", "--micro_batch_size=3"], "micro_batch_size=3 does not divide a process's 8 sequences"),
    (["--block_size=2000"], "tokens are too few for one window of 2000"),
    (["--block_size=200000"], "too few for block_size=200000"),
    (["--arms=Ful"], "did you mean Full?"),
    (["--seeds=0-9"], "'2' is not so"),
    (["--seeds=0-99999999999"], "'0-99999999999' is not so"),
    (["--seeds=0,0"], "each once"),
    (["--out_dir="], "out_dir must not be empty"),
    (["--eval_tokens=0"], "eval_tokens=0 must be at least 1"),
    (["--learning_rate=1e999"], "learning_rate=inf must be finite"),
    (["--beta1=1.0"], "must be below 1"),
    (["--threads=0"], "threads=0 must be auto, or a number from 1 on"),
    (["--jobs=0"], "--jobs=0 must be at least 1"),
    (["--dataset=shakespeare"], "run `python prepare.py shakespeare` first"),
    (["--removal=selfish"], "removal='selfish' must be one of"),
    (["--init_from=no-such-model"], "init_from: pretrained model 'no-such-model' can't be read"),
    (["--device=cuda"] if not torch.cuda.is_available() else ["--device=gpu"], "device="),
    (["--out_dir=toy.txt"], "toy.txt"),
]


@pytest.mark.parametrize("flags, message", BAD, ids=[" ".join(f) for f, _ in BAD])
def test_bad_flags(place, flags, message, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises((UserError, OSError), match=re.escape(message)):
        run(*flags)
    assert not list(Path(".").glob("**/plan.json")) or "init_from" in message


CONFIGS = [
    ("learning_rte = 1", "unknown name learning_rte in toy.py, did you mean learning_rate?"),
    ("batch_size = 'x'", "batch_size='x' is of type str, it must be int"),
    ("contrasts = [('Full', 'FFNonly')]", "no arm is called 'FFNonly', did you mean FFNOnly?"),
    ("contrasts = [('unigram', 'Full')]", "no arm is called 'unigram'"),
    ("arms = {'A': {}, 'A': {'bias': True}}", "names 'A' twice in one dict"),
    ("arms = {'A': {}, 'a': {'bias': True}}\ncontrasts = []", "its folder has the name of another arm"),
    ("arms = {'A': {'attn_residul': False}}\ncontrasts = []", "which no arm sets, did you mean attn_residual?"),
    ("arms = {'A': {'attn_residual': 0}}\ncontrasts = []", "attn_residual=0 is of type int, it must be bool"),
    ("arms = {'Short': {'block_size': 8}}\ncontrasts = []", "arm Short sets 'block_size'"),
    ("arms = {'A': {'learning_rate': -1.0}}\ncontrasts = []", "arm A: learning_rate=-1.0 must be at least 0"),
    ("arms = {'X': {1: 2}}\ncontrasts = []", "arm X sets 1, which no arm sets"),  # C3
    ("arms = {'../x': {}}\ncontrasts = []", "a name is letters"),
    ("arms = {'x': {'routing': False, 'removal': 'self'}}\ncontrasts = []", "arm x: routing=False"),
    ("seeds = [0, 0]", "must be an integer from 0 on, and there once"),
    ("x = 1 / 0", "config toy.py, line 1"),
    ("def f(:", "config toy.py, line 1"),
    ("raise SystemExit(3)", "config toy.py, line"),
    ("margin = 0", "margin=0.0 must be positive"),
    ("contrasts = [5]", "must be two names or two pairs"),
    ("contrasts = ['AB']", "must be two names or two pairs"),
    ("contrasts = [('FFNOnly', 'Full', (2, 1))]", "perhaps the interval that is predicted"),
    ("contrasts = [('FFNOnly', 'Full', (0, float('nan')))]", "perhaps the interval that is predicted"),
    ("contrasts = [('FFNOnly', 'Full'), ('FFNOnly', 'Full', (0, 1))]", "is planned twice"),
    ("contrasts = [(('FFNOnly', 'Full'), ('Self', 'unigram'))]", "no arm is called 'unigram'"),
    ("contrasts = [(('FFNOnly', 'Full'), 'Self')]", "must be two names or two pairs"),
    ("contrasts = [('F*', 'Full')]", "'F*' chooses an arm, and that needs tune_seeds"),
    ("contrasts = [('G*', 'Full')]", "no arm is called like 'G*'"),
    ("looks = ('2', 2)", "must rise from 2"),
    ("arms = {'A': {'self_bias': [5]}}\ncontrasts = []", "arm A: self_bias=[5] must be a number, or points"),
    ("looks = (2, 3)", "must rise from 2 or more to the number of seeds, which is 2"),
    ("arms = {'plan.json': {}}\ncontrasts = []", "or of a file of ours"),
]


@pytest.mark.parametrize("text, message", CONFIGS, ids=[t.splitlines()[0] for t, _ in CONFIGS])
def test_bad_configs(place, text, message):
    Path("toy.py").write_text(
        text + "\n" + ("" if "arms" in text or "config toy.py, line" in message else CONFIG) + "\n" + text
    )
    with pytest.raises(UserError, match=re.escape(message)):
        run()
    assert not Path("out").exists()


def test_ints_are_floats_where_floats_are_due(place):
    config = train.read_config("toy.py", {"learning_rate": 1, "grad_clip": 2})
    assert config.learning_rate == 1.0 and type(config.learning_rate) is float
    with pytest.raises(UserError, match="must be int"):
        train.read_config("toy.py", {"max_iters": 1.5})


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_token_outside_the_vocabulary_is_found_anywhere(place, split):
    """T1: only the last token of a file is wrong, and its checksum is right."""
    path = Path(f"data/toy/{split}.bin")
    tokens = np.fromfile(path, "<u2")
    tokens[-1] = 70
    tokens.tofile(path)
    meta = json.loads(Path("data/toy/meta.json").read_text())
    meta["sha256"][split] = hashlib.sha256(path.read_bytes()).hexdigest()
    Path("data/toy/meta.json").write_text(json.dumps(meta))
    where = (
        f"{split}.bin holds token id 70 at position {len(tokens) - 1}, outside the vocabulary of {meta['vocab_size']}"
    )
    with pytest.raises(UserError, match=where):
        run()
    assert not Path("out").exists()


def test_files_of_nanogpt(place):
    Path("data/toy/meta.json").unlink()
    with pytest.raises(UserError, match="say --vocab_size=N"):
        run()
    with pytest.raises(UserError, match="outside the vocabulary of 5 tokens"):
        run("--vocab_size=5")
    run("--vocab_size=32", "--arms=Full", "--seeds=0")
    assert ckpt("out/toy")["model"]["wte.weight"].shape == (32, 16)


def test_errors_on_the_command_line(place):
    done = call("--learning_rte=1")
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    program, env = command()
    program[-1] = "config/dmeo.py"
    done = subprocess.run(program, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == "error: config config/dmeo.py is no file\n"
    assert not Path("out").exists()


def test_every_config_of_the_project_is_read():
    for path in sorted((ROOT / "config").glob("*.py")):
        config = train.read_config(str(path), {})
        assert config.contrasts and config.batch_size % (config.micro_batch_size or 1) == 0
    c = train.read_config(str(ROOT / "config/self_value_51m.py"), {})
    assert c.max_iters * c.batch_size * c.block_size == 399_900_672
    assert list(c.arms) == ["baseline", "self", "fixed"] and len(c.seeds) == 8
    c.vocab_size = 50304
    n = sum(p.numel() for n, p in train.first_model(c, "baseline", 0).named_parameters() if n != "wpe.weight")
    assert round(n / 1e6, 1) == 50.9


def test_routing_1m_contains_residual_1m():
    a, b = (vars(train.read_config(str(ROOT / f"config/{n}_1m.py"), {})) for n in ("residual", "routing"))
    assert len(b["arms"]) == 12 and all(b["arms"][k] == v for k, v in a["arms"].items())
    assert {k for k in a if a[k] != b[k]} == {"arms", "seeds", "contrasts", "out_dir"}


def test_dropout_of_an_arm_is_seeded(place):
    """The same run alone, after another, and resumed: the same bits, and a training path without dropout."""
    Path("toy.py").write_text(CONFIG + "arms = {'Full': {}, 'Drop': {'dropout': 0.3}}\ncontrasts = []\n")
    run("--out_dir=a")
    run("--out_dir=b", "--seeds=1", "--arms=Drop")
    assert fingerprint("a", "Drop", 1) == fingerprint("b", "Drop", 1)
    c = ckpt("a", "Drop")
    model = GPT.from_checkpoint("a/Drop/seed0/ckpt.pt")
    w = c["training_path_batch"].long()
    with torch.no_grad():
        assert float(model(w[:, :-1], w[:, 1:])[1]) == pytest.approx(c["training_path_loss"], abs=1e-6)


def test_the_state_of_another_seed_is_not_resumed(place, capsys):
    killed_at(9, "--out_dir=x", "--arms=Full", "--seeds=0", "--max_iters=800")
    state = Path("x/Full/seed0/state.pt")
    record = torch.load(state, weights_only=True)["record"]
    assert train.load_state(state.parent, record) is not None
    assert train.load_state(state.parent, record | {"seed": 1}) is None
    assert train.load_state(state.parent, record | {"arm": "Self"}) is None
    assert "belongs to another run" in capsys.readouterr().out


def test_references_do_not_depend_on_the_padding_of_the_vocabulary(place):
    run("--plan")
    run("--plan", "--vocab_size=128", "--out_dir=out/wide")
    plain, wide = (json.loads(Path(f"out/{name}/plan.json").read_text()) for name in ("toy", "wide"))
    assert wide["config"]["vocab_size"] == 128 and wide["references"] == plain["references"]


def test_compile_where_it_does_not_work(place, monkeypatch, capsys):
    """C7: auto says so in a line and runs eagerly; True is refused before anything is written."""
    monkeypatch.setattr(torch, "compile", lambda f: (_ for _ in ()).throw(RuntimeError("no compiler\nat all")))
    with pytest.raises(UserError, match="torch.compile does not work on this machine"):
        run("--compile=True")
    assert not Path("out").exists()
    monkeypatch.setattr(train, "bfloat16_gain", lambda: 2.0)
    run("--n_embd=256", "--max_iters=200", "--plan")
    assert "torch.compile does not work here: no compiler at all" in capsys.readouterr().out
    config = json.loads(Path("out/toy/plan.json").read_text())["config"]
    assert (config["dtype"], config["compile"]) == ("bfloat16", False)


def test_auto_takes_what_is_faster_and_then_what_the_plan_says(place, monkeypatch):
    """C7: where bfloat16 is supported and slower, float32; a later, slower moment changes nothing."""
    monkeypatch.setattr(train, "bfloat16_gain", lambda: 0.6)
    run("--n_embd=256", "--plan")
    monkeypatch.setattr(train, "bfloat16_gain", lambda: 9.0)
    run("--n_embd=256", "--plan")
    config = json.loads(Path("out/toy/plan.json").read_text())["config"]
    assert (config["dtype"], config["compile"]) == ("float32", False)


def test_a_plan_after_the_runs_is_no_plan(place):
    run("--seeds=0", "--arms=Full")
    Path("out/toy/plan.json").unlink()
    with pytest.raises(UserError, match="holds runs and no plan.json"):
        run("--margin=0.5")
    run("--margin=0.5", "--plan", "--amend=lost the file")
    (note,) = json.loads(Path("out/toy/plan.json").read_text())["amendments"]
    assert note["changes"] == ["the plan was written after runs had begun"]


def test_l1_a_signal_that_is_forwarded_twice_is_one(place):
    """Slurm, torchrun and a shell each forward it; either of the two, a moment later, changes nothing."""
    for first, second in ((signal.SIGTERM, signal.SIGINT), (signal.SIGINT, signal.SIGTERM)):
        out = f"s{int(first)}"
        program, env = command("--max_iters=100000", "--checkpoint_interval=100000", f"--out_dir={out}")
        process = subprocess.Popen(program, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for line in process.stdout:
            if "step 20/" in line:
                break
        process.send_signal(first)
        process.send_signal(second)
        said, err = process.communicate(timeout=60)
        assert process.returncode in (130, 143) and "the same command resumes it" in said and "Traceback" not in err
        state = torch.load(f"{out}/Full/seed0/state.pt", weights_only=True)
        assert state["step"] > 20 and len(rows(out)) == state["step"]


def test_a_further_signal_after_ten_seconds_ends_the_process(monkeypatch):
    ended = []
    monkeypatch.setattr(configurator, "STOP", {"signal": 0, "time": 0.0})
    monkeypatch.setattr(configurator.signal, "signal", lambda *a: None)
    monkeypatch.setattr(configurator.os, "kill", lambda pid, number: ended.append(number))
    for now, expected in ((100.0, []), (100.1, []), (109.0, []), (111.0, [15])):
        monkeypatch.setattr(configurator.time, "monotonic", lambda now=now: now)
        configurator.on_signal(15, None)
        assert ended == expected


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_c2_half_an_environment_of_torchrun_is_one_line(place, name, monkeypatch):
    monkeypatch.setenv(name, "0")
    with pytest.raises(UserError, match="use torchrun, or unset them"):
        run("--plan")
    assert not Path("out").exists()


def test_an_error_on_another_rank_is_shown(place):
    done = call("--plan", RANK="3", WORLD_SIZE="4")
    assert done.returncode == 2 and done.stderr.startswith("error (rank 3): LOCAL_RANK is not set")
    assert done.stderr.count("\n") == 1


def test_l3_unfinished_files_are_swept_when_a_run_is_taken_up(place):
    killed_at(9, "--out_dir=x", "--arms=Full", "--seeds=0", "--max_iters=800")
    (Path("x/Full/seed0") / "state.pt.abcd1234.tmp").write_bytes(b"half")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "train_run", lambda *a: swept.append(list(a[5].glob("*.tmp"))) or 1 / 0)
        swept = []
        with pytest.raises(ZeroDivisionError):
            run("--out_dir=x", "--arms=Full", "--seeds=0", "--max_iters=800")
    assert swept == [[]]


def test_an_arm_trains_with_its_own_rate_and_the_others_with_theirs(place):
    own = "arms = {'Full': {}, 'Slow': {'learning_rate': 1e-4, 'min_lr': 1e-5}}\ncontrasts = []\n"
    Path("toy.py").write_text(CONFIG + own)
    run("--out_dir=a", "--seeds=0")
    run("--out_dir=b", "--seeds=0", "--learning_rate=1e-4", "--min_lr=1e-5", "--arms=Full")
    assert [r["lr"] for r in rows("a", "Slow")[:-1]] == [r["lr"] for r in rows("b", "Full")[:-1]]
    assert [r["loss"] for r in rows("a", "Slow")[:-1]] == [r["loss"] for r in rows("b", "Full")[:-1]]
    assert max(r["lr"] for r in rows("a", "Full")[:-1]) == 3e-3
    assert ckpt("a", "Slow")["config"]["learning_rate"] == 1e-4


def test_the_sample_is_text_and_moves_no_bit(place, monkeypatch):
    run("--out_dir=a", "--seeds=0", "--arms=Full")
    last = rows("a")[-1]
    assert len(last["sample"]) == 128 and set(last["sample"]) <= set(Path("toy.txt").read_text())
    assert last["parameters"] == sum(p.numel() for p in GPT.from_checkpoint("a/Full/seed0").parameters())
    assert last["weights_sha256"] == train.digest(ckpt("a")["model"]) and last["threads"] == 1
    assert 0 < rows("a", timeless=False)[-1]["seconds"] < 60
    monkeypatch.setattr(GPT, "generate", lambda self, idx, n, generator: idx)
    run("--out_dir=b", "--seeds=0", "--arms=Full")
    assert fingerprint("a") == fingerprint("b")


def test_adding_seeds_is_answered_with_the_clean_way(place, capsys):
    run("--seeds=0", "--arms=Full")
    Path("out/toy/report.json").write_text(json.dumps({"contrasts": [{"n_for_margin": 12}, {"n_for_margin": None}]}))
    Path("toy.py").write_text(CONFIG + "seeds = range(4)\n")
    with pytest.raises(UserError, match="more seeds are a second experiment.*about 12 seeds would find the margin"):
        run()
    run("--plan", "--amend=more")
    (note,) = json.loads(Path("out/toy/plan.json").read_text())["amendments"]
    assert note["finished"] == ["Full/seed0"] and len(note["binding_sha256"]) == 64
    assert note["binding_sha256"] == ckpt("out/toy")["binding_sha256"]


def test_the_source_may_change_in_comments_alone(place):
    old = Path("a.py")
    old.write_text("x = 1  # one\n\n\ndef f():\n    return x\n")
    first = configurator.source_hashes(old)
    old.write_text("x = 1\n\n\n# a line\ndef f():\n    return x\n")
    second = configurator.source_hashes(old)
    assert first["bytes"] != second["bytes"] and first["code"] == second["code"]
    assert train.differences({"source": {"a.py": first}}, {"source": {"a.py": second}}) == []
    old.write_text("x = 2\n")
    assert (
        len(train.differences({"source": {"a.py": first}}, {"source": {"a.py": configurator.source_hashes(old)}})) == 1
    )


def test_jobs_share_the_runs_and_ctrl_c_stops_them_all(place):
    done = call("--jobs=2", "--out_dir=x", "--max_iters=150", NANOABLATE_JOB="")
    assert done.returncode == 0, done.stderr
    both = done.stdout + Path("x/job1.log").read_text()
    trained = re.findall(r"^(\w+ seed\d): \d", both, re.M)
    assert sorted(trained) == sorted(f"{a} seed{s}" for a in ("Full", "FFNOnly", "Self") for s in (0, 1))
    assert re.search(r"\d runs, \d+ min left", both) and "6 of 6 runs are finished" in done.stdout
    program, env = command("--jobs=2", "--out_dir=y", "--max_iters=100000", "--checkpoint_interval=100000")
    process = subprocess.Popen(program, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while len(list(Path("y").glob("*/seed*/lock"))) < 2:
        time.sleep(0.05)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "stopped and saved" in out + Path("y/job1.log").read_text()
    assert len(list(Path("y").glob("*/seed*/state.pt"))) == 2
