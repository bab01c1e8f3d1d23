"""
One config -> every run of the experiment.

    python train.py config/NAME.py [--key=value ...] [--jobs=N] [--arms=A,B] [--seeds=0-3] [--plan] [--amend="reason"]
    torchrun --standalone --nproc_per_node=N train.py config/NAME.py ...

A config is plain Python assignments of the names in Config below. A run is arm x seed and lives in
out/EXPERIMENT/ARM/seedK/; seeds are the outer loop, so an interrupted experiment holds complete pairs. Finished runs
are skipped, unfinished ones resume. --jobs=N runs N processes that share the runs through file locks; so do commands
that are started on several machines with one disk. --arms and --seeds narrow one invocation; --plan writes plan.json,
which binds the experiment, and stops; --amend lets a changed config, source or data go on, and every report says so.

Two arms with one seed differ by the arm and by nothing else: the same initial weights to the bit, and at step s the
same batch, which is a function of (seed, s) alone.
"""

import contextlib
import dataclasses
import fnmatch
import gc
import json
import math
import os
import platform
import re
import signal
import sys
import textwrap
import time
import typing
import warnings
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with this, set before CUDA

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

import configurator
import prepare
from configurator import JOB, STOP, UserError, cli, locked, nearest, read_json, typed, whole_file
from model import (
    GPT,
    GPTConfig,
    batch,
    bfloat16_gain,
    compiles,
    digest,
    hash_seed,
    learning_rate,
    make_optimizer,
    take_step,
    window_losses,
)


@dataclass
class Config(GPTConfig):
    """Every tunable value. Those of the model and its ablation flags are in model.py, and can be set the same way."""

    vocab_size: int | None = None  # None: that of the data
    # the experiment
    arms: dict = field(default_factory=lambda: {"Baseline": {}})  # name -> model flags that this arm changes
    seeds: list | range | tuple = range(1)
    # planned: (arm, arm or "unigram" or "bigram"), first minus second, and perhaps what is predicted of it, in nats:
    # (arm, arm, (low, high)) with None for an open end. ((A, B), (C, D)) is the interaction (A - B) - (C - D)
    contrasts: list | tuple = ()
    tune_seeds: int = 0  # a side such as "AttnOnly@*" is the best of those arms over the first so many seeds
    looks: list | tuple = ()  # numbers of seeds at which the report may be read, such as (8, 16, 32)
    margin: float = 0.02  # nats within which two arms count as equivalent
    alpha: float = 0.05
    # data and places
    out_dir: str | None = None  # None: out/ and the name of the config
    dataset: str = "pydocs"  # a folder in data/
    init_from: str = "scratch"  # or any name that GPT.from_pretrained takes; a shape that is not set is then its own
    # a step
    batch_size: int = 12  # sequences a step, over all devices
    micro_batch_size: int | None = None  # sequences that one device takes at once; None: its whole share
    max_iters: int = 2000
    learning_rate: float = 1e-3
    decay_lr: bool = True  # cosine to min_lr
    warmup_iters: int = 100
    lr_decay_iters: int | None = None  # None: max_iters
    min_lr: float = 1e-4
    weight_decay: float = 0.1  # on matrices only
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0  # 0: off
    # watching
    eval_interval: int = 250
    eval_tokens: int | None = None  # validate on the first so many tokens; None: on the whole split
    log_interval: int = 10
    checkpoint_interval: int = 500  # steps between two saved states, from which a killed run resumes
    wandb_log: bool = False
    wandb_project: str = "nanoAblate"
    # machine
    device: str = "auto"  # cpu, cuda or mps; auto: cuda where there is one, else cpu
    dtype: str = "auto"  # of autocast: float32 or bfloat16; auto: what choose() below takes for shape and device
    compile: bool | str = "auto"  # likewise
    threads: int | str = "auto"  # CPU threads of a process: OMP_NUM_THREADS, 1 below a width of 256, else all cores
    deterministic: bool = True  # same command, same machine, same bits


TYPES = typing.get_type_hints(Config)
TRAINING = ["learning_rate", "min_lr", "warmup_iters", "lr_decay_iters", "decay_lr", "weight_decay", "grad_clip"]
TRAINING += ["beta1", "beta2"]
ARM = {f.name for f in dataclasses.fields(GPTConfig)} - {"block_size", "vocab_size"} | set(TRAINING)  # what an arm sets
REFERENCES = ("unigram", "bigram")
SOURCES = ("model.py", "configurator.py", "prepare.py", "train.py")
RULES = (
    "outcome: loss over the whole validation split after the last step. test: two-sided paired t over seeds. differs:"
    " Holm's p below alpha. equivalent, as predicted: one-sided t tests at alpha / contrasts. alpha: divided by looks"
)

