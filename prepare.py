"""
Text in, token files out.

    python prepare.py SOURCE [--tokenizer=char] [--tokens=N] [--text=FILE] [--out=data/NAME]

SOURCE is one of
    pydocs          the language reference inside every Python (pydoc_data.topics); no download
    shakespeare     the usual character corpus, downloaded and verified; --text=FILE for a local copy
    a .txt file     or a folder of them; each file is one document, kept to the byte

Writes train.bin and val.bin (raw little-endian uint16, or uint32 for vocabularies above 65,535 tokens: nanoGPT's
files work here and ours there) and meta.json. The first 90% of the characters train, the rest validate. Nothing is
translated: line ends stay as they are; only a byte-order mark at the start of a file is dropped. Documents of a folder
are joined by one newline.

This file owns the format: what train.py and analyze.py need of it (reading, checking, windows, references) is here.
"""

import ast
import contextlib
import difflib
import hashlib
import json
import os
import sys
import typing
import uuid
from pathlib import Path

import numpy as np

SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
CHUNK = 2**24  # tokens looked at together when a whole file is read

# ---------------------------------------------------------------------------------------------------------------------
# what every command needs: errors for people, checked flags, files that are whole


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
        if os.environ.get("RANK", "0") == "0":  # torchrun starts many of us; one line is enough
            print(f"error: {' '.join(text.split())}", file=sys.stderr, flush=True)
        sys.exit(2)


def nearest(name, known):
    """', did you mean X?' where a known name is near."""
    close = difflib.get_close_matches(name, [str(k) for k in known], 1, 0.6)
    return f", did you mean {close[0]}?" if close else ""


def typed(name, value, kind):
    """value, if it is of kind (a type, or a union such as `int | None`); an int becomes a float where one is due."""
    kinds = typing.get_args(kind) or (kind,)
    if type(value) in kinds:
        return value
    if type(value) is int and float in kinds:
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
            hint = nearest(arg.partition("=")[0], ["--" + k for k in known])
            raise UserError(f"unknown flag --{name}{hint or '; --help lists the known ones'}")
        kinds = typing.get_args(known[name]) or (known[name],)
        if not has_value and bool not in kinds:
            raise UserError(f"--{name} needs a value: write --{name}=VALUE")
        value = text if has_value else True
        if has_value and kinds != (str,):
            try:
                value = ast.literal_eval(text)
            except (ValueError, SyntaxError):
                value = text
            if str in kinds and type(value) not in kinds:
                value = text
        flags[name] = typed("--" + name, value, known[name])
    return positional, flags


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
        if not isinstance(cause, OSError):
            raise
        raise UserError(f"{path} can't be written ({cause.strerror}): what was there before is kept") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(tmp)


def read_json(path):
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} not found") from None
    except ValueError as e:
        raise UserError(f"{path} is no JSON: {e}") from None


BINDING = ("config", "arms", "seeds", "contrasts", "alpha", "margin", "data", "source")  # parts of a plan
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


# ---------------------------------------------------------------------------------------------------------------------
# reading prepared data


def load(folder, vocab_size=None, check=True):
    """
    A prepared folder -> (train, val, meta): two read-only token arrays and the contents of meta.json.

    vocab_size: of the model; default that of the data. Without meta.json (nanoGPT's folders have none) it must be given
    and tokens are read as uint16. check: read both files whole, and raise UserError for an id outside the vocabulary
    or a file that is not the one that was prepared.
    """
    folder = Path(folder)
    name = folder.name
    make = f"python prepare.py {name if name in ('pydocs', 'shakespeare') else f'FILE --out={folder}'}"
    files = {split: folder / f"{split}.bin" for split in ("train", "val")}
    for path in files.values():
        if not path.is_file():
            raise UserError(f"{path} not found: run `{make}` first")
    if (folder / "meta.json").is_file():
        meta = read_json(folder / "meta.json")
        missing = [k for k in ("vocab_size", "dtype", "tokens", "sha256") if k not in meta]
        if missing or meta["dtype"] not in ("uint16", "uint32"):
            raise UserError(f"{folder}/meta.json is not ours (no usable {(missing or ['dtype'])[0]}): run `{make}`")
    elif vocab_size is None:
        raise UserError(f"{folder}/meta.json not found: run `{make}`, or for files of nanoGPT say --vocab_size=N")
    else:
        meta = {"tokenizer": None, "vocab_size": vocab_size, "dtype": "uint16", "tokens": {}, "sha256": {}}
    limit = min(meta["vocab_size"], vocab_size or meta["vocab_size"])
    arrays = []
    for split, path in files.items():
        dtype = np.dtype(meta["dtype"]).newbyteorder("<")
        if path.stat().st_size == 0 or path.stat().st_size % dtype.itemsize:
            raise UserError(f"{path} ({path.stat().st_size} bytes) is no file of {meta['dtype']}: run `{make}` again")
        tokens = np.memmap(path, dtype=dtype, mode="c")  # copy on write: the file is never changed, torch is content
        if check:
            sha = hashlib.sha256()
            for i in range(0, len(tokens), CHUNK):
                part = np.asarray(tokens[i : i + CHUNK])
                sha.update(part)
                if part.max() >= limit:
                    at = int((part >= limit).argmax())
                    raise UserError(
                        f"{path} holds token id {part[at]} at position {i + at}, outside the vocabulary of {limit}"
                        f" tokens: data and model do not fit, run `{make}` again or set vocab_size"
                    )
            if meta["sha256"].setdefault(split, sha.hexdigest()) != sha.hexdigest():
                raise UserError(f"{path} is not the file that was prepared (its sha256 differs): run `{make}` again")
            meta["tokens"].setdefault(split, len(tokens))
        arrays.append(tokens)
    return *arrays, meta


