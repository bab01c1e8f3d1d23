"""
How fast, beside what people use now and beside what the machine can do.

    python bench.py [--quick] [--only=WORD]

One table of ratios. The two sides of a ratio run in turn inside one process, so that a busy machine slows both; shown
are the median over the rounds and, in brackets, the least and the greatest. A training step is forward, backward,
clipping and optimizer, on real tokens. A peer that is not installed (requirements-bench.txt) leaves its row empty.
"""

import contextlib
import itertools
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import prepare
import train
from model import GPT, GPTConfig, window_losses
from prepare import UserError

HERE = Path(__file__).resolve().parent
SHAPES = {  # name: model, sequences a step
    "1M": ({"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "vocab_size": 65, "bias": False}, 12),
    "10M": ({"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "vocab_size": 65, "bias": False}, 64),
    "124M": ({"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "vocab_size": 50304, "bias": False}, 1),
}


def in_turn(a, b, rounds):
    """Time a() and b() in turn -> (median of a's seconds over b's, least, greatest, median seconds of a, of b)."""
    a(), b()  # not the first call: it allocates, and compiles
    times = []
    for _ in range(rounds):
        pair = []
        for f in (a, b):
            start = time.perf_counter()
            f()
            pair.append(time.perf_counter() - start)
        times.append(pair)
    ratios = [x / y for x, y in times]
    middle = [statistics.median(side) for side in zip(*times, strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios), *middle


def row(measure, against, goal, text):
    print(f"| {measure:<46} | {against:<44} | {goal:<8} | {text}", flush=True)


def ratio(measure, against, goal, result):
    middle, least, most, a, b = result
    row(measure, against, goal, f"{middle:.2f} [{least:.2f}, {most:.2f}]  ({a * 1e3:,.0f} ms : {b * 1e3:,.0f} ms)")


def tokens():
    """Real text as tokens, prepared once."""
    folder = Path(tempfile.gettempdir()) / "nanoablate-bench"
    if not (folder / "meta.json").exists():
        with contextlib.redirect_stdout(sys.stderr):
            prepare.main(["pydocs", f"--out={folder}"])
    return prepare.load(folder, check=False)[0] % 65


def our_step(shape, batch, steps=1, **settings):
    """A function that takes training steps as train.py does, with the settings that it would choose itself."""
    flags = {k: settings.pop(k) for k in list(settings) if k in train.GPTConfig.__dataclass_fields__}
    config = train.Config(**shape, **flags, batch_size=batch, **settings)
    train.choose(config)
    raw = GPT(GPTConfig(**shape, **flags))
    optimizer = train.make_optimizer(raw, config)
    model = torch.compile(raw) if config.compile else raw
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=config.dtype == "bfloat16")
    data, counter = tokens(), itertools.count()

    def run():
        for _ in range(steps):
            rows = train.batch(data, 0, next(counter), batch, config.block_size)
            loss, _ = train.take_step(model, optimizer, rows, batch, autocast, 1.0)
        return float(loss)

    run.says = f"{config.dtype}, {'compiled' if config.compile else 'eager'}"
    return run


def their_step(shape, batch, steps=1):
    """The same with transformers' GPT-2 in float32: what a user would write."""
    from transformers import GPT2Config, GPT2LMHeadModel

    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    names = {k: shape[k] for k in ("n_layer", "n_head", "n_embd", "vocab_size")}
    model = GPT2LMHeadModel(GPT2Config(**names, n_positions=shape["block_size"], **off)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data, counter = tokens(), itertools.count()

    def run():
        for _ in range(steps):
            rows = train.batch(data, 0, next(counter), batch, shape["block_size"])[:, :-1]
            loss = model(rows, labels=rows).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return float(loss)

    return run


def bench_steps(rounds):
    goals = {"1M": "≥ 1.3", "10M": "≥ 1.8", "124M": "≥ 2.0"}
    for name, (shape, batch) in SHAPES.items():
        steps = 20 if name == "1M" else 1
        ours = our_step(shape, batch, steps)
        against = f"transformers GPT-2, float32 : {ours.says}"
        ratio(f"training step, {name}, {batch} x {shape['block_size']}", against, goals[name],
              in_turn(their_step(shape, batch, steps), ours, rounds))  # fmt: skip


def bench_share(rounds):
    """Operations of a step at the 10M shape over what plain bfloat16 matrix products reach here and now."""
    shape, batch = SHAPES["10M"]
    step = our_step(shape, batch)
    n = sum(p.numel() for name, p in GPT(GPTConfig(**shape)).named_parameters() if name != "wpe.weight")
    L, C, T = shape["n_layer"], shape["n_embd"], shape["block_size"]
    operations = (6 * n + 12 * L * C * T) * batch * T
    a, b = torch.randn(4096, 1536).bfloat16(), torch.randn(1536, 1536).bfloat16()
    products = 40

    def plain():
        for _ in range(products):
            a @ b

    slower, least, most, t_step, t_plain = in_turn(step, plain, rounds)
    scale = operations / (2 * 4096 * 1536 * 1536 * products)  # operations of a step in units of the plain run
    text = f"{scale / slower:.0%} [{scale / most:.0%}, {scale / least:.0%}]  ({operations / t_step / 1e9:,.0f} GFLOP/s)"
    row("share of bf16 matrix products, 10M", f"(6N + 12 L C T) a token : {step.says}", "≥ 68%", text)


def bench_removal(rounds):
    for name in ("10M", "124M"):
        shape, batch = SHAPES[name]
        batch = min(batch, 16)
        for compiled in (True, False):
            plain = our_step(shape, batch, compile=compiled)
            for removal in ("self", "fixed", "rotated", "previous"):
                other = our_step(shape, batch, compile=compiled, removal=removal)
                middle, least, most, _, _ = in_turn(other, plain, rounds)
                text = f"{middle - 1:+.1%} [{least - 1:+.1%}, {most - 1:+.1%}]"
                row(f"removal={removal}, {name}", f"removal=none, {plain.says}", "≤ +3%" if compiled else "", text)


def peak(kind):
    """Peak memory in MiB of one float32 step at 124M, 4 x 1,024, in this process."""
    shape, _ = SHAPES["124M"]
    if kind == "ours":
        our_step(shape, 4, dtype="float32", compile=False)()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    model = GPT(GPTConfig(**shape))
    optimizer = train.make_optimizer(model, train.Config())
    rows = train.batch(tokens(), 0, 0, 4, 1024)
    model(rows[:, :-1], rows[:, 1:])[1].backward()  # plain cross-entropy on full logits
    optimizer.step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def bench_memory(rounds):
    call = [sys.executable, str(HERE / "bench.py"), "--peak"]
    ours, plain = (
        float(subprocess.check_output([f"{c}={k}" if c == "--peak" else c for c in call])) for k in ("ours", "plain")
    )
    row(
        "peak memory, float32, 124M, 4 x 1,024",
        "cross-entropy on full logits",
        "≤ 0.7",
        f"{ours / plain:.2f}  ({ours:,.0f} MiB : {plain:,.0f} MiB)",
    )


def bench_experiment(rounds):
    """Wall time of an experiment of 1M runs over the sum of its training steps and evaluations."""
    with tempfile.TemporaryDirectory() as place:
        data = Path(tempfile.gettempdir()) / "nanoablate-bench"
        tokens()
        config = Path(place) / "few.py"
        config.write_text(
            (HERE / "config/residual_1m.py").read_text() + f"\ndataset = {str(data)!r}\nseeds = range(1)\n"
        )
        call = [
            sys.executable,
            str(HERE / "train.py"),
            str(config),
            f"--out_dir={place}/out",
            "--log_interval=1",
            "--max_iters=500",
        ]
        start = time.perf_counter()
        subprocess.run(call, check=True, capture_output=True, cwd=place)
        wall = time.perf_counter() - start
        spent, evaluations = 0.0, 0
        for log in Path(place).glob("out/*/*/log.jsonl"):
            rows = [json.loads(line) for line in log.read_text().splitlines()]
            spent += sum(12 * 64 / r["tokens_per_second"] for r in rows if "tokens_per_second" in r)
            evaluations += sum("val_loss" in r for r in rows)
    shape, _ = SHAPES["1M"]
    model, w = GPT(GPTConfig(**shape)), prepare.windows(prepare.load(data, check=False)[1] % 65, 64)
    window_losses(model, w)
    start = time.perf_counter()
    window_losses(model, w)
    spent += evaluations * (time.perf_counter() - start)
    row(
        "experiment of four 1M runs, wall time",
        "its training steps and evaluations",
        "≤ 1.05",
        f"{wall / spent:.3f}  ({wall:.0f} s : {spent:.0f} s)",
    )


def bench_prepare(rounds):
    try:
        import tiktoken

        encoding = tiktoken.get_encoding("gpt2")
    except Exception:
        row(
            "prepare, GPT-2 encoding",
            "bare tiktoken, same threads",
            "≥ 0.9",
            "no vocabulary here: set TIKTOKEN_CACHE_DIR",
        )
        return
    texts = [
        p.read_text(encoding="utf-8", errors="replace") for p in sorted(Path(json.__file__).parent.parent.glob("*.py"))
    ]
    texts *= 3
    with tempfile.TemporaryDirectory() as place:
        source = Path(place) / "text.jsonl"
        source.write_text("\n".join(json.dumps({"text": t}) for t in texts))
        ours = lambda: prepare.main([str(source), f"--out={place}/out", "--workers=2"])  # noqa: E731
        with contextlib.redirect_stdout(sys.stderr):
            result = in_turn(lambda: encoding.encode_ordinary_batch(texts, num_threads=2), ours, rounds)
    ratio("prepare, GPT-2 encoding, 2 workers", "bare tiktoken, 2 threads", "≥ 0.9", result)


def bench_start(rounds):
    with tempfile.TemporaryDirectory() as place:
        prepare_out = Path(tempfile.gettempdir()) / "nanoablate-bench"
        tokens()
        call = [
            sys.executable,
            "-X",
            "importtime",
            str(HERE / "train.py"),
            str(HERE / "config/demo.py"),
            "--max_iters=1",
            "--seeds=0",
            "--arms=FullResidual",
        ]
        call += [f"--dataset={prepare_out}", f"--out_dir={place}/out"]
        start = time.perf_counter()
        with subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            for line in process.stdout:
                if "step 0/" in line:
                    first = time.perf_counter() - start
            loaded = process.stderr.read()
    heavy = [
        m
        for m in ("scipy", "matplotlib", "transformers", "datasets", "tiktoken", "wandb", "pandas")
        if f"| {m}\n" in loaded.replace(" ", "")
    ]
    row(
        "`python train.py` to the first step, demo",
        "",
        "",
        f"{first:.1f} s; unused packages imported: {', '.join(heavy) or 'none'}",
    )


def main(argv):
    _, flags = prepare.parse(argv, {"quick": bool, "only": str, "peak": str, "help": bool})
    if flags.get("help"):
        print(__doc__.strip())
        return
    if "peak" in flags:
        print(peak(flags["peak"]))
        return
    quick = flags.get("quick", False)
    benches = {k.removeprefix("bench_"): v for k, v in globals().items() if k.startswith("bench_")}
    if flags.get("only", "") not in ("", *benches):
        raise UserError(f"--only={flags['only']} must be one of {', '.join(benches)}")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; ratio [least, most] (times)")
    row("measure", "against", "goal", "")
    for name, bench in benches.items():
        if flags.get("only", name) == name and not (quick and name in ("removal", "memory", "experiment")):
            bench(3 if quick else 7)


if __name__ == "__main__":
    prepare.cli(main)
