"""What the large experiments need: several processes, pretrained weights, wandb, a batch system, the GPU check."""

import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_train import ROOT, call, ckpt, command, fingerprint, place, rows, run  # noqa: F401  (place is a fixture)

import prepare
import train
from configurator import UserError


def stop_at(monkeypatch, step):
    """train.main saves its state after this step and raises Stopped, as if a signal had come then."""
    rate = train.learning_rate
    monkeypatch.setitem(train.STOP, "signal", 0)  # undone with the rest

    def stopping(config, s):
        train.STOP["signal"] = signal.SIGTERM if s == step else 0
        return rate(config, s)

    monkeypatch.setattr(train, "learning_rate", stopping)


# ---------------------------------------------------------------------------------------------------------------------
# processes


def test_one_two_and_three_processes(place, monkeypatch):  # noqa: F811
    """T2, T4, T11: three batches of windows over 1, 2 and 3 ranks; steps without and with accumulation; a resume."""
    rng = np.random.default_rng(1)
    Path("wide.txt").write_text("".join(rng.choice(list("abcdefgh "), 200_000)))
    prepare.main(["wide.txt"])
    flags = ["--dataset=wide", "--batch_size=12", "--seeds=0", "--max_iters=16", "--eval_tokens=18005"]
    flags.append("--arms=Full,FFNOnly")
    run("--out_dir=one", *flags)
    with monkeypatch.context() as m:
        stop_at(m, 7)
        with pytest.raises(train.Stopped):
            run("--out_dir=two", *flags[:-1], "--arms=Full")
    assert torch.load("two/Full/seed0/state.pt", weights_only=True)["step"] == 8
    two = call("--out_dir=two", *flags, torchrun=2)  # Full goes on from step 8, the others begin
    assert two.returncode == 0, two.stderr
    assert "Full seed0: resumes at step 8" in two.stdout and two.stdout.count("resumes") == 1
    three = call("--out_dir=three", *flags, "--micro_batch_size=2", torchrun=3)
    assert three.returncode == 0, three.stderr
    for out, processes in (("two", 2), ("three", 3)):
        for arm in ("Full", "FFNOnly"):
            a, b = rows("one", arm), rows(out, arm)
            assert [r["iter"] for r in b] == list(range(17))
            assert [r["loss"] for r in a[:-1]] == pytest.approx([r["loss"] for r in b[:-1]], abs=1e-5)
            assert a[0]["val_loss"] == b[0]["val_loss"]  # the same weights: the same bits, however many measure them
            one, other = ckpt("one", arm), ckpt(out, arm)
            assert other["processes"] == processes and other["data"] == one["data"] and other["data"]["windows"] == 1125
            assert torch.allclose(one["window_losses"], other["window_losses"], rtol=0, atol=1e-4)
            assert other["window_losses"].min() > 0  # every window was measured by some rank


# ---------------------------------------------------------------------------------------------------------------------
# pretrained weights


