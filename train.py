"""
One config -> every run of the experiment.

    python train.py config/NAME.py [--key=value ...] [--arms=A,B] [--seeds=0-3] [--plan] [--amend="reason"]
    torchrun --standalone --nproc_per_node=N train.py config/NAME.py ...

A config is plain Python assignments of the names in Config below. A run is arm x seed and lives in
out/EXPERIMENT/ARM/seedK/; seeds are the outer loop, so an interrupted experiment holds complete pairs. Finished runs
are skipped, unfinished ones resume. Start the command several times (one process a core or GPU, an array of jobs) and
the processes share the runs among them through file locks. --arms and --seeds narrow one invocation; --plan writes
plan.json, which binds the experiment, and stops; --amend lets a changed config, source or data go on, and says so in
every report.

Two arms with one seed differ by the arm and by nothing else: the same initial weights to the bit, and at step s the
same batch, which is a function of (seed, s) alone.
"""

import contextlib
import dataclasses
import errno
import fcntl
import gc
import hashlib
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
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

import prepare
from configurator import UserError, assignments, cli, nearest, parse, read_json, typed, whole_file
from model import GPT, GPTConfig, digest, hash_seed, stream, window_losses

COMPILER = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")  # torch.compile's choice


@dataclass
class Config(GPTConfig):
    """Every tunable value. Those of the model and its ablation flags are in model.py, and can be set the same way."""

    vocab_size: int | None = None  # None: that of the data
    # the experiment
    arms: dict = field(default_factory=lambda: {"Baseline": {}})  # name -> model flags that this arm changes
    seeds: list | range | tuple = range(1)
    # planned: (arm, arm or "unigram" or "bigram"), first minus second, and perhaps what is predicted of it, in nats:
    contrasts: list | tuple = ()  # (arm, arm, (low, high)) with None for an open end
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
    deterministic: bool = True  # same command, same machine, same bits


TYPES = typing.get_type_hints(Config)
SHAPE = ("block_size", "vocab_size")  # an arm that changed these would be measured on other windows
REFERENCES = ("unigram", "bigram")
SOURCES = ("model.py", "configurator.py", "prepare.py", "train.py")

# ---------------------------------------------------------------------------------------------------------------------
# this process

RANK, PROCESSES = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
TERMINAL = sys.stderr.isatty()
STOP = {"signal": 0}


class Stopped(Exception):
    """A signal came, and the state is saved."""


def say(text):
    if RANK == 0:
        tqdm.write(text)
        sys.stdout.flush()


def on_signal(number, frame):
    """The first signal lets the step finish; the second ends the process as if there were no handler."""
    STOP["signal"] = number
    signal.signal(number, signal.SIG_DFL)


def agreed(value):
    """rank 0's value, on every rank."""
    values = [value]
    if PROCESSES > 1:
        dist.broadcast_object_list(values)
    return values[0]


def finite(x):
    """x, or None where JSON has no number for it."""
    return x if math.isfinite(x) else None


# ---------------------------------------------------------------------------------------------------------------------
# configuration


@contextlib.contextmanager
def pretrained_errors():
    try:
        yield
    except ImportError:
        raise UserError("init_from needs transformers: pip install transformers") from None
    except ValueError as e:
        raise UserError(f"init_from: {e}") from None


def model_config(config, arm, vocab_size):
    """The GPTConfig of an arm; raises UserError."""
    known = {f.name: TYPES[f.name] for f in dataclasses.fields(GPTConfig)}
    values = {name: getattr(config, name) for name in known} | {"vocab_size": vocab_size}
    for name, value in config.arms[arm].items():
        if name in SHAPE:
            raise UserError(f"arm {arm} sets {name}: then it would be measured on other text than the other arms")
        if name in ("n_layer", "n_head", "n_embd", "bias", "n_kv_head") and config.init_from != "scratch":
            raise UserError(
                f"arm {arm} sets {name}, which the weights of init_from={config.init_from!r} fix for all arms"
            )
        if name not in known:
            raise UserError(f"arm {arm} sets {name}, which is no flag of the model{nearest(name, known)}")
        values[name] = typed(f"arm {arm}: {name}", value, known[name])
    gpt_config = GPTConfig(**values)
    try:
        gpt_config.check()
    except ValueError as e:
        raise UserError(f"arm {arm}: {e}") from None
    return gpt_config


