"""
How fast, beside what people use now and beside what the machine can do.

    python bench.py [--quick] [--only=WORD] [--nanogpt=FOLDER]

One table of ratios. The two sides of a ratio run in turn inside one process, so that a busy machine slows both; shown
are the median over the rounds and, in brackets, the least and the greatest. A training step is forward, backward,
clipping and optimizer, on real tokens. A row without brackets is one measurement. A peer that is not installed
(requirements-bench.txt), or not there (nanoGPT's folder), leaves its row empty. Rows that say "in processes" run each
side in a process of its own, in turn, so that each has its own allocator.
"""

import contextlib
import itertools
import json
import os
import random
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
from configurator import UserError, cli, keep_memory, parse
from model import GPT, REMOVALS, GPTConfig, bfloat16_gain, window_losses

HERE = Path(__file__).resolve().parent
SHAPES = {  # name: model, sequences a step
    "1M": ({"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "vocab_size": 65, "bias": False}, 12),
    "10M": ({"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256, "vocab_size": 65, "bias": False}, 64),
    "124M": ({"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "vocab_size": 50304, "bias": False}, 1),
}
QUICK = ("steps", "start")
FOLDER = {"nanogpt": ""}  # of nanoGPT, if it is there
DATA = Path(tempfile.gettempdir()) / "nanoablate-bench"


def seconds(f):
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def in_turn(sides, rounds):
    """Call the functions in turn, once more than rounds -> their seconds, (rounds, sides)."""
    for f in sides:
        f()  # not the first call: it allocates, and compiles
    return [[seconds(f) for f in sides] for _ in range(rounds)]


def spread(times, a, b):
    """Seconds of side a over those of side b: median, least, greatest."""
    ratios = [t[a] / t[b] for t in times]
    return statistics.median(ratios), min(ratios), max(ratios)


def row(measure, against, goal, text):
    print(f"| {measure:<46} | {against:<44} | {goal:<8} | {text}", flush=True)


def ratio(measure, against, goal, times):
    """A row: the first side over the second."""
    middle, least, most = spread(times, 0, 1)
    a, b = (statistics.median(side) * 1e3 for side in zip(*times, strict=True))
    row(measure, against, goal, f"{middle:.2f} [{least:.2f}, {most:.2f}]  ({a:,.0f} ms : {b:,.0f} ms)")


def tokens():
    """Real text as tokens, prepared once."""
    if not (DATA / "meta.json").exists():
        with contextlib.redirect_stdout(sys.stderr):
            prepare.main(["pydocs", f"--out={DATA}"])
    return prepare.load(DATA, check=False)[0] % 65


def windows(n, T):
    """The first n * (T + 1) tokens -> (n, T + 1) int64."""
    return torch.as_tensor(tokens()[: n * (T + 1)].reshape(n, T + 1).astype("int64"))


def our_step(shape, batch, steps=1, **settings):
    """A function that takes training steps as train.py does, with the settings that it would choose itself."""
    flags = {k: settings.pop(k) for k in list(settings) if k in train.GPTConfig.__dataclass_fields__}
    config = train.Config(**shape, **flags, batch_size=batch, **settings)
    if config.device == "auto":
        config.device = "cuda" if torch.cuda.is_available() else "cpu"
    train.choose(config, {})
    raw = GPT(GPTConfig(**shape, **flags)).to(config.device)
    optimizer = train.make_optimizer(raw, config)
    model = torch.compile(raw) if config.compile else raw
    autocast, micro = train.autocast(config), config.micro_batch_size or batch
    data, counter = tokens(), itertools.count()

    def run():
        for _ in range(steps):
            rows = train.batch(data, 0, next(counter), batch, config.block_size).to(config.device)
            loss, _ = train.take_step(model, optimizer, rows, micro, autocast, 1.0)
        return float(loss)

    run.says = f"{config.dtype}, {'compiled' if config.compile else 'eager'}"
    return run


def their_step(shape, batch, steps=1):
    """The same with transformers' GPT-2 in float32: what a user would write."""
    from transformers import GPT2Config, GPT2LMHeadModel, logging

    logging.set_verbosity(logging.CRITICAL)
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
        return float(loss.detach())

    return run


def bench_steps(rounds):
    goals = {"1M": "≥ 1.3", "10M": "≥ 1.8", "124M": "≥ 2.0"}
    for name, (shape, batch) in SHAPES.items():
        steps, more = (10, 3) if name == "1M" else (1, 1)  # short, so it takes more rounds to tell
        ours = our_step(shape, batch, steps)
        against = f"transformers GPT-2, float32 : {ours.says}"
        ratio(f"training step, {name}, {batch} x {shape['block_size']}", against, goals[name],
              in_turn([their_step(shape, batch, steps), ours], rounds * more))  # fmt: skip
        if name == "10M" and rounds > 2:  # --quick has no time for it
            share(ours, shape, batch, rounds)


def operations_of(shape, batch):
    """Operations of a training step: 6 N + 12 L C T a token, N without the position embeddings (Kaplan et al. 2020)."""
    n = sum(p.numel() for name, p in GPT(GPTConfig(**shape)).named_parameters() if name != "wpe.weight")
    L, C, T = shape["n_layer"], shape["n_embd"], shape["block_size"]
    return (6 * n + 12 * L * C * T) * batch * T


def share(step, shape, batch, rounds):
    """Operations of a step over what plain bfloat16 matrix products reach here and now."""
    operations = operations_of(shape, batch)
    a, b = torch.randn(4096, 1536).bfloat16(), torch.randn(1536, 1536).bfloat16()
    products = 40

    def plain():
        for _ in range(products):
            a @ b

    times = in_turn([plain, step], rounds)
    scale = operations / (2 * 4096 * 1536 * 1536 * products)  # operations of a step in units of the plain run
    middle, least, most = (f"{scale * x:.0%}" for x in spread(times, 0, 1))
    rate = operations / statistics.median(t[1] for t in times)
    text = f"{middle} [{least}, {most}]  ({rate / 1e9:,.0f} GFLOP/s)"
    row("share of bf16 matrix products, 10M", f"(6N + 12 L C T) a token : {step.says}", "≥ 68%", text)


def nanogpt_step(folder, shape, batch, dtype):
    """The same with nanoGPT's own model, as its train.py takes a step."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(folder) / "model.py")
    theirs = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_model"] = theirs
    with contextlib.redirect_stdout(sys.stderr):
        spec.loader.exec_module(theirs)
        model = theirs.GPT(theirs.GPTConfig(**shape, dropout=0.0)).train()
        optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
    data, counter = tokens(), itertools.count()

    def run():
        rows = train.batch(data, 0, next(counter), batch, shape["block_size"])
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            _, loss = model(rows[:, :-1], rows[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return run


def serve(what):
    """One side of a row in this process: a step for each line that comes, answered by its seconds and page faults."""
    side, name, memory, folder = what.split(",", 3)
    if memory == "kept":
        keep_memory()
    shape, batch = SHAPES[name]
    dtype = "bfloat16" if "bfloat16" in side else "float32"
    if side.startswith("nanogpt"):
        step = nanogpt_step(folder, shape, batch, dtype)
    elif side == "auto":
        step = our_step(shape, batch)
    else:
        step = our_step(shape, batch, dtype=dtype, compile="compiled" in side)
    for _ in sys.stdin:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        time_of_step = seconds(step)
        print(time_of_step, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, flush=True)


def served(sides, name, rounds, folder=""):
    """Steps of the sides in processes of their own, in shuffled turns -> seconds (rounds, sides), faults of a step."""
    with contextlib.ExitStack() as running:
        children = []
        for side, memory in sides:
            call = [sys.executable, str(HERE / "bench.py"), f"--serve={side},{name},{memory},{folder}"]
            children.append(running.enter_context(subprocess.Popen(call, stdin=subprocess.PIPE, stdout=-1, text=True)))
        times, faults = [[0.0] * len(sides) for _ in range(rounds)], [0] * len(sides)
        for i in range(-2, rounds):  # not the first calls: they allocate, and compile
            for k in random.Random(i).sample(range(len(sides)), len(sides)):
                print(file=children[k].stdin, flush=True)
                took, count = children[k].stdout.readline().split()
                if i >= 0:
                    times[i][k], faults[k] = float(took), int(count)
        for child in children:
            child.stdin.close()
    return times, faults


def bench_auto(rounds):
    """What auto takes beside every other choice; the same twice shows the noise."""
    choices = ["float32", "float32 again", "float32 compiled", "bfloat16", "bfloat16 compiled"]
    for name in SHAPES:
        times, _ = served([("auto", "kept"), *((c, "kept") for c in choices)], name, 2 * rounds)
        for k, choice in enumerate(choices, 1):
            middle, least, most = spread(times, k, 0)
            goal = "≥ 1" if choice == "float32" else ""
            row(f"{choice}, {name}, in processes", "what auto takes", goal, f"{middle:.2f} [{least:.2f}, {most:.2f}]")


def bench_nanogpt(rounds):
    """nanoGPT's own model with the allocator as it is, against ours; then both with the allocator kept."""
    if not (folder := FOLDER["nanogpt"]):
        row("training step beside nanoGPT's model", "nanoGPT", "", "not there: --nanogpt=FOLDER")
        return
    row("products of width 384, bfloat16", "the same in float32: bounds the rows below", "", f"{bfloat16_gain():.2f}")
    for name, goal in (("10M", "≥ 1.2, and 2.4 in bfloat16"), ("124M", "≥ 1.3, and 2.2 in bfloat16")):
        sides = [("nanogpt", "as it is"), ("auto", "kept"), ("nanogpt", "kept"), ("auto", "as it is")]
        times, faults = served(sides, name, 2 * rounds, folder)
        for a, b, wanted in ((0, 1, goal), (2, 1, ""), (3, 1, "")):
            middle, least, most = spread(times, a, b)
            against = f"ours, memory {sides[b][1]}; faults {faults[a]:,} : {faults[b]:,}"
            measure = f"{sides[a][0]}, {name}, memory {sides[a][1]}, in processes"
            row(measure, against, wanted, f"{middle:.2f} [{least:.2f}, {most:.2f}]")


def bench_removal(rounds):
    cases = [("10M", True, REMOVALS[1:]), ("124M", True, REMOVALS[1:]), ("10M", False, ("self",))]
    for name, compiled, removals in cases:
        torch.compiler.reset()  # after 8 variants of a function torch goes on without compiling
        shape, batch = SHAPES[name]
        sides = [our_step(shape, min(batch, 16), compile=compiled, removal=r) for r in ("none", *removals)]
        times = in_turn(sides, rounds if name == "124M" else rounds + 1)
        for i, removal in enumerate(removals, 1):
            middle, least, most = (f"{x - 1:+.1%}" for x in spread(times, i, 0))
            goal = "≤ +3%" if compiled else ""
            row(f"removal={removal}, {name}", f"removal=none, {sides[0].says}", goal, f"{middle} [{least}, {most}]")


def peak_memory():
    """The most that this process has held, in MiB (Linux)."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024


def peak(kind):
    """Peak memory of this process in MiB, of one side of a row; of heads from when the weights are loaded."""
    if kind in ("ours", "theirs"):
        model, look = tapped_gpt2() if kind == "ours" else hooked_gpt2()
        for p in model.parameters():
            p.detach().double().sum()  # touched, so loaded
        Path("/proc/self/clear_refs").write_text("5")  # the highest mark begins anew
        look()
        return peak_memory()
    shape, _ = SHAPES["124M"]
    if kind == "step":
        our_step(shape, 4, dtype="float32", compile=False)()
        return peak_memory()
    model = GPT(GPTConfig(**shape))
    optimizer = train.make_optimizer(model, train.Config())
    rows = train.batch(tokens(), 0, 0, 4, 1024)
    model(rows[:, :-1], rows[:, 1:])[1].backward()  # plain cross-entropy on full logits
    optimizer.step()
    return peak_memory()


def in_processes(a, b):
    call = [sys.executable, str(HERE / "bench.py")]
    return [
        float(subprocess.check_output([*call, f"--peak={k}"], stderr=subprocess.DEVNULL).split()[-1]) for k in (a, b)
    ]


def bench_memory(rounds):
    ours, plain = in_processes("step", "plain")
    text = f"{ours / plain:.2f}  ({ours:,.0f} MiB : {plain:,.0f} MiB)"
    row("peak memory, float32 step, 124M, 4 x 1024", "cross-entropy on full logits", "≤ 0.7", text)


def gpt2_folder():
    """A GPT-2 of 124M parameters with random weights, as transformers saves it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = Path(tempfile.gettempdir()) / "nanoablate-bench-gpt2"
    if not (folder / "model.safetensors").exists():
        torch.manual_seed(0)
        GPT2LMHeadModel(GPT2Config()).save_pretrained(folder)
    return str(folder)


def tapped_gpt2():
    """heads.py's model, and a function that measures own and null (and the loss) on 4 windows of 512."""
    import heads

    model, _ = heads.open_model(gpt2_folder())
    w = windows(4, 512)
    return model, lambda: heads.measure(model, w)[0]["own"].mean(0)  # (12, 12)


def hooked_gpt2():
    """The same model in TransformerLens, and a function that measures own alone (and the loss) by hooks on v and z."""
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoModelForCausalLM

    folder, own, values = gpt2_folder(), {}, {}
    bridge = TransformerBridge.boot_transformers(folder, hf_model=AutoModelForCausalLM.from_pretrained(folder))
    w = windows(4, 512)

    def on_v(v, hook):  # (B, T, H, D)
        values["v"] = v.reshape(4, 512, 12, 64)

    def on_z(z, hook):  # (B, T, H D), the input of the output projection
        cosine = torch.nn.functional.cosine_similarity(z.reshape(4, 512, 12, 64), values["v"], dim=-1)  # (B, T, H)
        own[int(hook.name.split(".")[1])] = cosine[:, 1:].mean((0, 1))

    hooks = [(lambda n: n.endswith("attn.v.hook_out"), on_v), (lambda n: n.endswith("attn.o.hook_in"), on_z)]

    def look():
        with torch.no_grad():
            bridge.run_with_hooks(w[:, :-1], fwd_hooks=hooks, return_type="loss")
        return torch.stack([own[i] for i in range(12)])

    return bridge, look


def plain_gpt2():
    """The same model in transformers, and two functions that run it on those windows: without logits, and with."""
    from transformers import AutoModelForCausalLM

    model, w = AutoModelForCausalLM.from_pretrained(gpt2_folder()).eval(), windows(4, 512)[:, :-1]
    return torch.no_grad()(lambda: model.transformer(w)), torch.no_grad()(lambda: model(w))


def bench_heads(rounds):
    measure, against = "own, null and loss, GPT-2, 4 x 512", "TransformerLens, own and loss"
    _, ours = tapped_gpt2()
    sides = [ours, *plain_gpt2()]
    with contextlib.suppress(ImportError):
        sides.append(hooked_gpt2()[1])
        off = abs(torch.as_tensor(ours()) - sides[3]()).max()
        assert off < 1e-4, off
    times = in_turn(sides, 2 * rounds)
    ratio(measure, "plain pass of transformers without logits", "≤ 1.25", [t[:2] for t in times])
    ratio(measure, "plain pass with logits", "", [(t[0], t[2]) for t in times])
    if len(sides) == 3:
        row(measure, against, "", "not installed: pip install -r requirements-bench.txt")
        return
    ratio(measure, against, "", [(t[0], t[3]) for t in times])
    a, b = in_processes("ours", "theirs")
    row("the same, peak memory of a process", against, "", f"{a / b:.2f}  ({a:,.0f} MiB : {b:,.0f} MiB)")


def bench_interventions(rounds):
    """All 144 of one window. Full passes cost the same for every head, so theirs is from 6."""
    import heads

    model, _ = heads.open_model(gpt2_folder())
    w = windows(1, 1024)

    def passes():
        for head in range(6):
            model.tap = heads.removing({4: [[head]]})
            heads.token_losses(model, w)
        model.tap = None

    heads.measure(model, w)  # not the first call: it allocates
    theirs = 24 * seconds(passes)
    ours = seconds(lambda: heads.measure(model, w, interventions=["own"]))
    text = f"{ours / theirs:.2f}  ({ours:.0f} s : {theirs:.0f} s)"
    row("all 144 interventions, GPT-2, 1 x 1024", "full forward passes with a hook", "≤ 0.8", text)


def bench_experiment(rounds):
    """
    Wall time of four 1M runs over the sum of their steps and evaluations; and two processes beside one.

    What is neither step nor evaluation does not grow with the length of a run, so it is measured in short runs,
    which take less time, and set against those of the config.
    """
    (shape, batch), steps = SHAPES["1M"], 120
    tokens()
    rates = []  # tokens a second in training steps, over all processes
    with tempfile.TemporaryDirectory() as place:
        config = Path(place) / "few.py"
        config.write_text(f"exec(open({str(HERE / 'config/residual_1m.py')!r}).read())\nseeds = range(1)\n")
        planned = train.read_config(str(config), {})
        for processes in (2, 1):
            call = [sys.executable, str(HERE / "train.py"), str(config), f"--dataset={DATA}", f"--max_iters={steps}"]
            call += [f"--out_dir={place}/{processes}", "--log_interval=1"]
            threads = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads() // processes)}
            start = time.perf_counter()
            many = [subprocess.Popen(call, stdout=subprocess.DEVNULL, env=threads) for _ in range(processes)]
            assert not any(p.wait() for p in many)
            wall = time.perf_counter() - start
            logs = [log.read_text().splitlines() for log in Path(place).glob(f"{processes}/*/*/log.jsonl")]
            rows = [json.loads(line) for log in logs for line in log]
            times = [batch * 64 / r["tokens_per_second"] for r in rows if "tokens_per_second" in r]
            rates.append(processes * len(times) * batch * 64 / sum(times))
    model, w = GPT(GPTConfig(**shape)), prepare.windows(prepare.load(DATA, check=False)[1] % 65, 64)
    window_losses(model, w)
    evaluation = statistics.median(seconds(lambda: window_losses(model, w)) for _ in range(rounds))
    rest = wall - sum(times) - evaluation * sum("val_loss" in r for r in rows)
    evaluations = len(planned.arms) * (planned.max_iters // planned.eval_interval + 1)
    spent = sum(times) * planned.max_iters / steps + evaluation * evaluations
    text = f"{1 + rest / spent:.3f}  ({rest + spent:.0f} s : {spent:.0f} s)"
    row(f"experiment of four 1M runs, {planned.max_iters} steps", "its training steps and evaluations", "≤ 1.05", text)
    text = f"{rates[0] / rates[1]:.2f}  ({rates[0]:,.0f} : {rates[1]:,.0f} tokens/s)"
    row("two processes of one thread", "one process of two threads, 1M", "", text)


def bench_prepare(rounds):
    """About 100 MB, 50 MB of Python sources twice, as a .jsonl file; our side is the whole command."""
    measure, against = "prepare, GPT-2 encoding, 2 workers", "bare encode_ordinary_batch, 2 threads"
    try:
        encoding = prepare.gpt2()
    except UserError as e:
        row(measure, against, "≥ 0.9", str(e))
        return
    texts, size = [], 0
    for path in sorted(Path(json.__file__).parent.parent.rglob("*.py")):
        texts.append(path.read_text(encoding="utf-8", errors="replace"))
        if (size := size + len(texts[-1])) > 50e6:
            break
    texts, size = 2 * texts, 2 * size
    with tempfile.TemporaryDirectory() as place:
        source = Path(place) / "text.jsonl"
        source.write_text("\n".join(json.dumps({"text": t}) for t in texts))
        call = [sys.executable, str(HERE / "prepare.py"), str(source), f"--out={place}/out", "--workers=2"]
        ours = lambda: subprocess.run(call, check=True, capture_output=True)  # noqa: E731
        times = in_turn([lambda: encoding.encode_ordinary_batch(texts, num_threads=2), ours], rounds - 1)
        n = sum(prepare.load(Path(place) / "out", check=False)[2]["tokens"].values())
    rate = n / statistics.median(t[0] for t in times)
    ratio(f"{measure}, {size / 1e6:.0f} MB", f"{against}, {rate / 1e6:.1f}M tokens/s", "≥ 0.9", times)


def bench_start(rounds):
    tokens()
    config = str(HERE / "config/demo.py")
    with tempfile.TemporaryDirectory() as place:
        call = [sys.executable, "-X", "importtime", str(HERE / "train.py"), config, f"--dataset={DATA}", "--seeds=0"]
        call += ["--max_iters=1", "--arms=FullResidual", f"--out_dir={place}/out"]
        loaded = Path(place) / "imports"
        start = time.perf_counter()
        with (
            open(loaded, "w") as err,
            subprocess.Popen(call, stdout=subprocess.PIPE, stderr=err, text=True) as process,
        ):
            first = next(time.perf_counter() - start for line in process.stdout if "step 0/" in line)
            process.communicate()
        loaded = loaded.read_text().replace(" ", "")
    unused = ("scipy", "matplotlib", "transformers", "datasets", "tiktoken", "wandb", "pandas")
    heavy = ", ".join(m for m in unused if f"|{m}\n" in loaded)
    row("`python train.py` to the first step, demo", "", "", f"{first:.1f} s; unused imports: {heavy or 'none'}")


def bench_data(rounds):
    """The start of an experiment on much text: the first reads and counts all of it, later ones neither."""
    n = 10**9 if rounds > 2 else 10**8
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "data/big"
        folder.mkdir(parents=True)
        piece = (torch.arange(10**7) * 2654435761 % 50257).to(torch.uint16).numpy().tobytes()
        with open(folder / "train.bin", "wb") as f:
            for _ in range(n // 10**7):
                f.write(piece)
        (folder / "val.bin").write_bytes(piece[: 2 * 10**5])
        call = [sys.executable, str(HERE / "train.py"), str(HERE / "config/demo.py"), "--dataset=big", "--plan"]
        call.append("--vocab_size=50304")
        times = [seconds(lambda: subprocess.run(call, cwd=place, check=True, stdout=-1)) for _ in range(3)]
    text = f"first {times[0]:.1f} s, later {times[1]:.1f} s, {times[2]:.1f} s"
    row(f"start with {n / 1e9:g} billion tokens", "", "≤ 5 s", f"{text}; validation comes after it")


PEAK = {  # dense bfloat16 operations a second, by what the device's name holds; the first that fits
    "B200": 2250e12, "H200 NVL": 835e12, "H200": 989e12, "H100 NVL": 835e12, "H100 PCIe": 756e12, "H100": 989e12,
    "A100": 312e12, "L40S": 362e12, "L40": 181e12, "A10G": 70e12, "A10": 125e12, "L4": 121e12, "4090": 165e12,
    "3090": 71e12,
}  # fmt: skip


def bench_gpu(rounds):
    """Tokens a second, share of the chip's bfloat16 rate and peak memory on CUDA; what determinism costs."""
    if not torch.cuda.is_available():
        row("tokens per second on a GPU", "", "", "there is no GPU here that torch can use")
        return
    chip = torch.cuda.get_device_name()
    peak = next((rate for name, rate in PEAK.items() if name in chip), None)
    wide = {"n_layer": 8, "n_head": 8, "n_embd": 512, "block_size": 1024, "vocab_size": 50304, "bias": False}
    shapes = {"10M": SHAPES["10M"], "51M": (wide, 128), "124M": (SHAPES["124M"][0], 128)}
    cases = [(name, removal, True) for removal in ("none", "self") for name in shapes] + [("10M", "none", False)]
    for name, removal, deterministic in cases:
        shape, batch = shapes[name]
        micro = min(batch, 64 if name == "10M" else 16)
        torch.compiler.reset()
        torch.cuda.reset_peak_memory_stats()
        torch.use_deterministic_algorithms(deterministic)
        step = our_step(shape, batch, removal=removal, micro_batch_size=micro)
        times = [t for (t,) in in_turn([step], 3 * rounds)]  # a step ends with its loss on the CPU
        rate = 1 / statistics.median(times)
        share = f"{operations_of(shape, batch) * rate / peak:.1%} of peak" if peak else "peak rate unknown"
        memory = torch.cuda.max_memory_allocated() / 2**30
        text = f"{batch * shape['block_size'] * rate:,.0f} tokens/s, {share}, {memory:.1f} GiB"
        how = "" if deterministic else ", not deterministic"
        row(f"{name}, removal={removal}{how}", f"{chip}, {micro} x {shape['block_size']}", "", text)


def main(argv):
    _, flags = parse(argv, {"quick": bool, "only": str, "peak": str, "serve": str, "nanogpt": str, "help": bool})
    if flags.get("help"):
        print(__doc__.strip())
        return
    if "peak" in flags:
        print(peak(flags["peak"]))
        return
    if "serve" in flags:
        return serve(flags["serve"])
    FOLDER["nanogpt"] = flags.get("nanogpt", "")
    quick = flags.get("quick", False)
    benches = {k.removeprefix("bench_"): v for k, v in globals().items() if k.startswith("bench_")}
    if flags.get("only", "") not in ("", *benches):
        raise UserError(f"--only={flags['only']} must be one of {', '.join(benches)}")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; ratio [least, most] (times)")
    row("measure", "against", "goal", "")
    for name, bench in benches.items():
        if flags.get("only", name) == name and not (quick and name not in QUICK):
            bench(2 if quick else 3)  # rounds
            torch.compiler.reset()


if __name__ == "__main__":
    cli(main, keep=not any(arg.startswith("--serve") for arg in sys.argv))