@pytest.fixture
def gpt2(place):  # noqa: F811
    """A small random GPT-2 in the folder gpt2, with the vocabulary of data/toy."""
    from transformers import GPT2Config, GPT2LMHeadModel

    vocab = json.loads(Path("data/toy/meta.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    shape = {"n_positions": 24, "n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": vocab}
    model = GPT2LMHeadModel(GPT2Config(**shape, initializer_range=0.2)).eval()
    model.save_pretrained("gpt2")
    config = Path("toy.py").read_text()
    for line in ("n_layer, n_head, n_embd, block_size = 2, 2, 16, 16\n", "bias = False\n"):
        assert line in config
        config = config.replace(line, "")
    Path("toy.py").write_text(config + 'init_from = "gpt2"\nmax_iters = 12\n')
    return model


def test_every_arm_starts_from_the_pretrained_weights(gpt2, monkeypatch):
    run("--seeds=0", "--block_size=16", "--dropout=0.1")
    w = torch.from_numpy(prepare.windows(np.fromfile("data/toy/val.bin", "<u2"), 16).astype(np.int64))  # (n, T + 1)
    with torch.no_grad():
        theirs = float(gpt2(w, labels=w).loss)  # transformers shifts the labels itself
    assert rows("out/toy")[0]["val_loss"] == pytest.approx(theirs, abs=1e-5)
    plan = json.loads(Path("out/toy/plan.json").read_text())
    shape = {k: plan["config"][k] for k in ("n_layer", "n_head", "n_embd", "bias", "block_size")}
    assert shape == {"n_layer": 3, "n_head": 4, "n_embd": 32, "bias": True, "block_size": 16}
    assert len(plan["data"]["init_from_sha256"]) == 64
    for arm in ("Full", "FFNOnly", "Self"):
        log, c = rows("out/toy", arm), ckpt("out/toy", arm)
        assert c["data"] == plan["data"] and c["model"]["wpe.weight"].shape == (16, 32)
        assert log[-1]["val_loss"] < log[0]["val_loss"]
    assert rows("out/toy", "Self")[0]["val_loss"] != rows("out/toy")[0]["val_loss"]
    # the block size is the model's own where it is not set; a stopped run resumes to the bit
    run("--out_dir=calm", "--seeds=0", "--arms=Self")
    with monkeypatch.context() as m, pytest.raises(train.Stopped):
        stop_at(m, 5)
        run("--out_dir=rough", "--seeds=0", "--arms=Self")
    run("--out_dir=rough", "--seeds=0", "--arms=Self")
    assert ckpt("calm", "Self")["model"]["wpe.weight"].shape == (24, 32)
    assert fingerprint("rough", "Self") == fingerprint("calm", "Self") and rows("rough", "Self") == rows("calm", "Self")
    # all arms have the same parameters, and these weights bind the plan
    config = train.read_config("toy.py", {})
    config.vocab_size = plan["config"]["vocab_size"]
    first = [dict(train.first_model(config, arm, 0).named_parameters()) for arm in config.arms]
    assert len({train.digest(p) for p in first}) == 1
    gpt2.transformer.wte.weight.data[3, 3] += 1e-3
    gpt2.save_pretrained("gpt2")
    with pytest.raises(UserError, match="plans another experiment"):
        run("--seeds=0", "--block_size=16", "--dropout=0.1")
    record = {"data": {"init_from_sha256": train.digest(first[0])}}
    config = train.read_config("toy.py", {"vocab_size": config.vocab_size})
    with pytest.raises(UserError, match="have changed since the plan"):
        train.train_run(config, "Full", 0, {}, record, Path("x"), None)


@pytest.mark.parametrize(
    "flag, message",
    [
        ("--n_layer=2", "init_from: n_layer=2, but pretrained model 'gpt2' has n_layer=3"),
        ("--bias=False", "bias=False, but pretrained model 'gpt2' has bias=True"),
        ("--block_size=25", "block_size=25 is more than the 24 positions of 'gpt2'"),
        ("--n_kv_head=2", "has no grouped queries"),
        ("--dataset=other", "data/other is in characters, 'gpt2' in tokens"),
        ("--init_from=toy.txt", "init_from: pretrained model 'toy.txt' can't be read"),
        ("arms = {'A': {'n_head': 2}}; contrasts = []", "arm A sets 'n_head', which no arm sets"),
    ],
)
def test_what_does_not_fit_the_pretrained_weights(gpt2, flag, message):
    Path("other.txt").write_text("abcde" * 100)
    prepare.main(["other.txt"])
    if not flag.startswith("--"):
        Path("toy.py").write_text(Path("toy.py").read_text() + flag)
    with pytest.raises(UserError, match=message):
        run(*[flag] * flag.startswith("--"))
    assert not Path("out").exists()


# ---------------------------------------------------------------------------------------------------------------------
# wandb


def history(path):
    """The rows of a .wandb file: LevelDB's log format after 7 bytes, with a protocol buffer in each record."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole, found = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no room for a header in this block
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the end of one
            record = Record.FromString(whole)
            whole = b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                found.append({i.key or i.nested_key[0]: json.loads(i.value_json) for i in items})
    return found


def test_wandb_holds_each_step_once(place, monkeypatch):  # noqa: F811
    """T5: checkpoint every 20 steps, SIGKILL at step 33, resume; wandb offline."""
    flags = ["--out_dir=rough", "--arms=Full", "--seeds=0", "--checkpoint_interval=20", "--wandb_log"]
    monkeypatch.setenv("WANDB_MODE", "offline")
    kill = (
        "import os, sys, train\nrate = train.learning_rate\n"
        "train.learning_rate = lambda c, s: os.kill(os.getpid(), 9) if s == 33 else rate(c, s)\n"
        "train.main(sys.argv[1:])"
    )
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": str(ROOT)}
    killed = subprocess.run([sys.executable, "-c", kill, "toy.py", *flags], env={**os.environ, **threads})
    assert killed.returncode == -signal.SIGKILL
    assert [r["iter"] for r in rows("rough")] == list(range(20))
    first = set(Path("wandb").glob("offline-run-*"))
    done = call(*flags, **threads)
    assert done.returncode == 0, done.stderr
    assert "resumes at step 20" in done.stdout and "step must" not in (done.stdout + done.stderr).lower()
    run("--out_dir=calm", *flags[1:-1])  # without wandb
    assert fingerprint("rough") == fingerprint("calm") and rows("rough") == rows("calm")
    (second,) = set(Path("wandb").glob("offline-run-*")) - first
    (file,) = second.glob("*.wandb")
    logged = [
        {k: v for k, v in r.items() if k[0] != "_" and k not in ("tokens_per_second", "seconds")} for r in history(file)
    ]
    assert [r["iter"] for r in logged] == list(range(41))
    kept = ("iter", "val_loss", "loss", "lr", "grad_norm")  # the last row holds the whole record besides
    assert logged == [{k: r[k] for k in kept if k in r} for r in rows("calm")]
    assert "step must" not in "".join(p.read_text().lower() for p in second.glob("logs/*.log"))


def test_without_wandb(place, monkeypatch):  # noqa: F811
    Path("wandb").mkdir()  # offline runs of another machine: no package
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="wandb: .*`pip install wandb`"):
        run("--wandb_log")
    assert not list(Path("out").glob("*/*/log.jsonl"))


# ---------------------------------------------------------------------------------------------------------------------
# a batch system


def test_the_slurm_script(place):  # noqa: F811
    """Without Slurm: its signal sent by hand, and a stand-in for scontrol that writes down what it is asked."""
    Path("bin").mkdir()
    Path("bin/python").write_text(f'#!/bin/sh\nshift\nexec {sys.executable} {ROOT / "train.py"} "$@"\n')
    Path("bin/scontrol").write_text('#!/bin/sh\necho "$@" >> asked\n')
    for file in Path("bin").iterdir():
        file.chmod(0o755)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path('bin').absolute()}:{os.environ['PATH']}"}
    flags = ["--max_iters=100000", "--checkpoint_interval=100000", "--arms=Full"]
    running = []
    for task in (0, 1):
        ids = {"SLURM_JOB_ID": f"1{task}", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": str(task)}
        script = ["sh", str(ROOT / "config/slurm.sh"), "toy.py", f"--seeds={task}", *flags]
        running.append(subprocess.Popen(script, env=env | ids, stdout=subprocess.PIPE, text=True))
    for task, number in enumerate((signal.SIGUSR1, signal.SIGTERM)):  # the time limit; scancel
        for line in running[task].stdout:
            if "step 20/" in line:
                running[task].send_signal(number)  # to the script alone, as --signal=B: does
                break
        out = running[task].communicate(timeout=60)[0]
        assert "stopped and saved at step" in out and running[task].returncode == 143
        assert torch.load(f"out/toy/Full/seed{task}/state.pt", weights_only=True)["step"] > 20
    assert Path("asked").read_text() == "requeue 7_0\n"