def checked_contrast(contrast, config):
    """[arm, arm or reference], and perhaps [low, high] predicted with None for one open end; raises UserError."""
    try:
        a, b, *predicted = contrast if isinstance(contrast, list | tuple) else ()
        if not type(a) is type(b) is str or a == b or len(predicted) > 1:
            raise ValueError
        for low, high in predicted:
            ends = [x for x in (low, high) if x is not None]
            if not ends or not all(type(x) in (int, float) and abs(x) < 1e9 for x in ends) or ends != sorted(set(ends)):
                raise ValueError
    except (TypeError, ValueError):
        raise UserError(
            f"contrast {contrast!r} must be a pair of two names, such as ('FFNOnly', 'AttnOnly'), and perhaps the"
            " interval that is predicted, such as ('FFNOnly', 'unigram', (-0.02, 0.02)); None is an open end"
        ) from None
    for name, known in ((a, list(config.arms)), (b, [*config.arms, *REFERENCES])):
        if name not in known:
            raise UserError(f"contrast {contrast} names no arm with {name!r}{nearest(name, known)}")
    return [a, b, *map(list, predicted)]


LEAST = dict.fromkeys(("batch_size", "max_iters", "eval_interval", "log_interval", "checkpoint_interval"), 1)
LEAST |= dict.fromkeys(("lr_decay_iters", "eval_tokens", "vocab_size", "micro_batch_size"), 1)
LEAST |= dict.fromkeys(("learning_rate", "min_lr", "weight_decay", "beta1", "beta2", "grad_clip", "warmup_iters"), 0)
CHOICES = {"device": ("auto", "cpu", "cuda", "mps"), "dtype": ("auto", "float32", "bfloat16")}
CHOICES["compile"] = (True, False, "auto")


def check_config(config):
    """Raises UserError for what would train nothing, or something else than it says."""
    for name, value in vars(config).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{name}={value} must be finite")
        if value is not None and name in LEAST and value < LEAST[name]:
            raise UserError(f"{name}={value} must be at least {LEAST[name]}")
        if name in CHOICES and value not in CHOICES[name]:
            raise UserError(f"{name}={value!r} must be one of {', '.join(map(str, CHOICES[name]))}")
    if config.beta1 >= 1 or config.beta2 >= 1:
        raise UserError(f"beta1={config.beta1} and beta2={config.beta2} must be below 1")
    if not config.margin > 0 or not 0 < config.alpha < 0.5:
        raise UserError(f"margin={config.margin} must be positive and alpha={config.alpha} between 0 and 0.5")
    if not config.arms or not config.seeds or not config.out_dir:
        raise UserError("arms, seeds and out_dir must not be empty")
    for seed in config.seeds:
        if type(seed) is not int or seed < 0 or config.seeds.count(seed) > 1:
            raise UserError(f"seeds hold {seed!r}: each must be an integer from 0 on, and there once")
    folders = [str(arm).lower() for arm in config.arms]  # one folder where the file system does not tell case
    for arm, flags in config.arms.items():
        if type(arm) is not str or not re.fullmatch(r"[A-Za-z0-9_+][A-Za-z0-9_.+-]{0,99}", arm) or arm in REFERENCES:
            raise UserError(f"arm {arm!r}: a name is letters, digits and _+-. and neither unigram nor bigram")
        if folders.count(arm.lower()) > 1 or arm.startswith(("plan.", "report.")):
            raise UserError(f"arm {arm}: its folder has the name of another arm, or of a file of ours")
        if type(flags) is not dict:
            raise UserError(f"arm {arm} must be a dict of model flags, not {flags!r}")
        model_config(config, arm, 1)


