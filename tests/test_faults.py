"""
Faults that are injected, and the same bits at the end.

In `make test` a short form; `make faults` kills 20 times and prints its figures.
"""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from test_train import call, ckpt, command, place, rows, run  # noqa: F401  (place is a fixture)

KILLS = int(os.environ.get("FAULTS", 2))
SHAPE = ["--n_embd=128", "--batch_size=4", "--checkpoint_interval=1"]  # most of the time is spent writing states


def tensors(out, arm="Full", seed=0):
    c = ckpt(out, arm, seed)
    return c["model"] | {k: c[k] for k in ("window_losses", "training_path_batch")}


def bytes_differing(a, b):
    assert list(a) == list(b)
    return sum(int((a[k].contiguous().view(torch.uint8) != b[k].contiguous().view(torch.uint8)).sum()) for k in a)


def test_kills_at_random_moments(place):  # noqa: F811
    flags = [*SHAPE, "--arms=Full", "--seeds=0", f"--max_iters={60 * KILLS}", "--dropout=0.1"]
    run("--out_dir=calm", *flags)
    rng, kills, in_write, resumes = random.Random(0), 0, 0, 0
    folder = Path("rough/Full/seed0")
    while kills < KILLS:
        before = (folder / "state.pt").stat().st_mtime_ns if (folder / "state.pt").exists() else 0
        program, env = command("--out_dir=rough", *flags)
        process = subprocess.Popen(program, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        while process.poll() is None and (
            not (folder / "state.pt").exists() or (folder / "state.pt").stat().st_mtime_ns == before
        ):
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.4))
        while kills % 2 and process.poll() is None and not list(folder.glob("state.pt.*.tmp")):
            pass  # every other kill waits for a state that is just being written
        process.kill()
        out = process.communicate()[0]
        if process.returncode == 0:
            break  # it was faster than we were
        kills += 1
        in_write += bool(list(folder.glob("*.tmp")))
        resumes += "resumes at step" in out
    done = call("--out_dir=rough", *flags)
    assert done.returncode == 0, done.stderr
    resumes += "resumes at step" in done.stdout
    differing = bytes_differing(tensors("calm"), tensors("rough"))
    print(
        f"\nkills {kills}, of them while a file was written {in_write}, resumes {resumes}, bytes differing {differing}"
    )
    assert kills >= 2 and in_write >= 1 and resumes == kills and differing == 0
    assert rows("rough") == rows("calm")
    assert sorted(p.name for p in folder.iterdir()) == ["ckpt.pt", "log.jsonl"]


