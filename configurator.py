"""
What every command needs before its own work begins.

Errors for people (one line, exit status 2), --key=value flags with checked names and types, config files of plain
assignments, and files that are written whole or not at all. Nothing here knows what the project is about.
"""

import ast
import contextlib
import ctypes
import difflib
import errno
import fcntl
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import typing
import uuid
from pathlib import Path


class UserError(ValueError):
    """Something that the user can mend: one line that says what is wrong, where, and what to do."""


def keep_memory():
    """
    Tell glibc to keep freed memory; on other systems nothing.

    It gives large tensors back to the kernel when they are freed and takes them again, zeroed, at each operation: half
    a million page faults a step of a 10M model. bench.py measures what that costs. Both settings are needed.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no mapping of its own for a large block
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD, bytes


def cli(main, keep=True):
    """Run main(arguments) as a command: an error for people is one line and exit status 2. keep: memory, as above."""
    if keep:
        keep_memory()
    for out in (sys.stdout, sys.stderr):
        out.reconfigure(errors="backslashreplace")  # a POSIX locale must not turn a message into a crash
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, so that nothing is left half-written
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output has gone, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(141)
    except KeyboardInterrupt:
        sys.exit(130)
    except (UserError, OSError) as e:
        text = str(e) if isinstance(e, UserError) else f"{e.strerror or e}: {e.filename or 'the disk'}"
        rank = os.environ.get("RANK") or "0"  # torchrun starts many of us
        where = "" if rank == "0" else f" (rank {rank})"
        print(f"error{where}: {' '.join(text.split())}", file=sys.stderr, flush=True)
        sys.exit(2)


# ---------------------------------------------------------------------------------------------------------------------
# names and values


def nearest(name, known):
    """', did you mean X?' where a known name is near."""
    close = difflib.get_close_matches(name, [str(k) for k in known], 1, 0.6)
    return f", did you mean {close[0]}?" if close else ""


def typed(name, value, kind):
    """value, if it is of kind (a type, or a union such as `int | None`); an int becomes a float where one is due."""
    kinds = typing.get_args(kind) or (kind,)
    if type(value) in kinds:
        return value
    if type(value) is int and float in kinds and abs(value) < 2**1023:
        return float(value)
    names = " or ".join("None" if k is type(None) else k.__name__ for k in kinds)
    raise UserError(f"{name}={value!r} is of type {type(value).__name__}, it must be {names}")


def parse(argv, known):
    """
    Command line -> (positional arguments, {name: value}).

    known: {name: type}. Flags are --name=value, or --name alone for a bool.
    """
    positional, flags = [], {}
    for arg in argv:
        if not arg.startswith("--"):
            positional.append(arg)
            continue
        name, has_value, text = arg[2:].partition("=")
        if name not in known:
            hint = nearest(f"--{name}", [f"--{k}" for k in known])
            raise UserError(f"unknown flag --{name}{hint or '; --help lists the known ones'}")
        kinds = typing.get_args(known[name]) or (known[name],)
        if not has_value and bool not in kinds:
            raise UserError(f"--{name} needs a value: write --{name}=VALUE")
        value = text if has_value else True
        if has_value and kinds != (str,):
            with contextlib.suppress(ValueError, SyntaxError, TypeError):
                value = ast.literal_eval(text)
            if str in kinds and type(value) not in kinds:
                value = text
        flags[name] = typed(f"--{name}", value, known[name])
    return positional, flags


def chosen(flag, text, known):
    """--arms=A,B or --seeds=0-3,7 -> those of the known names or numbers, each once; all of them where text is None."""
    if text is None:
        return list(known)
    names, parts = {str(k): k for k in known}, []
    for part in text.split(","):
        low, dash, high = part.partition("-")
        if part not in names and dash and low.isdecimal() and high.isdecimal() and int(high) - int(low) < 10**6:
            parts += map(str, range(int(low), int(high) + 1))
        else:
            parts.append(part)
    for name in parts or [text]:
        if name not in names or parts.count(name) > 1:
            hint = nearest(name, names) or f", of {', '.join(names)[:200]}"
            raise UserError(f"--{flag}={text[:80]} must name what the config has, each once: {name!r} is not so{hint}")
    return [names[name] for name in parts]


def read_text(path):
    """A UTF-8 file, character for character: no newline is translated, a byte-order mark is dropped."""
    try:
        return Path(path).read_bytes().decode("utf-8").removeprefix("\ufeff")
    except FileNotFoundError:
        raise UserError(f"{path} not found") from None
    except UnicodeDecodeError as e:
        byte = f"byte {e.object[e.start]:#04x} at offset {e.start}"
        raise UserError(f"{path} is not UTF-8 ({byte}); convert it") from None


def assignments(path):
    """{name: value} of a config file, which is plain Python; names that begin with _ are its own."""
    path = str(path)
    if not Path(path).is_file():
        there = sorted(str(p) for p in Path(path).parent.glob("*.py"))
        raise UserError(f"config {path} is no file{nearest(path, there)}")
    values, source = {}, read_text(path)
    try:
        exec(compile(source, path, "exec"), values)
    except (Exception, SystemExit) as e:  # whatever the config's own code raises is for its author
        lines = [n for frame, n in traceback.walk_tb(e.__traceback__) if frame.f_code.co_filename == path]
        where = [f", line {n}" for n in (lines[-1:] or [getattr(e, "lineno", None)]) if n]
        raise UserError(f"config {path}{''.join(where)}: {type(e).__name__}: {e}") from None
    for node in ast.walk(ast.parse(source)):  # Python itself keeps the last of two equal keys without a word
        keys = [k.value for k in node.keys if isinstance(k, ast.Constant)] if isinstance(node, ast.Dict) else []
        if repeated := [k for k in keys if keys.count(k) > 1]:
            raise UserError(f"config {path} names {repeated[0]!r} twice in one dict: two arms need two names")
    return {k: v for k, v in values.items() if not k.startswith("_") and not isinstance(v, type(sys))}


# ---------------------------------------------------------------------------------------------------------------------
# files


@contextlib.contextmanager
def whole_file(path, mode="w", replace=True):
    """
    A file that is there whole or not at all: written beside `path` under another name, then renamed.

    replace=False: raises FileExistsError where the file is already there (a hard link never replaces).
    """
    tmp = f"{path}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        with open(tmp, mode, encoding=None if "b" in mode else "utf-8") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path) if replace else os.link(tmp, path)
    except FileExistsError:
        raise
    except (OSError, RuntimeError) as e:  # torch.save wraps the OSError of a full disk in a RuntimeError
        cause = e if isinstance(e, OSError) else e.__context__
        if not isinstance(cause, OSError) or cause.filename not in (None, tmp, str(path)):  # of a file that was read
            raise
        raise UserError(f"{path} can't be written ({cause.strerror}): what was there before is kept") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(tmp)


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
        yield True


def read_json(path, *needed):
    """The JSON object in a file; raises UserError where there is none, or it lacks a needed key."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} not found") from None
    except ValueError as e:
        raise UserError(f"{path} is damaged, it is no JSON ({e}): restore it") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged, it holds a {type(value).__name__} and no object: restore it")
    if missing := [k for k in needed if k not in value]:
        raise UserError(f"{path} is damaged, it holds no {missing[0]}: restore it")
    return value


