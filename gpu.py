"""
What the tests can't see without a GPU: one GPU, no network, at most 8 minutes, one table.

    make gpu        or: python gpu.py

Rows: bf16 training of each arm at the 10M shape; two runs, same bits; SIGTERM and resume, same bits; one process under
torchrun with nccl; then, for 10M, 51M and 124M with removal none and self, tokens per second, model FLOP utilisation
and peak memory; and at 10M once more without deterministic algorithms, which tells what they cost. A check that fails
says so in its row and the rest goes on; exit status 1 if any failed. Everything is trained by train.py from the configs
of the project, in a temporary folder, on the text inside Python and on random tokens. Needs torch, numpy and tqdm
alone.

Utilisation = tokens/s * (6 N + 12 L C T) / peak, where N counts parameters without position embeddings, L layers,
C the width, T the block size, and peak is the chip's dense bfloat16 rate.
"""

import functools
import hashlib
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch

import train
from configurator import cli

ROOT = Path(__file__).resolve().parent
LIMIT = 440  # seconds; what still runs then has 35 more
PEAK = {  # dense bfloat16 operations a second, by what the device's name holds; the first that fits
    "B200": 2250e12, "H200 NVL": 835e12, "H200": 989e12, "H100 NVL": 835e12, "H100 PCIe": 756e12, "H100": 989e12,
    "A100": 312e12, "L40S": 362e12, "L40": 181e12, "A10G": 70e12, "A10": 125e12, "L4": 121e12, "4090": 165e12,
    "3090": 71e12,
}  # fmt: skip
TEXT = ("--dataset=text", "--max_iters=60", "--eval_interval=30", "--log_interval=1", "--eval_tokens=65536")
TOKENS = ("--dataset=tokens", "--max_iters=12", "--eval_interval=12", "--log_interval=1", "--eval_tokens=131072")
ARMS = ("FullResidual", "AttnOnly", "FFNOnly", "NoResidual")
SHAPES = {  # how it is called in the table -> config, one of its arms that changes nothing, data
    "124M": ("residual_124m", "FullResidual", TOKENS),
    "51M": ("self_value_51m", "baseline", TOKENS),
    "10M": ("residual_10m", "FullResidual", (*TEXT, "--max_iters=12")),
}

# ---------------------------------------------------------------------------------------------------------------------
# training in a process of its own, in the current folder


def measured_training(argv):
    """train.main(argv), and at the end a line of JSON: peak bytes of device memory, validation tokens per second."""
    rates, window_losses = [], train.window_losses

    def timed(model, windows, *rest):
        start = time.perf_counter()
        losses = window_losses(model, windows, *rest)  # they come back on the CPU, so the device has finished
        rates.append(len(windows) * (windows.shape[1] - 1) / (time.perf_counter() - start))
        return losses

    train.window_losses = timed
    try:
        train.experiment(argv)
    finally:
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        print(json.dumps({"peak": peak, "validation": max(rates, default=0)}), flush=True)


def random_tokens(folder, vocab_size, train, val):
    """A prepared folder of random tokens, as many as asked for."""
    folder.mkdir(parents=True)
    rng, sha = np.random.default_rng(0), {}
    for split, n in (("train", train), ("val", val)):
        tokens = rng.integers(vocab_size, size=n).astype("<u2")
        tokens.tofile(folder / f"{split}.bin")
        sha[split] = hashlib.sha256(tokens).hexdigest()
    meta = {"tokenizer": None, "vocab_size": vocab_size, "dtype": "uint16", "tokens": {"train": train, "val": val}}
    (folder / "meta.json").write_text(json.dumps(meta | {"sha256": sha, "source": "random"}))


def trained(device, small, deadline, config, out, *flags, torchrun=False, stop=None):
    """
    Train a config of the project into the folder `out` -> what measured_training found.

    small: flags that come last, to make everything tiny in a test. deadline: of time.monotonic. stop: text of the line
    at which SIGTERM is sent. Raises RuntimeError.
    """
    program = [sys.executable]
    if torchrun:
        program += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
    program += [str(ROOT / "gpu.py"), "--train", str(ROOT / "config" / f"{config}.py"), f"--out_dir={out}"]
    program += [f"--device={device}", "--seeds=0", *flags, *small]
    if (left := deadline - time.monotonic()) < 1:
        raise RuntimeError("not run, the time is over")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(program, **pipes, start_new_session=True) as process:
        ends = ((left, signal.SIGTERM), (left + 35, signal.SIGKILL))  # torchrun needs 30 s to end its workers
        watch = [threading.Timer(after, os.killpg, (process.pid, number)) for after, number in ends]
        for timer in watch:
            timer.start()
        said = []
        for line in process.stdout:
            said.append(line.strip())
            if stop and stop in line:
                process.terminate()
        status = process.wait()
        for timer in watch:
            timer.cancel()
    if status != (128 + signal.SIGTERM if stop else 0):
        if time.monotonic() >= deadline:
            raise RuntimeError("not finished, the time is over")
        errors = [x for x in said if re.match(r"error: |[\w.]*(Error|Exception): ", x)] or said[-1:] or ["no output"]
        raise RuntimeError(f"exit status {status}: {errors[0]}")
    return json.loads(next(x for x in reversed(said) if x.startswith('{"peak"')))


def log(out, arm):
    """The rows of log.jsonl."""
    return [json.loads(x) for x in (Path(out) / arm / "seed0/log.jsonl").read_text().splitlines()]