def test_a_signal_that_comes_twice_at_random_moments(place):  # noqa: F811
    """L1: each time the step is finished and saved, and the end is that of an undisturbed run."""
    signals = KILLS // 2
    flags = ["--arms=Full", "--seeds=0", f"--max_iters={600 * signals}", "--checkpoint_interval=100000"]
    run("--out_dir=calm", *flags)
    rng, saved = random.Random(1), 0
    path = Path("rough/Full/seed0/state.pt")
    for _ in range(signals):
        program, env = command("--out_dir=rough", *flags)
        process = subprocess.Popen(program, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        before = torch.load(path, weights_only=True)["step"] if path.exists() else 0
        for line in process.stdout:
            if "arms x" in line:  # the training begins
                break
        time.sleep(rng.uniform(0.1, 0.6))
        process.send_signal(signal.SIGTERM)
        time.sleep(rng.uniform(0, 0.2))
        process.send_signal(rng.choice((signal.SIGTERM, signal.SIGINT)))
        out = process.communicate(timeout=60)[0]
        saved += process.returncode == 143 and torch.load(path, weights_only=True)["step"] > before
        assert "stopped and saved at step" in out
    done = call("--out_dir=rough", *flags)
    assert done.returncode == 0, done.stderr
    differing = bytes_differing(tensors("calm"), tensors("rough"))
    print(f"\nsignals sent twice {signals}, saved {saved}, bytes differing {differing}")
    assert saved == signals and differing == 0 and rows("rough") == rows("calm")


def test_three_processes_one_killed(place):  # noqa: F811
    flags = ["--max_iters=200", "--out_dir=shared"]
    runs = [(arm, seed) for seed in range(2) for arm in ("Full", "FFNOnly", "Self")]
    started = [command(*flags) for _ in range(3)]
    running = [
        subprocess.Popen(p, env=e, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for p, e in started
    ]
    victim = running[0]
    for line in victim.stdout:
        if "step 20/" in line:
            victim.kill()
            break
    outs = [p.communicate(timeout=120) for p in running]
    assert [p.returncode for p in running[1:]] == [0, 0], outs
    finished = [
        f"{a} seed{s}"
        for a, s in runs
        for out, _ in outs[1:]
        for x in out.splitlines()
        if x.startswith(f"{a} seed{s}: ") and "nats after" in x
    ]
    whole = call(*flags)  # and what the victim left, if the others had gone by then
    assert "6 of 6 runs are finished" in whole.stdout
    assert len(finished) == len(set(finished)) >= 5
    assert all(ckpt("shared", a, s)["status"] == "finished" for a, s in runs)
    run("--max_iters=200", "--out_dir=alone", "--seeds=0", "--arms=Full")
    assert bytes_differing(tensors("shared"), tensors("alone")) == 0


@pytest.mark.skipif(not shutil.which("pgrep"), reason="needs pgrep to find the workers")
def test_torchrun_restarts_a_killed_worker(place):  # noqa: F811
    """Three workers: the sum of two is the same in any order."""
    flags = ["--max_iters=40", "--arms=Full", "--seeds=0", "--batch_size=12", "--micro_batch_size=2"]
    program, env = command("--out_dir=x", *flags, torchrun=3)
    program.insert(3, "--max-restarts=2")
    process = subprocess.Popen(program, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    log = Path("x/Full/seed0/log.jsonl")
    while not (log.exists() and len(log.read_text().splitlines()) > 10):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    workers = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(workers[-1]), signal.SIGKILL)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "resumes at step" in out
    assert call("--out_dir=y", *flags, torchrun=3).returncode == 0
    assert bytes_differing(tensors("x"), tensors("y")) == 0


def test_a_full_disk(place):  # noqa: F811
    """A limit on the size of a file stands for the disk: the write fails half way, as it does there."""
    flags = ["--out_dir=x", "--arms=Full", "--seeds=0", "--n_embd=64"]
    program, env = command(*flags, "--max_iters=3000")
    process = subprocess.Popen(program, env=env, stdout=subprocess.DEVNULL)
    path = Path("x/Full/seed0/state.pt")
    while not path.exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.wait()
    good, log = path.read_bytes(), (path.parent / "log.jsonl").read_bytes()
    small = len(good) // 2
    done = subprocess.run(
        command(*flags, "--max_iters=3000")[0], env=env, capture_output=True, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (small, small)),
    )  # fmt: skip
    assert done.returncode == 2, done
    assert done.stderr == f"error: {path} can't be written (File too large): what was there before is kept\n"
    assert path.read_bytes() == good and (path.parent / "log.jsonl").read_bytes() == log
    assert sorted(p.name for p in path.parent.iterdir()) == ["lock", "log.jsonl", "state.pt", "state.sha256"]
    assert torch.load(path, weights_only=True)["step"] == len(log.splitlines())


def test_a_worker_under_torchrun_stops_on_sigterm(place):  # noqa: F811
    """As a batch system does before its time limit: the step is finished, the state saved, the status conventional."""
    flags = ["--out_dir=x", "--arms=Full", "--seeds=0", "--max_iters=100000", "--checkpoint_interval=100000"]
    program, env = command(*flags, torchrun=2)
    process = subprocess.Popen(program, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        if "step 20/" in line:
            process.terminate()
            break
    out, _ = process.communicate(timeout=60)
    assert "stopped and saved at step" in out and process.returncode != 0
    step = torch.load("x/Full/seed0/state.pt", weights_only=True)["step"]
    assert len((Path("x/Full/seed0/log.jsonl")).read_text().splitlines()) == step > 20
    json.loads(Path("x/plan.json").read_text())