def read_config(path, flags):
    """A config file and the flags of the command line -> Config; raises UserError."""
    values = assignments(path)
    values.update(flags)
    if isinstance(name := values.get("init_from", "scratch"), str) and name != "scratch":
        with pretrained_errors():
            values = GPT.pretrained_shape(name) | values  # what is set and does not fit is refused with the weights
    for name, value in values.items():
        if name == "gradient_accumulation_steps":
            raise UserError(
                "gradient_accumulation_steps is nanoGPT's: here batch_size counts all sequences of a step, so set"
                " batch_size to the product of the two and micro_batch_size to what one device takes at once"
            )
        if name not in TYPES:
            raise UserError(f"unknown name {name} in {path}{nearest(name, TYPES) or ': train.py lists the known ones'}")
        values[name] = typed(name, value, TYPES[name])
    config = Config(**values)
    config.seeds = list(config.seeds)
    config.out_dir = str(Path("out") / Path(path).stem) if config.out_dir is None else config.out_dir
    config.lr_decay_iters = config.max_iters if config.lr_decay_iters is None else config.lr_decay_iters
    check_config(config)
    config.contrasts = [checked_contrast(c, config) for c in config.contrasts]
    pairs = [c[:2] for c in config.contrasts]
    if repeated := [pair for pair in pairs if pairs.count(pair) > 1]:
        raise UserError(f"contrast {repeated[0]} is planned twice")
    return config


def first_model(config, arm, seed):
    """The model that a run starts with; all arms of a seed have the same parameters."""
    gpt_config = model_config(config, arm, config.vocab_size)
    if config.init_from == "scratch":
        return GPT(gpt_config, seed)
    with pretrained_errors():
        return GPT.from_pretrained(config.init_from, seed, **vars(gpt_config))


def narrow(config, arms, seeds):
    """--arms=A,B and --seeds=0-3,7 -> the arms and seeds of this invocation. The plan stays whole."""
    names = list(config.arms) if arms is None else arms.split(",")
    for name in names:
        if name not in config.arms:
            raise UserError(f"--arms names {name!r}, which is no arm of the config{nearest(name, config.arms)}")
    if len(set(names)) < len(names):
        raise UserError(f"--arms={arms} must name each arm once")
    if seeds is None:
        return names, config.seeds
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", seeds):
        raise UserError(f"--seeds={seeds} must look like 0-3 or 0,2,5")
    ends = [[int(x) for x in part.split("-")] for part in seeds.split(",")]
    numbers = []
    for end in ends:
        for seed in range(end[0], end[-1] + 1):
            if seed not in config.seeds:
                raise UserError(f"--seeds names {seed}, which is no seed of the config")
            numbers.append(seed)
    if not numbers or len(set(numbers)) < len(numbers):
        raise UserError(f"--seeds={seeds} must name a seed, and each once")
    return names, numbers


# ---------------------------------------------------------------------------------------------------------------------
# the plan


BINDING = ("config", "arms", "seeds", "contrasts", "alpha", "margin", "data", "source")  # parts of a plan
PLAN = (*BINDING, "commit", "amendments", "packages", "references", "reference_windows", "time")  # all of its parts
NOT_BINDING = ("out_dir", "log_interval", "checkpoint_interval", "wandb_log", "wandb_project")  # they can't move a bit


def differences(planned, now):
    """One line for each binding value in which a new plan, or the record of a run, differs from what was planned."""
    lines = []
    for part in BINDING:
        a, b = planned.get(part), now.get(part)
        if isinstance(a, dict) and isinstance(b, dict):
            keys = [k for k in {**a, **b} if part != "config" or k not in NOT_BINDING]
            lines += [f"{part}.{k}: planned {a.get(k)!r}, now {b.get(k)!r}" for k in keys if a.get(k) != b.get(k)]
        elif a != b:
            lines.append(f"{part}: planned {a!r}, now {b!r}")
    return lines