def same_bits(a, b, arms):
    """A sentence; raises RuntimeError where weights or validation losses differ between the folders a and b."""
    for arm in arms:
        one, two = (torch.load(Path(x) / arm / "seed0/ckpt.pt", weights_only=True) for x in (a, b))
        one, two = (c["model"] | {"losses": c["window_losses"]} for c in (one, two))
        unlike = [float((one[k].double() - two[k].double()).abs().max()) for k in one if not one[k].equal(two[k])]
        if unlike:
            raise RuntimeError(f"{arm}: {len(unlike)} of {len(one)} tensors differ, at most by {max(unlike)}")
    return f"the same bits in {' and '.join(arms)}"


# ---------------------------------------------------------------------------------------------------------------------
# the checks: each gets `run`, which is `trained` without its first three arguments, returns a text or raises


def one_arm(run, arm):
    run("residual_10m", "first", f"--arms={arm}", *TEXT)
    first, last = log("first", arm)[0], log("first", arm)[-1]
    if last["status"] != "finished" or not last["val_loss"] < first["val_loss"]:
        raise RuntimeError(f"{last['status']}, validation {first['val_loss']} -> {last['val_loss']}")
    change = f"{first['val_loss']:.3f} -> {last['val_loss']:.3f}"
    return f"{last['config']['dtype']}, validation {change} in {last['iter']} steps"


def two_runs(run):
    run("residual_10m", "second", "--arms=FullResidual,FFNOnly", *TEXT)
    return same_bits("first", "second", ["FullResidual", "FFNOnly"])


def resume(run):
    flags = ("residual_10m", "third", "--arms=FullResidual", *TEXT)
    run(*flags, stop="step 30/")
    step = torch.load("third/FullResidual/seed0/state.pt", weights_only=True)["step"]
    run(*flags)
    return f"stopped at step {step}, then {same_bits('first', 'third', ['FullResidual'])}"


def process_group(run):
    run("residual_10m", "fourth", "--arms=FullResidual", *TEXT, torchrun=True)
    pairs = list(zip(log("first", "FullResidual")[:20], log("fourth", "FullResidual")[:20], strict=True))
    far = max(abs(a["loss"] - b["loss"]) for a, b in pairs)
    if far > 0.01:
        raise RuntimeError(f"the first {len(pairs)} losses differ by up to {far}")
    return f"the first {len(pairs)} losses are within {far:.1e} of those without it"


def speed(run, shape, removal, peak, deterministic=True):
    """peak: operations a second of the device, or None where it is unknown."""
    config, arm, data = SHAPES[shape]
    out = f"{shape}-{removal}-{deterministic}"
    flags = (*data, f"--removal={removal}", f"--deterministic={deterministic}")
    found = run(config, out, f"--arms={arm}", *flags)
    rows = log(out, arm)
    rate = statistics.median(row["tokens_per_second"] for row in rows[4:-1])  # the first steps compile
    model = torch.load(f"{out}/{arm}/seed0/ckpt.pt", weights_only=True)["model"]
    n = sum(w.numel() for k, w in model.items() if k not in ("wpe.weight", "lm_head.weight"))  # the latter is wte
    c = rows[-1]["config"]
    operations = 6 * n + 12 * c["n_layer"] * c["n_embd"] * c["block_size"]  # a token
    used = f"{rate * operations / peak:.1%}" if peak else "unknown"
    micro = c["micro_batch_size"] or c["batch_size"]
    return (
        f"{n / 1e6:.1f}M parameters, {rate:,.0f} tokens/s, utilisation {used}, peak {found['peak'] / 2**30:.1f} GiB at"
        f" {micro} x {c['block_size']}, validation {found['validation']:,.0f} tokens/s"
    )


def checks(run, peak):
    """The rows of the table: (name, function without arguments)."""
    rows = [(f"10M, {arm}", functools.partial(one_arm, run, arm)) for arm in ARMS]
    rows += [(check.__name__.replace("_", " "), functools.partial(check, run)) for check in (two_runs, resume)]
    rows += [("torchrun, one process", functools.partial(process_group, run))]
    rows += [
        (f"{shape}, removal {removal}", functools.partial(speed, run, shape, removal, peak))
        for removal in ("none", "self")
        for shape in SHAPES
    ]
    return [*rows, ("10M, deterministic=False", functools.partial(speed, run, "10M", "none", peak, False))]


def table(rows):
    """Run the checks and print their rows -> the number that failed."""
    failed = 0
    print("| check | result | seconds |\n|---|---|---|")
    for name, check in rows:
        start = time.monotonic()
        try:
            text = check()
        except Exception as e:  # whatever it is, it goes into its row
            failed += 1
            text = f"FAILED: {' '.join(str(e).split())[:200] or type(e).__name__}"
        print(f"| {name} | {text} | {time.monotonic() - start:.0f} |", flush=True)
    return failed


def data():
    """data/text and data/tokens in the current folder: pydocs in characters, and random tokens."""
    subprocess.run(
        [sys.executable, str(ROOT / "prepare.py"), "pydocs", "--out=data/text"], check=True, stdout=subprocess.DEVNULL
    )
    random_tokens(Path("data/tokens"), 50304, 2**21, 2**18)


def main():
    if not torch.cuda.is_available():
        print("gpu.py: there is no GPU here that torch can use, so nothing was checked")
        return 0
    deadline = time.monotonic() + LIMIT
    name = torch.cuda.get_device_name()
    peak = next((rate for key, rate in PEAK.items() if key in name), None)
    print(f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}\n")
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        data()
        failed = table(checks(functools.partial(trained, "cuda", (), deadline), peak))
        os.chdir(ROOT)
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        sys.argv.pop(1)
        cli(measured_training)
    else:
        sys.exit(main())