def source_hashes(path):
    """Of a file's bytes, and of its code alone, which comments, layout and the version of Python do not change."""
    text = Path(path).read_bytes()
    code = ast.unparse(ast.parse(text)).encode()
    return {"bytes": hashlib.sha256(text).hexdigest(), "code": hashlib.sha256(code).hexdigest()}


def commit(folder):
    """The commit of a folder as git describes it, or None."""
    with contextlib.suppress(OSError):  # a machine without git
        git = ["git", "-C", folder, "describe", "--always", "--dirty"]
        return subprocess.run(git, capture_output=True, text=True).stdout.strip() or None


# ---------------------------------------------------------------------------------------------------------------------
# processes and signals

JOB = "NANOABLATE_JOB"  # in the environment of a process that start_jobs started
STOP = {"signal": 0, "time": 0.0}  # the signal that came first, and when


def launched():
    """(rank, processes) as torchrun sets them, or (0, 1)."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    given = {name: os.environ.get(name) for name in names}
    if not any(given[name] for name in names[:3]):
        return 0, 1
    if absent := [name for name in names if not given[name]]:
        raise UserError(f"{absent[0]} is not set, and others of {', '.join(names)} are: use torchrun, or unset them")
    if strange := [name for name in ("RANK", "WORLD_SIZE") if not given[name].isdecimal()]:
        raise UserError(f"{strange[0]}={given[strange[0]]} must be a number: use torchrun, or unset it")
    return int(given["RANK"]), int(given["WORLD_SIZE"])


def on_signal(number, frame):
    """
    The first signal is noted in STOP; one that comes 10 s later or more ends the process.

    Launchers forward a signal two or three times within a second: those change nothing.
    """
    if not STOP["signal"]:
        STOP.update(signal=number, time=time.monotonic())
    elif time.monotonic() > STOP["time"] + 10:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def heed_signals(handler=on_signal):
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def thread_count(threads, width, processes):
    """CPU threads of one of so many processes: a number as it is; "auto" leaves a small model on one."""
    if threads != "auto":
        return threads
    if (given := os.environ.get("OMP_NUM_THREADS", "")).isdecimal() and int(given):
        return int(given)
    return 1 if width < 256 else max(1, os.cpu_count() // processes)


def start_jobs(program, jobs, out, gpus=0):
    """
    Run a program so many times at once -> the first exit status that is not zero.

    Job k has GPU k modulo their number. Job 0 has the terminal, what the others print goes to out/job{k}.log.
    """
    out.mkdir(parents=True, exist_ok=True)
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    children = []

    def forward(number, frame):
        for child in children:
            child.send_signal(number)

    heed_signals(forward)
    with contextlib.ExitStack() as files:
        for k in range(jobs):
            env = os.environ | {JOB: str(k)} | ({"CUDA_VISIBLE_DEVICES": devices[k % len(devices)]} if gpus else {})
            log = files.enter_context(open(out / f"job{k}.log", "w")) if k else None
            children.append(subprocess.Popen(program, env=env, stdout=log, stderr=log))
        statuses = [child.wait() for child in children]
    return next((128 - status if status < 0 else status for status in statuses if status), 0)


# ---------------------------------------------------------------------------------------------------------------------
# wandb


def wandb_run(project, name, config, rows):
    """A run on wandb that holds each step once: after a resume a new one begins with the rows that count."""
    try:
        import wandb

        log = wandb.init(project=project, name=name, config=config, reinit="finish_previous")
    except Exception as e:  # not installed, a folder of that name (it has no init), no account, no connection
        why = " ".join(str(e).split())[:200]
        raise UserError(f"wandb: {why}; `pip install wandb`, WANDB_MODE=offline needs no account") from None
    log.define_metric("*", step_metric="iter")
    for row in rows:
        log.log(row)
    return log