# ---------------------------------------------------------------------------------------------------------------------
# this process, on this machine


RANK, PROCESSES = 0, 1  # set by main
TERMINAL = sys.stderr.isatty()


class Stopped(Exception):
    """A signal came, and the state is saved."""


def say(text):
    if RANK == 0:
        tqdm.write(text)
        sys.stdout.flush()


def agreed(value):
    """rank 0's value, on every rank."""
    values = [value]
    if PROCESSES > 1:
        dist.broadcast_object_list(values)
    return values[0]


def finite(x):  # or what JSON has for it
    return x if math.isfinite(x) else None


def choose(config, planned):
    """
    Put what the plan says, or a measured choice, in the place of "auto" for dtype and compile.

    Another than float32, eager, is taken where it is at least 1.2 times as fast. bfloat16 can be supported and slower;
    below a width of 256 it gains nothing. On a CPU compiling gains with bfloat16 alone, and takes half a minute a run.
    """
    for name in ("dtype", "compile"):
        if getattr(config, name) == "auto" and name in planned:
            setattr(config, name, planned[name])
    wide = config.n_embd >= 256
    if config.dtype == "auto":
        fast = config.device == "cuda" or config.device == "cpu" and wide and bfloat16_gain() >= 1.2
        config.dtype = "bfloat16" if fast else "float32"
    if config.compile == "auto":
        fast = config.device == "cpu" and wide and config.dtype == "bfloat16" and config.max_iters >= 200
        config.compile = (fast or config.device == "cuda") and compiles()


# ---------------------------------------------------------------------------------------------------------------------
# configuration


@contextlib.contextmanager
def pretrained_errors():
    try:
        yield
    except ValueError as e:
        raise UserError(f"init_from: {e}") from None


def arm_config(config, arm):
    """The Config of an arm: that of the experiment, with what the arm sets; raises UserError."""
    values = {}
    known = ARM if config.init_from == "scratch" else ARM - {"n_layer", "n_head", "n_embd", "bias", "n_kv_head"}
    for name, value in config.arms[arm].items():
        if name not in known:
            raise UserError(f"arm {arm} sets {name!r}, which no arm sets{nearest(str(name), known)}")
        values[name] = typed(f"arm {arm}: {name}", value, TYPES[name])
    config = dataclasses.replace(config, **values)
    check_ranges(config, f"arm {arm}: ")
    try:
        dataclasses.replace(config, vocab_size=config.vocab_size or 1).check()
    except ValueError as e:
        raise UserError(f"arm {arm}: {e}") from None
    return config


def checked_side(side, config, second):
    """A side of a contrast: an arm, a family of arms such as "A@*", or as the second a reference; raises UserError."""
    arms = list(config.arms)
    if type(side) is not str:
        raise ValueError
    if "*" in side:
        if not fnmatch.filter(arms, side):
            raise UserError(f"contrasts: no arm is called like {side!r}")
        if not 0 < config.tune_seeds < len(config.seeds) - 1 or config.looks:
            why = "tune_seeds, at least two seeds more than those, and no looks"
            raise UserError(f"contrasts: {side!r} chooses an arm, and that needs {why}")
    elif side not in arms + list(REFERENCES) * second:
        raise UserError(f"contrasts: no arm is called {side!r}{nearest(side, arms)}")
    return side


def checked_contrast(contrast, config):
    """[a, b], and perhaps [low, high] predicted with None for one open end; raises UserError."""
    try:
        a, b, *predicted = contrast if isinstance(contrast, list | tuple) else ()
        if a == b or len(predicted) > 1:
            raise ValueError
        if isinstance(a, list | tuple) and isinstance(b, list | tuple):  # an interaction
            a, b = ([checked_side(side, config, False) for side in pair] for pair in (a, b))
            if len(a) != 2 or len(b) != 2 or any("*" in side for side in a + b):
                raise ValueError
        else:
            a, b = checked_side(a, config, False), checked_side(b, config, True)
        for low, high in predicted:
            ends = [x for x in (low, high) if x is not None]
            if not ends or not all(type(x) in (int, float) and abs(x) < 1e9 for x in ends) or ends != sorted(set(ends)):
                raise ValueError
    except UserError:
        raise
    except (TypeError, ValueError):
        what = "two names or two pairs, and perhaps the interval that is predicted, such as ('A', 'B', (None, 0.02))"
        raise UserError(f"contrast {contrast!r} must be {what}") from None
    return [a, b, *map(list, predicted)]


