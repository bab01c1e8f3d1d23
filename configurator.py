"""
What every command needs before its own work begins.

Errors for people (one line, exit status 2), --key=value flags with checked names and types, config files of plain
assignments, and files that are written whole or not at all. Nothing here knows what the project is about.
"""

import ast
import contextlib
import difflib
import json
import os
import sys
import traceback
import typing
import uuid
from pathlib import Path


class UserError(ValueError):
    """Something that the user can mend: one line that says what is wrong, where, and what to do."""


def cli(main):
    """Run main(arguments) as a command: an error for people is one line and exit status 2."""
    for out in (sys.stdout, sys.stderr):
        out.reconfigure(errors="backslashreplace")  # a POSIX locale must not turn a message into a crash
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
        if os.environ.get("LOCAL_RANK", "0") == "0":  # torchrun starts many of us; one line a machine is enough
            print(f"error: {' '.join(text.split())}", file=sys.stderr, flush=True)
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