def make_plan(config, data):
    """All that binds an experiment, as plain JSON values; written before the first step."""
    here = Path(__file__).parent
    try:
        git = ["git", "-C", here, "describe", "--always", "--dirty"]
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    except OSError:  # a machine without git
        commit = ""
    losses, parts = data["references"], ("arms", "seeds", "contrasts", "alpha", "margin")
    return {
        "config": {k: v for k, v in vars(config).items() if k not in parts},
        **{k: getattr(config, k) for k in parts},
        "data": data["record"],
        "source": {name: hashlib.sha256((here / name).read_bytes()).hexdigest() for name in SOURCES},
        "commit": commit or None,
        "packages": {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__},
        "machine": {"system": platform.platform(), "processor": platform.machine(), "cores": os.cpu_count()},
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "amendments": [],
        "references": {k: None if v is None else float(v.mean()) for k, v in losses.items()},
        "reference_windows": {k: None if v is None else v.tolist() for k, v in losses.items()},
    }


def check_disk(out):
    """Raises UserError unless locks, renames and hard links work in the folder: on them rests that no work is mixed."""
    try:
        with (
            tempfile.TemporaryDirectory(prefix="probe-", dir=out) as place,
            open(f"{place}/lock", "a") as one,
            open(f"{place}/lock", "a") as other,
        ):
            fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.link(f"{place}/lock", f"{place}/link")
            os.replace(f"{place}/link", f"{place}/moved")
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                raise OSError(errno.ENOLCK, "two processes get one lock")
    except OSError as e:
        what = f"{out} is on a file system without working locks, renames or hard links ({e.strerror})"
        raise UserError(f"{what}: choose another --out_dir") from None


@contextlib.contextmanager
def locked(path, wait=False):
    """Hold a file lock; yields False if another process holds it. The lock of a process that dies is free at once."""
    with open(path, "a") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        except OSError as e:
            raise UserError(f"{path} can't be locked ({e.strerror}): --out_dir must be on a disk with flock") from None
        yield True


def bind_plan(out, new, amend):
    """Write plan.json, or compare with the one that is there; another plan stops the command unless amended."""
    path = out / "plan.json"
    out.mkdir(parents=True, exist_ok=True)
    check_disk(out)
    new = json.loads(json.dumps(new))  # as it will be read back: lists for tuples, strings for keys
    with locked(out / "plan.lock", wait=True):
        plan, lines = new, []
        if path.exists():
            plan = read_json(path, *PLAN)
            lines = differences(plan, new)
            if not lines:
                return plan
            if amend is None:
                for line in lines:
                    say(line)
                raise UserError(f"{path} plans another experiment: choose another --out_dir, or say --amend='reason'")
        elif any(out.glob("*/seed*/log.jsonl")):  # a plan that comes after the results plans nothing
            lines = ["the plan was written after runs had begun"]
            if amend is None:
                raise UserError(f"{out} holds runs and no plan.json: choose another --out_dir, or --amend='reason'")
        if lines:
            note = {"time": new["time"], "reason": amend, "changes": lines}
            plan = new | {"time": plan["time"], "amendments": [*plan["amendments"], note]}
        with whole_file(path) as f:
            last = "reference_windows"  # thousands of numbers: on one line at the end
            text = json.dumps({k: v for k, v in plan.items() if k != last}, indent=1)
            f.write(f"{text[:-2]},\n {json.dumps(last)}: {json.dumps(plan[last])}\n}}\n")
    return plan


# ---------------------------------------------------------------------------------------------------------------------
# one run


def batch(tokens, seed, step, batch_size, block_size):
    """
    The batch at a step: a pure function of (seed, step), the same for all arms, processes and resumes.

    tokens: (n,) -> (batch_size, block_size + 1) int64; row r is the text from a random start on, inputs and targets.
    """
    starts = torch.randint(len(tokens) - block_size, (batch_size,), generator=stream(seed, "batch", step))
    return torch.from_numpy(np.stack([tokens[i : i + block_size + 1] for i in starts.tolist()]).astype(np.int64))


def learning_rate(config, step):
    """Linear warm-up, then cosine from learning_rate to min_lr at lr_decay_iters."""
    if not config.decay_lr:
        return config.learning_rate
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / (config.warmup_iters + 1)
    done = min(1.0, (step - config.warmup_iters) / max(1, config.lr_decay_iters - config.warmup_iters))
    return config.min_lr + 0.5 * (1 + math.cos(math.pi * done)) * (config.learning_rate - config.min_lr)