LEAST = dict.fromkeys(("batch_size", "max_iters", "eval_interval", "log_interval", "checkpoint_interval"), 1)
LEAST |= dict.fromkeys(("lr_decay_iters", "eval_tokens", "vocab_size", "micro_batch_size"), 1)
LEAST |= dict.fromkeys(("tune_seeds", "learning_rate", "min_lr", "weight_decay", "beta1", "beta2", "grad_clip"), 0)
LEAST["warmup_iters"] = 0
CHOICES = {"device": ("auto", "cpu", "cuda", "mps"), "dtype": ("auto", "float32", "bfloat16")}
CHOICES["compile"] = (True, False, "auto")


def check_ranges(config, where=""):
    """Raises UserError for a value that would train nothing, or something else than it says."""
    for name, value in vars(config).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{where}{name}={value} must be finite")
        if value is not None and name in LEAST and value < LEAST[name]:
            raise UserError(f"{where}{name}={value} must be at least {LEAST[name]}")
        if name in CHOICES and value not in CHOICES[name]:
            raise UserError(f"{where}{name}={value!r} must be one of {', '.join(map(str, CHOICES[name]))}")
    if config.threads != "auto" and not (type(config.threads) is int and config.threads > 0):
        raise UserError(f"threads={config.threads!r} must be auto, or a number from 1 on")
    if config.beta1 >= 1 or config.beta2 >= 1:
        raise UserError(f"{where}beta1={config.beta1} and beta2={config.beta2} must be below 1")


def check_experiment(config):
    """Raises UserError for arms, seeds and contrasts that make no experiment; contrasts become lists."""
    if not config.margin > 0 or not 1e-9 < config.alpha < 0.5:
        raise UserError(f"margin={config.margin} must be positive and alpha={config.alpha} between 0 and 0.5")
    if not config.arms or not config.seeds or not config.out_dir:
        raise UserError("arms, seeds and out_dir must not be empty")
    for seed in config.seeds:
        if type(seed) is not int or seed < 0 or config.seeds.count(seed) > 1:
            raise UserError(f"seeds hold {seed!r}: each must be an integer from 0 on, and there once")
    looks = list(config.looks)
    whole = all(type(n) is int and n > 1 for n in looks)
    if looks and not (whole and looks == sorted(set(looks)) and looks[-1] == len(config.seeds)):
        raise UserError(f"looks={looks} must rise from 2 or more to the number of seeds, which is {len(config.seeds)}")
    folders = [str(arm).lower() for arm in config.arms]  # one folder where the file system does not tell case
    for arm, flags in config.arms.items():
        if type(arm) is not str or not re.fullmatch(r"[A-Za-z0-9_+@][A-Za-z0-9_.+@-]{0,99}", arm) or arm in REFERENCES:
            raise UserError(f"arm {arm!r}: a name is letters, digits and _+-.@ and neither unigram nor bigram")
        if folders.count(arm.lower()) > 1 or arm.startswith(("plan.", "report.", "contrasts.", "job")):
            raise UserError(f"arm {arm}: its folder has the name of another arm, or of a file of ours")
        if type(flags) is not dict:
            raise UserError(f"arm {arm} must be a dict of what it sets, not {flags!r}")
        arm_config(config, arm)
    config.contrasts = [checked_contrast(c, config) for c in config.contrasts]
    pairs = [c[:2] for c in config.contrasts]
    if repeated := [pair for pair in pairs if pairs.count(pair) > 1]:
        raise UserError(f"contrast {repeated[0]} is planned twice")


def read_config(path, flags):
    """A config file and the flags of the command line -> Config; raises UserError."""
    values = configurator.assignments(path)
    values.update(flags)
    if isinstance(name := values.get("init_from", "scratch"), str) and name != "scratch":
        with pretrained_errors():
            values = GPT.pretrained_shape(name) | values  # what is set and does not fit is refused with the weights
    for name, value in values.items():
        if name not in TYPES:
            raise UserError(f"unknown name {name} in {path}{nearest(name, TYPES) or ': train.py lists the known ones'}")
        values[name] = typed(name, value, TYPES[name])
    config = Config(**values)
    config.seeds = list(config.seeds)
    config.out_dir = str(Path("out") / Path(path).stem) if config.out_dir is None else config.out_dir
    config.lr_decay_iters = config.max_iters if config.lr_decay_iters is None else config.lr_decay_iters
    check_ranges(config)
    check_experiment(config)
    return config


def first_model(config, arm, seed, verify=False):
    """The model that a run starts with; all arms of a seed have the same parameters."""
    config = arm_config(config, arm)
    gpt_config = GPTConfig(**{f.name: getattr(config, f.name) for f in dataclasses.fields(GPTConfig)})
    if config.init_from == "scratch":
        return GPT(gpt_config, seed)
    with pretrained_errors():
        return GPT.from_pretrained(config.init_from, seed, verify, **vars(gpt_config))


# ---------------------------------------------------------------------------------------------------------------------
# the plan