def windows(tokens, block_size, max_tokens=None):
    """
    Evaluation windows that do not overlap -> (n, block_size + 1), a view of tokens.

    Window k reads tokens k*T .. (k+1)*T - 1 and predicts k*T + 1 .. (k+1)*T, for T = block_size; a last partial
    window is dropped. max_tokens: only the windows within the first so many targets.
    """
    targets = len(tokens) - 1 if max_tokens is None else min(len(tokens) - 1, max_tokens)
    if targets < block_size:
        raise UserError(f"{targets + 1} validation tokens are too few for one window of {block_size} + 1")
    return np.lib.stride_tricks.sliding_window_view(tokens, block_size + 1)[: targets - block_size + 1 : block_size]


def reference_tables(train, vocab_size):
    """
    -log p under the counts of the training split, add-one smoothed, in nats.

    -> (unigram (V,), bigram (V, V) with row = previous token, or None above 1,024 tokens)
    """
    V = vocab_size
    n = np.zeros(V, np.int64)
    pairs = np.zeros(V * V if V <= 1024 else 0, np.int64)
    for i in range(0, len(train), CHUNK):
        part = train[i : i + CHUNK + 1].astype(np.int64)  # one more, so that no pair is lost between chunks
        n += np.bincount(part[:CHUNK], minlength=V)
        if V <= 1024:
            pairs += np.bincount(part[:-1] * V + part[1:], minlength=V * V)
    unigram = np.log(n.sum() + V) - np.log(n + 1)
    if V > 1024:
        return unigram, None
    pairs = pairs.reshape(V, V)
    return unigram, np.log(pairs.sum(1, keepdims=True) + V) - np.log(pairs + 1)