def make_optimizer(model, config):
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    betas = (config.beta1, config.beta2)
    groups = [g for g in groups if g["params"]]
    return torch.optim.AdamW(groups, config.learning_rate, betas, fused=config.device != "mps")


def take_step(model, optimizer, rows, micro, autocast, grad_clip, key=None):
    """
    Forward, backward, clip, update: one optimizer step of this process.

    rows: (n, T + 1) tokens, taken micro at a time -> (mean loss of all of them, gradient norm before clipping), two
    tensors. key: where there is dropout, the key of its random stream; each micro-batch has its own.
    """
    total = 0.0
    for i in range(0, len(rows), micro):
        part = rows[i : i + micro]
        if key is not None:
            torch.manual_seed(hash_seed(*key, i // micro))
        # gradients travel between processes with the last micro-batch only; the switch must span forward and backward
        waits = hasattr(model, "no_sync") and i + micro < len(rows)
        with model.no_sync() if waits else contextlib.nullcontext():
            with autocast:
                _, loss = model(part[:, :-1], part[:, 1:], reduction="mean")
            (loss * (micro / len(rows))).backward()
        total += loss.detach() * (micro / len(rows))
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total, norm


def write_log(folder, rows):
    with whole_file(folder / "log.jsonl") as f:
        f.writelines(json.dumps(row) + "\n" for row in rows)


def save_state(folder, state):
    """state.pt, from which a run resumes to the bit, and log.jsonl up to the same step."""
    if (folder / "ckpt.pt").exists():  # two machines that don't see each other's locks
        raise FileExistsError(folder / "ckpt.pt")
    with whole_file(folder / "state.pt", "wb") as f:
        torch.save(state | {"digest": digest(state)}, f)
    write_log(folder, state["rows"])


def load_state(folder, record):
    """The saved state of this very run, or None with a line that says why it starts from its beginning."""
    path = folder / "state.pt"
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state.pop("digest") != digest(state):
            raise ValueError("its contents are not what was saved")
        if differences(state["record"], record) or any(state["record"][k] != record[k] for k in ("arm", "seed")):
            raise ValueError("it belongs to another run, config, data or source")
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
    for rest in (folder / "state.pt", folder / "lock", *folder.glob("*.tmp")):
        rest.unlink(missing_ok=True)


def wandb_run(config, arm, seed, record, rows):
    """A run on wandb that holds each step once: after a resume a new one begins with the rows that count."""
    import wandb

    name = f"{Path(config.out_dir).name}/{arm}/seed{seed}"
    try:
        log = wandb.init(project=config.wandb_project, name=name, config=record, reinit="finish_previous")
    except wandb.Error as e:
        raise UserError(f"wandb: {str(e).rstrip('.')}; WANDB_MODE=offline needs no account or connection") from None
    log.define_metric("*", step_metric="iter")
    for row in rows:
        log.log(row)
    return log


def autocast(config):
    return torch.autocast(config.device, torch.bfloat16, enabled=config.dtype == "bfloat16")


def device_of(config):
    """The device of this process, with its number where there may be several."""
    return torch.device(config.device, torch.cuda.current_device()) if config.device == "cuda" else config.device


def wrapped(raw, config):
    """The model as it is trained -> (the compiled model, and the same with its gradients shared among processes)."""
    if config.compile:  # as in a fresh process: after 8 variants of a function torch goes on without compiling
        torch.compiler.reset()
    alone = torch.compile(raw) if config.compile else raw
    if not dist.is_initialized():
        return alone, alone
    ids = [torch.cuda.current_device()] if config.device == "cuda" else None
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")  # its new name is absent before 2.13
    return alone, torch.nn.parallel.DistributedDataParallel(alone, device_ids=ids, broadcast_buffers=False)


def settle_buckets(model, optimizer, config, rows):
    """
    One backward pass whose gradients are dropped, with rows (n, T + 1).

    DDP lays its buckets of gradients out anew after the first backward pass of a process: without this the first step
    after a resume would add up in another order than that of an undisturbed run.
    """
    with autocast(config):
        _, loss = model(rows[:, :-1], rows[:, 1:], reduction="mean")
    loss.backward()
    optimizer.zero_grad(set_to_none=True)


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


def last_row(raw, alone, config, seed, data, record, step, losses, device):
    """The row that ends a run's log: what regenerates every report, and what the audit measures again."""
    micro = config.micro_batch_size or config.batch_size // PROCESSES
    fixed = batch(data["train"], seed, config.max_iters, config.batch_size, config.block_size)[:micro]  # (micro, T + 1)
    if raw.config.dropout:
        raw.eval()
    with autocast(config):  # with gradients, as without them torch may take, or compile, another path
        _, path_loss = alone(fixed[:, :-1].to(device), fixed[:, 1:].to(device), reduction="mean")
    chip = torch.cuda.get_device_name() if config.device == "cuda" else platform.processor() or platform.machine()
    return fixed, {
        "iter": step,
        "val_loss": None if losses is None else float(losses.mean()),
        "status": "diverged" if losses is None else "finished",
        "training_path_loss": finite(float(path_loss.detach())),
        **record,
        "processes": PROCESSES,
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "device_name": chip,
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
    raw.to(device)
    optimizer = make_optimizer(raw, config)
    step, rows = 0, []
    if (state := load_state(folder, record)) is not None:
        raw.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, rows = state["step"], state["rows"]
        say(f"{name}: resumes at step {step}")
    alone, model = wrapped(raw, config)
    raw.train()
    if model is not alone and step:
        first = batch(data["train"], seed, step, micro, config.block_size)
        settle_buckets(model, optimizer, config, first.to(device))
    log = wandb_run(config, arm, seed, record, rows) if config.wandb_log and RANK == 0 else None
    bar.reset(config.max_iters)
    bar.initial = bar.n = step
    bar.set_description(name)
    finished, seconds, tokens, pace = True, 0.0, 0, ""
    while finished and step < config.max_iters:
        row = {"iter": step}
        if step % config.eval_interval == 0:
            loss = float(validate(raw, data["windows"], device).mean())
            row["val_loss"] = finite(loss)
            if not TERMINAL:  # there a bar shows it
                say(f"{name} step {step}/{config.max_iters}: val {loss:.4f}{pace}")
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        w = batch(data["train"], seed, step, config.batch_size, config.block_size)  # (batch_size, T + 1)
        w = w[RANK * share : (RANK + 1) * share].to(device)  # (share, T + 1)
        key = (seed, "dropout", step, RANK) if raw.config.dropout else None
        loss, norm = take_step(model, optimizer, w, micro, autocast(config), config.grad_clip, key)
        loss, stop = over_processes(loss, device)
        seconds += time.perf_counter() - start
        tokens += config.batch_size * config.block_size
        finished = math.isfinite(loss)
        if step % config.log_interval == 0 or not finished:
            rate = tokens / seconds
            row |= {"loss": finite(loss), "lr": group["lr"], "grad_norm": finite(float(norm))}
            row["tokens_per_second"] = rate
            left = (config.max_iters - step) * config.batch_size * config.block_size / rate
            bar.set_postfix_str(f"loss {loss:.4f}, {rate:,.0f} tokens/s", refresh=False)
            pace = f", loss {loss:.4f}, {rate:,.0f} tokens/s, {left:.0f} s left"
            seconds, tokens = 0.0, 0
        if len(row) > 1:
            rows.append(row)
            if log:
                log.log(row)
        step += 1
        bar.update()
        if finished and (stop or step % config.checkpoint_interval == 0 and step < config.max_iters):
            if RANK == 0:
                state = {"model": raw.state_dict(), "optimizer": optimizer.state_dict()}
                save_state(folder, state | {"step": step, "rows": rows, "record": record})
            if stop:
                say(f"{name}: stopped and saved at step {step}; the same command resumes it")
                if log:
                    log.finish()
                raise Stopped

    losses = validate(raw, data["windows"], device)
    if not finished or not bool(losses.isfinite().all()):
        losses = None
    if RANK > 0:
        return None
    fixed, last = last_row(raw, alone, config, seed, data, record, step, losses, device)
    rows.append(last)
    ckpt = {k: v for k, v in last.items() if k not in ("iter", "val_loss")}
    ckpt |= {"step": step, "val_history": [[r["iter"], r["val_loss"]] for r in rows if "val_loss" in r]}
    finish(
        folder, rows, ckpt | {"window_losses": losses, "training_path_batch": fixed.int(), "model": raw.state_dict()}
    )
    if log:
        log.log({k: last[k] for k in ("iter", "val_loss")})
        log.finish()
    return last


# ---------------------------------------------------------------------------------------------------------------------
# the experiment


def choose(config):
    """
    Put a choice for this shape and device in the place of each `auto`.

    On a CPU with bfloat16 instructions an eager step in it was 1.94 times as fast at width 384, 1.60 times at 768, and
    no faster at 128 (0.98). A compiled step was 1.03, 1.25 and 1.0 times as fast at these, and compiling takes half a
    minute a run. A bound of 256 lies between. A GPU is unmeasured.
    """
    if config.device == "auto":
        config.device = "cuda" if torch.cuda.is_available() else "cpu"
    wide = config.n_embd >= 256
    if config.dtype == "auto":
        onednn = torch.backends.mkldnn.is_available()
        fast = config.device == "cpu" and wide and onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        config.dtype = "bfloat16" if fast or config.device == "cuda" else "float32"
    if config.compile == "auto":
        worth = config.device == "cuda" or config.device == "cpu" and wide and config.max_iters >= 200
        config.compile = worth and shutil.which(COMPILER) is not None


def prepare_machine(config):
    """Set up devices, processes and determinism."""
    choose(config)
    if not {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}[config.device]:
        raise UserError(f"device={config.device}: there is none on this machine")
    if config.compile and shutil.which(COMPILER) is None:
        raise UserError(f"compile=True needs a C++ compiler ({COMPILER}), and there is none: say --compile=False")
    if config.wandb_log:
        try:
            from wandb import init  # noqa: F401  (a folder wandb/ of offline runs passes for a package, but has none)
        except ImportError:
            raise UserError("wandb_log=True needs wandb: pip install wandb") from None
    share = config.batch_size // PROCESSES
    if config.batch_size % PROCESSES:
        raise UserError(f"batch_size={config.batch_size} sequences can't be divided among {PROCESSES} processes")
    if config.micro_batch_size is not None and share % config.micro_batch_size:
        raise UserError(
            f"micro_batch_size={config.micro_batch_size} does not divide the {share} sequences that each of"
            f" {PROCESSES} processes takes of batch_size={config.batch_size}"
        )
    if config.device == "cuda":
        here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
        if here > gpus:
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
        raise UserError(
            f"{folder} is in characters, init_from={config.init_from!r} reads tokens: prepare it with --tokenizer=gpt2"
        )
    if len(train) <= config.block_size:
        raise UserError(f"{folder} has {len(train)} training tokens, too few for block_size={config.block_size}")
    windows = prepare.windows(val, config.block_size, config.eval_tokens)
    record = {"dataset": config.dataset, "windows": len(windows)}
    targets = min(len(val) - 1, config.eval_tokens or len(val))
    record["dropped_targets"] = targets - len(windows) * config.block_size
    data = {"train": train, "windows": windows}
    if RANK == 0:
        record |= {f"{split}_sha256": meta["sha256"][split] for split in ("train", "val")}
        if config.init_from != "scratch":
            start = first_model(config, next(iter(config.arms)), 0)
            record["init_from_sha256"] = digest(dict(start.named_parameters()))
        data["references"] = prepare.reference_losses(train, windows, min(config.vocab_size, meta["vocab_size"]))
        for contrast in config.contrasts:
            if contrast[1] == "bigram" and data["references"]["bigram"] is None:
                raise UserError(f"contrast {contrast}: bigram counts need a vocabulary of at most 1,024 tokens")
    data["record"] = record
    return data


def held_runs(runs):
    """
    The runs that are left to train, one after another, each locked until the next is asked for.

    runs: {(arm, seed): folder}. It ends when a whole pass finds none: the run of a process that died is taken over.
    """
    taken = True
    while taken:
        taken = False
        for run, folder in runs.items():
            with contextlib.ExitStack() as held:
                mine = False
                if RANK == 0 and not (folder / "ckpt.pt").exists():
                    folder.mkdir(parents=True, exist_ok=True)
                    mine = held.enter_context(locked(folder / "lock")) and not (folder / "ckpt.pt").exists()
                if agreed(mine):
                    taken = True
                    yield run, folder


def main(argv):
    known = {k: v for k, v in TYPES.items() if k != "contrasts"}
    known |= {"arms": str, "seeds": str, "amend": str, "plan": bool, "help": bool, "gradient_accumulation_steps": int}
    configs, flags = parse(argv, known)
    if flags.pop("help", False):
        print(__doc__.strip())
        return
    if len(configs) != 1:
        raise UserError("name one config: python train.py config/NAME.py [--key=value ...]")
    arms, seeds, amend, plan_only = (flags.pop(name, None) for name in ("arms", "seeds", "amend", "plan"))
    if amend == "":
        raise UserError("--amend needs a reason: write --amend='why'")
    config = read_config(configs[0], flags)
    arms, seeds = narrow(config, arms, seeds)
    prepare_machine(config)
    data = open_data(config)
    out = Path(config.out_dir)
    plan = agreed(bind_plan(out, make_plan(config, data), amend) if RANK == 0 else None)
    if plan_only:
        say(f"{out}/plan.json is written, nothing is trained")
        return
    references = ", ".join(f"{k} {v:.4f}" for k, v in plan["references"].items() if v is not None)
    how = f"on {config.device} in {config.dtype}, {'compiled' if config.compile else 'eager'}"
    say(f"{out}: {len(arms)} arms x {len(seeds)} seeds {how}; nats: {references}")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)

    runs = {(arm, seed): out / arm / f"seed{seed}" for seed in seeds for arm in arms}
    binding = {k: v for k, v in plan["config"].items() if k not in NOT_BINDING}
    all_runs = tqdm(total=len(runs), unit="run", desc=out.name, disable=not TERMINAL or RANK > 0)
    bar = tqdm(total=config.max_iters, unit="step", leave=False, disable=not TERMINAL or RANK > 0)
    for (arm, seed), folder in held_runs(runs):
        record = {"arm": arm, "seed": seed, "config": binding | plan["arms"][arm]}
        record |= {k: plan[k] for k in ("data", "source", "commit")}
        try:
            last = train_run(config, arm, seed, data, record, folder, bar)
        except FileExistsError:
            say(f"{folder}: another process has finished this run, its files stay; do locks work on this disk?")
            continue
        if RANK == 0:
            loss = "diverged" if last["val_loss"] is None else f"{last['val_loss']:.4f} nats"
            say(f"{arm} seed{seed}: {loss} after {last['iter']} steps")
        all_runs.n = sum((folder / "ckpt.pt").exists() for folder in runs.values())
        all_runs.refresh()
    bar.close()
    all_runs.close()
    left = sum(not (folder / "ckpt.pt").exists() for folder in runs.values())
    others = f", {left} are with other processes" if left else ""
    planned = len(plan["arms"]) * len(plan["seeds"])
    narrowed = f" (of {planned} planned)" if planned > len(runs) else ""
    say(f"{len(runs) - left} of {len(runs)} runs are finished{others}{narrowed}")
    say(f"next: python analyze.py runs {out}")


def experiment(argv):
    """main, with the process group ended and the exit status of a signal set."""
    status = 0
    try:
        main(argv)
    except Stopped:
        status = 128 + (STOP["signal"] or signal.SIGTERM)
    except torch.OutOfMemoryError:
        raise UserError("the GPU is out of memory: set a smaller micro_batch_size, the losses stay") from None
    if dist.is_initialized():
        gc.collect()  # DDP's hooks are in cycles that would keep the process group, and its threads, until exit
        dist.barrier()
        dist.destroy_process_group()
    sys.exit(status)


if __name__ == "__main__":
    cli(experiment)