PARTS = ("arms", "seeds", "contrasts", "alpha", "margin", "looks", "tune_seeds")  # names of Config on their own
BINDING = ("config", *PARTS, "rules", "data", "source")  # what a new plan must not change
PLAN = ("config", "arms", "seeds", "contrasts", "alpha", "margin", "data", "source")  # what a plan of any version has
PLAN += ("commit", "amendments", "packages", "references", "reference_windows")
NOT_BINDING = ("out_dir", "log_interval", "checkpoint_interval", "wandb_log", "wandb_project", "threads")


def differences(planned, now):
    """One line for each binding value in which a new plan, or the record of a run, differs from what was planned."""
    lines = []
    for part in BINDING:
        a, b = planned.get(part), now.get(part)
        if isinstance(a, dict) and isinstance(b, dict):
            for k in {**a, **b}:
                old, new = a.get(k), b.get(k)
                if part == "source" and isinstance(old, dict) and isinstance(new, dict):
                    old, new = old["code"], new["code"]  # comments and layout may change
                if old != new and not (part == "config" and k in NOT_BINDING):
                    lines.append(f"{part}.{k}: planned {old!r}, now {new!r}")
        elif a != b:
            lines.append(f"{part}: planned {a!r}, now {b!r}")
    return lines


def binding(plan):
    """{part: digest} of all that binds in a plan. Each run records it, so that a plan that was edited later shows."""
    parts = {part: plan.get(part) for part in (*BINDING, "references", "reference_windows", "amendments")}
    parts["config"] = {k: v for k, v in plan["config"].items() if k not in NOT_BINDING}
    return {part: digest(value) for part, value in parts.items()}


def make_plan(config, data):
    """All that binds an experiment, as plain JSON values; written before the first step."""
    return {
        "config": {k: v for k, v in vars(config).items() if k not in PARTS},
        **{k: getattr(config, k) for k in PARTS},
        "rules": RULES,
        "data": data["record"],
        "source": {name: configurator.source_hashes(Path(__file__).with_name(name)) for name in SOURCES},
        "commit": configurator.commit(Path(__file__).parent),
        "packages": {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__},
        "machine": {"system": platform.platform(), "processor": platform.machine(), "cores": os.cpu_count()},
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "amendments": [],
    }


def more_seeds(out):
    """How many, by the report that is there, would find the margin in every contrast."""
    with contextlib.suppress(UserError, KeyError, ValueError, TypeError):  # none, or of an earlier version
        n = max(c["n_for_margin"] or 0 for c in read_json(out / "report.json", "contrasts")["contrasts"])
        return f"; about {n} seeds would find the margin in each contrast" if n else ""
    return ""


def bind_plan(config, data, amend):
    """Write plan.json, or compare with the one that is there; another plan stops the command unless amended."""
    out = Path(config.out_dir)
    path = out / "plan.json"
    out.mkdir(parents=True, exist_ok=True)
    configurator.check_disk(out)
    with locked(out / "plan.lock", wait=True):
        old = read_json(path, *PLAN) if path.exists() else None
        choose(config, old["config"] if old else {})
        new = json.loads(json.dumps(make_plan(config, data)))  # as it will be read back: lists for tuples
        lines = differences(old, new) if old else []
        if old and not lines:
            return old
        finished = sorted(str(p.parent.relative_to(out)) for p in out.glob("*/seed*/ckpt.pt"))
        if not old and any(out.glob("*/seed*/*.*")):  # a plan that comes after the results plans nothing
            lines = ["the plan was written after runs had begun"]
        if lines and not amend:
            for line in lines:
                say(line)
            if not old:
                raise UserError(f"{out} holds runs and no plan.json: choose another --out_dir, or --amend='reason'")
            how = f" (more seeds are a second experiment, with fresh seeds and a plan of its own{more_seeds(out)})"
            hint = how if all(line.startswith("seeds:") for line in lines) else ""
            raise UserError(f"{path} plans another experiment{hint}: choose another --out_dir, or say --amend='reason'")
        losses = prepare.reference_losses(data["train"], data["windows"], data["vocab_size"])  # for a new plan alone
        new["references"] = {k: None if v is None else float(v.mean()) for k, v in losses.items()}
        new["reference_windows"] = {k: None if v is None else v.tolist() for k, v in losses.items()}
        if lines:
            note = {"time": new["time"], "reason": amend, "changes": lines, "finished": finished}
            note["binding_sha256"] = digest(binding(old)) if old else None
            old = old or {"time": new["time"], "amendments": []}
            new |= {"time": old["time"], "amendments": [*old["amendments"], note]}
        with whole_file(path) as f:
            last = "reference_windows"  # thousands of numbers: on one line at the end
            text = json.dumps({k: v for k, v in new.items() if k != last}, indent=1)
            f.write(f"{text[:-2]},\n {json.dumps(last)}: {json.dumps(new[last])}\n}}\n")
    return new