def reference_losses(train, windows, vocab_size):
    """
    Where a model that knows only letter frequencies, or only the last letter, ends: mean loss of each window in nats.

    windows: (n, T + 1) -> {"unigram": (n,), "bigram": (n,) or None}, float64.
    """
    unigram, bigram = reference_tables(train, vocab_size)
    losses = {"unigram": np.empty(len(windows)), "bigram": None if bigram is None else np.empty(len(windows))}
    step = max(1, CHUNK // windows.shape[1])
    for i in range(0, len(windows), step):
        w = np.asarray(windows[i : i + step])
        losses["unigram"][i : i + step] = unigram[w[:, 1:]].mean(1)
        if bigram is not None:
            losses["bigram"][i : i + step] = bigram[w[:, :-1], w[:, 1:]].mean(1)
    return losses


# ---------------------------------------------------------------------------------------------------------------------
# preparing


def read_text(path):
    """A UTF-8 file, character for character: no newline is translated, a byte-order mark is dropped."""
    try:
        return Path(path).read_bytes().decode("utf-8").removeprefix("\ufeff")
    except FileNotFoundError:
        raise UserError(f"{path} not found") from None
    except UnicodeDecodeError as e:
        raise UserError(
            f"{path} is not UTF-8 (byte {e.object[e.start]:#04x} at offset {e.start}); convert it"
        ) from None


def download_shakespeare():
    import urllib.request

    hint = "fetch tiny Shakespeare yourself and pass it with --text=FILE"
    try:
        with urllib.request.urlopen(SHAKESPEARE_URL, timeout=60) as reply:
            raw = reply.read()
    except OSError as e:
        raise UserError(f"{SHAKESPEARE_URL} can't be downloaded ({e}): {hint}") from None
    if hashlib.sha256(raw).hexdigest() != SHAKESPEARE_SHA256:
        raise UserError(f"{SHAKESPEARE_URL} did not arrive as expected (its sha256 differs): {hint}")
    return raw.decode("utf-8")


def source_text(source, text=None):
    """The characters of a source and how to call it in meta.json."""
    if text is not None and source != "shakespeare":
        raise UserError(f"--text is for shakespeare; for a file of your own: python prepare.py {text}")
    if source == "pydocs":
        from pydoc_data.topics import topics

        return "\n\n".join(topics[k] for k in sorted(topics)), f"pydocs of Python {sys.version.split()[0]}"
    if source == "shakespeare":
        if text is None:
            return download_shakespeare(), SHAKESPEARE_URL
        if hashlib.sha256(Path(text).read_bytes()).hexdigest() != SHAKESPEARE_SHA256:
            print(f"note: {text} is not the usual tiny Shakespeare (its sha256 differs); published losses do not apply")
        return read_text(text), Path(text).name
    path = Path(source)
    if path.is_dir():
        files = sorted(path.rglob("*.txt"))
        if not files:
            raise UserError(f"{path} holds no .txt file")
        return "\n".join(read_text(f) for f in files), path.name
    if path.suffix != ".txt":
        hint = nearest(source, ["pydocs", "shakespeare"])
        raise UserError(f"unknown source {source!r}{hint or ': pydocs, shakespeare, a .txt file or a folder of them'}")
    return read_text(path), path.name


def write_chars(text, folder, source):
    """Character tokens of text, split 90/10, as train.bin, val.bin and meta.json in folder."""
    points = np.frombuffer(text.encode("utf-32-le"), "<u4")  # one number a character
    characters, ids = np.unique(points, return_inverse=True)
    vocab_size = len(characters)
    dtype = "uint16" if vocab_size <= 65535 else "uint32"
    cut = int(0.9 * len(ids))
    if cut == 0:
        raise UserError(f"{source} has {len(ids)} characters, too few to split into training and validation text")
    tokens = {"train": ids[:cut].astype("<u2" if dtype == "uint16" else "<u4")}
    tokens["val"] = ids[cut:].astype(tokens["train"].dtype)
    unigram, bigram = reference_tables(tokens["train"], vocab_size)
    val = tokens["val"]
    meta = {
        "source": source,
        "tokenizer": "char",
        "vocab_size": vocab_size,
        "dtype": dtype,
        "tokens": {split: len(a) for split, a in tokens.items()},
        "sha256": {split: hashlib.sha256(a).hexdigest() for split, a in tokens.items()},
        "characters": characters.astype("<u4").tobytes().decode("utf-32-le"),
        "unigram_nats": float(unigram[val[1:]].mean()) if len(val) > 1 else None,
        "bigram_nats": float(bigram[val[:-1], val[1:]].mean()) if len(val) > 1 and bigram is not None else None,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "meta.json").unlink(missing_ok=True)  # until all is whole, no meta.json vouches for the files
    for split, array in tokens.items():
        with whole_file(folder / f"{split}.bin", "wb") as f:
            f.write(array)
    with whole_file(folder / "meta.json") as f:
        json.dump(meta, f, indent=1)
    return meta


def main(argv):
    known = {"tokenizer": str, "tokens": int, "text": str, "out": str, "help": bool}
    sources, flags = parse(argv, known)
    if flags.get("help"):
        print(__doc__.strip())
        return
    if len(sources) != 1:
        raise UserError("name one SOURCE: python prepare.py pydocs | shakespeare | FILE.txt")
    if flags.get("tokenizer", "char") != "char":
        raise UserError(f"unknown tokenizer {flags['tokenizer']!r}: char")
    text, name = source_text(sources[0], flags.get("text"))
    if flags.get("tokens", 1) < 1:
        raise UserError(f"--tokens={flags['tokens']} must be at least 1")
    folder = Path(flags.get("out") or Path("data") / Path(sources[0]).stem)
    meta = write_chars(text[: flags.get("tokens")], folder, name)
    text = "{train:,} training and {val:,} validation tokens, ".format(**meta["tokens"])
    text += f"vocabulary {meta['vocab_size']:,}"
    for name in ("unigram", "bigram"):
        text += "" if meta[name + "_nats"] is None else f", {name} {meta[name + '_nats']:.4f} nats"
    print(f"{folder}: {text}")


if __name__ == "__main__":
    cli(main)