# ---------------------------------------------------------------------------------------------------------------------
# one run


def write_log(folder, rows):
    with whole_file(folder / "log.jsonl") as f:
        f.writelines(json.dumps(row) + "\n" for row in rows)


def save_state(folder, state):
    """state.pt, from which a run resumes to the bit, and log.jsonl up to the same step."""
    if (folder / "ckpt.pt").exists():  # two machines that don't see each other's locks
        raise FileExistsError(folder / "ckpt.pt")
    seals = (folder / "state.sha256").read_text().split() if (folder / "state.sha256").exists() else []
    with whole_file(folder / "state.sha256") as f:  # of the last state and of this one: one of the two will be there
        f.write("\n".join([*seals[-1:], digest(state)]))
    with whole_file(folder / "state.pt", "wb") as f:
        torch.save(state, f)
    write_log(folder, state["rows"])


def load_state(folder, record):
    """The saved state of this very run, or None with a line that says why it starts from its beginning."""
    path = folder / "state.pt"
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if digest(state) not in (folder / "state.sha256").read_text().split():
            raise ValueError("its contents are not what was saved")
        mine, own = ({k: r.get(k) for k in ("arm", "seed", "processes")} for r in (state["record"], record))
        if mine != own or differences(state["record"], record):
            raise ValueError("it belongs to another run, config, data or source, or to masks of other processes")
        return state
    except Exception as e:  # a damaged file can raise anything in its reader
        say(f"{path} can't be resumed ({textwrap.shorten(str(e), 200)}): this run starts from its beginning")
        return None


def finish(folder, rows, ckpt):
    """Write the files of a finished run. ckpt.pt is the last: where it is, all is. Raises FileExistsError if it was."""
    if (folder / "ckpt.pt").exists():
        raise FileExistsError(folder / "ckpt.pt")
    write_log(folder, rows)
    with whole_file(folder / "ckpt.pt", "wb", replace=False) as f:
        torch.save(ckpt, f)
    for rest in ("state.pt", "state.sha256", "lock"):
        (folder / rest).unlink(missing_ok=True)


def autocast(config):
    return torch.autocast(config.device, torch.bfloat16, enabled=config.dtype == "bfloat16")


def device_of(config):
    return torch.device(config.device, torch.cuda.current_device()) if config.device == "cuda" else config.device


def drop_gradients(model, config, rows):
    """One forward and backward pass of rows (n, T + 1) that leaves no gradient -> the parameters that got none."""
    with autocast(config):
        _, loss = model(rows[:, :-1], rows[:, 1:], reduction="mean")
    loss.backward()
    unused = [p for p in model.parameters() if p.grad is None]
    model.zero_grad(set_to_none=True)
    return unused


def wrapped(raw, config, rows):
    """The model as it is trained -> (the compiled model, and the same with its gradients shared among processes)."""
    if config.compile:  # as in a fresh process: after 8 variants of a function torch goes on without compiling
        torch.compiler.reset()
    alone = torch.compile(raw) if config.compile else raw
    if not dist.is_initialized():
        return alone, alone
    for p in drop_gradients(raw, config, rows):  # a part that an arm left out: DDP would wait for its gradients
        p.requires_grad_(False)
    ids = [torch.cuda.current_device()] if config.device == "cuda" else None
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")  # its new name is absent before 2.13
    model = torch.nn.parallel.DistributedDataParallel(alone, device_ids=ids, broadcast_buffers=False)
    # DDP lays its buckets out anew after the first backward pass of a process: it comes here, so that the step after a
    # resume adds up in the order of an undisturbed run
    drop_gradients(model, config, rows)
    return alone, model


def validate(raw, windows, device):
    """The loss of each window (n,), float64, measured by all processes together."""
    losses = window_losses(raw, windows, RANK, PROCESSES)
    if PROCESSES > 1:
        losses = losses.to(device)
        dist.all_reduce(losses)
    return losses.cpu()


def over_processes(loss, device):
    """-> (the mean loss of all processes, the signal that any of them was sent, or 0)."""
    if PROCESSES == 1:
        return float(loss), STOP["signal"]
    both = torch.stack([loss / PROCESSES, torch.tensor(float(STOP["signal"]), device=device)])
    dist.all_reduce(both)
    return both.tolist()


def final_row(raw, alone, config, seed, data, record, step, losses, seconds):
    """-> (batch of the training path (micro, T + 1), the row that ends a run's log and regenerates every report)."""
    device = device_of(config)
    micro = config.micro_batch_size or config.batch_size // PROCESSES
    fixed = batch(data["train"], seed, config.max_iters, config.batch_size, config.block_size)[:micro]
    if raw.config.dropout:
        raw.eval()
    with autocast(config):  # with gradients, as without them torch may take, or compile, another path
        _, path_loss = alone(fixed[:, :-1].to(device), fixed[:, 1:].to(device), reduction="mean")
    sample = None
    if losses is not None:
        raw.eval()
        first = torch.as_tensor(data["windows"][:1, :1].astype(np.int64), device=device)  # (1, 1)
        ids = raw.generate(first, 128, generator=torch.Generator(device).manual_seed(hash_seed(seed, "sample")))
        sample = prepare.decode(ids[0, 1:].tolist(), data["meta"])
    chip = torch.cuda.get_device_name() if config.device == "cuda" else platform.processor() or platform.machine()
    return fixed, {
        "iter": step,
        "val_loss": None if losses is None else float(losses.mean()),
        "status": "diverged" if losses is None else "finished",
        "training_path_loss": finite(float(path_loss.detach())),
        **record,
        "weights_sha256": digest(raw.state_dict()),
        "parameters": sum(p.numel() for p in raw.parameters()),
        "seconds": seconds,
        "processes": PROCESSES,
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "device_name": chip,
        "sample": sample and sample[:128],
        "window_losses": None if losses is None else losses.tolist(),
    }


def train_run(config, arm, seed, data, record, folder, bar):
    """Train one run, or the rest of it, and save it -> the last row of its log."""
    device, name = device_of(config), f"{arm} seed{seed}"
    share = config.batch_size // PROCESSES  # sequences a step of this process
    micro = config.micro_batch_size or share
    raw = first_model(config, arm, seed)
    if config.init_from != "scratch" and digest(dict(raw.named_parameters())) != record["data"]["init_from_sha256"]:
        raise UserError(f"init_from: the weights of {config.init_from!r} have changed since the plan was written")
    config = arm_config(config, arm)
    raw.to(device)
    optimizer = make_optimizer(raw, config)
    step, rows, seconds = 0, [], 0.0
    if (state := load_state(folder, record)) is not None:
        raw.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, rows, seconds = state["step"], state["rows"], state["seconds"]
        record = state["record"]  # with the hash of the plan that it began under
        say(f"{name}: resumes at step {step}")
    raw.train()
    alone, model = wrapped(raw, config, batch(data["train"], seed, step, micro, config.block_size).to(device))
    title, wanted = f"{Path(config.out_dir).name}/{arm}/seed{seed}", config.wandb_log and RANK == 0
    log = configurator.wandb_run(config.wandb_project, title, record, rows) if wanted else None
    bar.reset(config.max_iters)
    bar.initial = bar.n = step
    bar.set_description(name)
    finished, timed, tokens = True, 0.0, 0  # since the last row that was logged
    while finished and step < config.max_iters:
        row = {"iter": step}
        raw.at_step(step)
        if step % config.eval_interval == 0:
            loss = float(validate(raw, data["windows"], device).mean())
            row["val_loss"] = finite(loss)
            if not TERMINAL:  # there a bar shows it
                say(f"{name} step {step}/{config.max_iters}: val {loss:.4f}")
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        w = batch(data["train"], seed, step, config.batch_size, config.block_size)  # (batch_size, T + 1)
        w = w[RANK * share : (RANK + 1) * share].to(device)  # (share, T + 1)
        key = (seed, "dropout", step, RANK) if raw.config.dropout else None
        loss, norm = take_step(model, optimizer, w, micro, autocast(config), config.grad_clip, key)
        loss, stop = over_processes(loss, device)
        timed += time.perf_counter() - start
        tokens += config.batch_size * config.block_size
        finished = math.isfinite(loss)
        if step % config.log_interval == 0 or not finished:
            row |= {"loss": finite(loss), "lr": group["lr"], "grad_norm": finite(float(norm))}
            row["tokens_per_second"] = tokens / timed
            bar.set_postfix_str(f"loss {loss:.4f}, {tokens / timed:,.0f} tokens/s", refresh=False)
            seconds, timed, tokens = seconds + timed, 0.0, 0
        if len(row) > 1:
            rows.append(row)
            if log:
                log.log(row)
        step += 1
        bar.update()
        if finished and (stop or step % config.checkpoint_interval == 0 and step < config.max_iters):
            if RANK == 0:
                state = {"model": raw.state_dict(), "optimizer": optimizer.state_dict()}
                save_state(folder, state | {"step": step, "rows": rows, "record": record, "seconds": seconds + timed})
            if stop:
                say(f"{name}: stopped and saved at step {step}; the same command resumes it")
                raise Stopped
    raw.at_step(step)
    losses = validate(raw, data["windows"], device)
    if not finished or not bool(losses.isfinite().all()):
        losses = None
    if RANK > 0:
        return None
    fixed, last = final_row(raw, alone, config, seed, data, record, step, losses, seconds + timed)
    rows.append(last)
    ckpt = {k: v for k, v in last.items() if k not in ("iter", "val_loss")}
    ckpt |= {"step": step, "val_history": [[r["iter"], r["val_loss"]] for r in rows if "val_loss" in r]}
    ckpt |= {"window_losses": losses, "training_path_batch": fixed.int(), "model": raw.state_dict()}
    finish(folder, rows, ckpt)
    if log:
        log.log({k: last[k] for k in ("iter", "val_loss")})
        log.finish()
    return last


# ---------------------------------------------------------------------------------------------------------------------
# the experiment


def prepare_machine(config):
    """Set up devices, processes and determinism."""
    if config.device == "auto":
        config.device = "cuda" if torch.cuda.is_available() else "cpu"
    if not {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}[config.device]:
        raise UserError(f"device={config.device}: there is none on this machine")
    if config.compile is True and not compiles():
        raise UserError("compile=True: torch.compile does not work on this machine, say --compile=False")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    torch.set_num_threads(configurator.thread_count(config.threads, config.n_embd, here))
    share = config.batch_size // PROCESSES
    if config.batch_size % PROCESSES:
        raise UserError(f"batch_size={config.batch_size} sequences can't be divided among {PROCESSES} processes")
    if config.micro_batch_size is not None and share % config.micro_batch_size:
        raise UserError(f"micro_batch_size={config.micro_batch_size} does not divide a process's {share} sequences")
    if config.device == "cuda":
        if here > (gpus := torch.cuda.device_count()):
            raise UserError(f"{here} processes for {gpus} GPUs on this machine: say --nproc_per_node={gpus}")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "RANK" in os.environ:
        # torchrun may keep its store over a restart: keys of its own for each, or we would call a process that is dead
        store, rank, world = next(dist.rendezvous("env://"))
        store = dist.PrefixStore(f"restart{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        backend = "nccl" if config.device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    torch.use_deterministic_algorithms(config.deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs time


def open_data(config):
    """The tokens, validation windows and references of the experiment, checked by rank 0."""
    folder = Path("data") / config.dataset
    train, val, meta = prepare.load(folder, config.vocab_size, check=RANK == 0)
    config.vocab_size = config.vocab_size or meta["vocab_size"]
    if config.init_from != "scratch" and meta["tokenizer"] == "char" and meta["vocab_size"] != config.vocab_size:
        raise UserError(f"{folder} is in characters, {config.init_from!r} in tokens: prepare it with --tokenizer=gpt2")
    if len(train) <= config.block_size:
        raise UserError(f"{folder} has {len(train)} training tokens, too few for block_size={config.block_size}")
    windows = prepare.windows(val, config.block_size, config.eval_tokens)
    dropped = min(len(val) - 1, config.eval_tokens or len(val)) - len(windows) * config.block_size
    record = {"dataset": config.dataset, "windows": len(windows), "dropped_targets": dropped}
    data = {"train": train, "windows": windows, "meta": meta, "vocab_size": min(config.vocab_size, meta["vocab_size"])}
    if RANK == 0:
        record |= {f"{split}_sha256": meta["sha256"][split] for split in ("train", "val")}
        if config.init_from != "scratch":
            start = first_model(config, next(iter(config.arms)), 0, verify=True)
            record["init_from_sha256"] = digest(dict(start.named_parameters()))
        for contrast in config.contrasts:
            if contrast[1] == "bigram" and data["vocab_size"] > 1024:
                raise UserError(f"contrast {contrast}: bigram counts need a vocabulary of at most 1,024 tokens")
    data["record"] = record
    return data


def held_runs(runs):
    """
    The runs that are left to train, one after another, each locked until the next is asked for.

    runs: {(arm, seed): folder}. Those of a process that died are taken over; for that, one of --jobs waits for others.
    """
    taken = True
    while taken:
        taken, others = False, False
        for run, folder in runs.items():
            with contextlib.ExitStack() as held:
                mine = False
                if RANK == 0 and not (folder / "ckpt.pt").exists():
                    folder.mkdir(parents=True, exist_ok=True)
                    mine = held.enter_context(locked(folder / "lock")) and not (folder / "ckpt.pt").exists()
                    others = others or not mine
                if agreed(mine):
                    taken = True
                    for rest in folder.glob("*.tmp") if RANK == 0 else ():  # of a process that was killed in a write
                        rest.unlink()
                    yield run, folder
        if others and not taken and JOB in os.environ:
            time.sleep(1)
            taken = True


def main(argv):
    global RANK, PROCESSES
    known = {k: v for k, v in TYPES.items() if k != "contrasts"}
    known |= {"arms": str, "seeds": str, "amend": str, "plan": bool, "jobs": int, "help": bool}
    configs, flags = configurator.parse(argv, known)
    if flags.pop("help", False):
        flags = " ".join(f"--{k}={getattr(Config, k, '')}".rstrip("=") for k in known)
        there = " ".join(sorted(str(p) for p in Path("config").glob("*.py")))
        return print(f"{__doc__.strip()}\n\nconfigs here: {there}\nflags: {flags}")
    if len(configs) != 1:
        raise UserError("name one config: python train.py config/NAME.py [--key=value ...]; --help lists them")
    arms, seeds, amend, plan_only, jobs = (flags.pop(name, None) for name in ("arms", "seeds", "amend", "plan", "jobs"))
    RANK, PROCESSES = configurator.launched()
    config = read_config(configs[0], flags)
    arms = configurator.chosen("arms", arms, config.arms)
    seeds = configurator.chosen("seeds", seeds, config.seeds)
    if jobs is not None:
        if jobs < 1 or "RANK" in os.environ:
            raise UserError(f"--jobs={jobs} must be at least 1, and is not for torchrun, which starts processes itself")
        gpus = torch.cuda.device_count() if config.device in ("auto", "cuda") else 0
        program = [sys.executable, __file__, *(a for a in argv if not a.startswith("--jobs="))]
        program.append(f"--threads={configurator.thread_count(config.threads, config.n_embd, jobs)}")
        return configurator.start_jobs(program, jobs, Path(config.out_dir), gpus)
    prepare_machine(config)
    data = open_data(config)
    out = Path(config.out_dir)
    plan = agreed(bind_plan(config, data, amend) if RANK == 0 else None)
    config.dtype, config.compile = plan["config"]["dtype"], plan["config"]["compile"]
    if plan_only:
        return say(f"{out}/plan.json is written, nothing is trained")
    references = ", ".join(f"{k} {v:.4f}" for k, v in plan["references"].items() if v is not None)
    how = f"on {config.device} in {config.dtype}, {'compiled' if config.compile else 'eager'}"
    say(f"{out}: {len(arms)} arms x {len(seeds)} seeds {how}; nats: {references}")
    configurator.heed_signals()
    runs = {(arm, seed): out / arm / f"seed{seed}" for seed in seeds for arm in arms}
    settings = {k: v for k, v in plan["config"].items() if k not in NOT_BINDING}
    bound = {"binding": binding(plan), "binding_sha256": digest(binding(plan))}

    def finished():
        return sum((folder / "ckpt.pt").exists() for folder in runs.values())

    began, before = time.monotonic(), finished()
    all_runs = tqdm(total=len(runs), unit="run", desc=out.name, disable=not TERMINAL or RANK > 0)
    bar = tqdm(total=config.max_iters, unit="step", leave=False, disable=not TERMINAL or RANK > 0)
    for (arm, seed), folder in held_runs(runs):
        record = {"arm": arm, "seed": seed, "config": settings | plan["arms"][arm]}
        record |= {k: plan[k] for k in ("data", "source", "commit")} | bound
        if record["config"]["dropout"]:  # whose masks depend on it
            record["processes"] = PROCESSES
        try:
            last = train_run(config, arm, seed, data, record, folder, bar)
        except FileExistsError:
            say(f"{folder}: another process has finished this run, its files stay; do locks work on this disk?")
            continue
        done = all_runs.n = finished()
        all_runs.refresh()
        if RANK == 0:
            loss = "diverged" if last["val_loss"] is None else f"{last['val_loss']:.4f} nats"
            minutes = (len(runs) - done) * (time.monotonic() - began) / max(1, done - before) / 60
            say(f"{arm} seed{seed}: {loss} after {last['iter']} steps; {len(runs) - done} runs, {minutes:.0f} min left")
    bar.close()
    all_runs.close()
    say(f"{finished()} of {len(runs)} runs are finished; next: python analyze.py runs {out}")


def experiment(argv):
    """main, with the process group ended and the exit status of a signal set."""
    try:
        status = main(argv) or 0
    except Stopped:
        status = 128 + (STOP["signal"] or signal.SIGTERM)
    except torch.OutOfMemoryError:
        raise UserError("the GPU is out of memory: set a smaller micro_batch_size, the losses stay") from None
    if dist.is_initialized():
        gc.collect()  # DDP's hooks are in cycles that would keep the process group, and its threads, until exit
        dist.barrier()
        dist.destroy_process_group()
    configurator.heed_signals(signal.SIG_IGN)  # a repeat must not change the exit status, as Python ends
    sys.exit(status)


if __name__ == "__main__":
    cli(experiment)
