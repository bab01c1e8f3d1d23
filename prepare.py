"""
Text in, token files out.

    python prepare.py SOURCE [--tokenizer=char|gpt2] [--tokens=N] [--workers=N] [--text=FILE] [--out=data/NAME]

SOURCE is one of
    pydocs          the language reference inside every Python (pydoc_data.topics); no download
    shakespeare     the usual character corpus, downloaded and verified; --text=FILE for a local copy
    openwebtext, fineweb, fineweb-edu, hub:owner/name[:config]      streamed from the Hugging Face hub
    a path          .txt (one document, kept to the byte), .jsonl or .parquet (each row's `text` is a document), or a
                    folder of them, read in the order of their names; what is hidden or of another kind is named

--tokenizer: char is the default for pydocs, shakespeare and .txt, gpt2 for all else. --tokens: stop after so many,
training and validation together. --workers: threads that tokenize (default: one a core); the files are the same, to
the bit, for any number.

Writes train.bin and val.bin (raw little-endian uint16, or uint32 for vocabularies above 65,535 tokens: nanoGPT's
files work here and ours there) and meta.json. Nothing is translated: line ends stay as they are; only a byte-order
mark at the start of a file is dropped. Rows whose text is null or empty are skipped and counted.

char: documents are joined by one newline; the first 90% of the characters train, the rest validate.
gpt2: the end-of-text token 50256 follows each document and stands nowhere else. Whole documents validate: every tenth
of the first 10,000, then every 2,000th; with fewer than ten the last one, and of a single one the last 10% of its
tokens. Memory is bounded by the largest document and a batch of a few million characters. A run that was stopped starts
again; the old files stay until all new ones are whole.

This file owns the format: what train.py and analyze.py need of it (reading, checking, windows, references) is here.
"""

import contextlib
import fcntl
import functools
import glob
import hashlib
import json
import os
import re
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import numpy as np

from configurator import UserError, cli, nearest, parse, read_json, read_text, whole_file

SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
HUB = {
    "openwebtext": "hub:Skylion007/openwebtext",
    "fineweb": "hub:HuggingFaceFW/fineweb:sample-10BT",
    "fineweb-edu": "hub:HuggingFaceFW/fineweb-edu:sample-10BT",
}
CHUNK = 2**24  # tokens looked at together when a whole file is read
BATCH = 2**22  # characters tokenized together
GPT2_VOCAB, END_OF_TEXT = 50257, 50256

# ---------------------------------------------------------------------------------------------------------------------
# reading prepared data


def pieces(tokens):
    """(position, tokens) of a long array, a piece at a time."""
    return ((i, np.asarray(tokens[i : i + CHUNK])) for i in range(0, len(tokens), CHUNK))


def read_stamps(folder):
    """What an earlier check has found in the files of a prepared folder, if it could write that down."""
    try:
        return {split: stamp for split, stamp in read_json(folder / "checked.json").items() if isinstance(stamp, dict)}
    except UserError:
        return {}


def load(folder, vocab_size=None, check=True, again=False):
    """
    A prepared folder -> (train, val, meta): two read-only token arrays and the contents of meta.json.

    vocab_size: of the model; default that of the data. Without meta.json (nanoGPT's folders have none) it must be given
    and tokens are read as uint16. check: raise UserError for an id outside the vocabulary, or a file that is not the
    one that was prepared. Both files are read whole for that, unless they are, by size, inode and times, those that
    an earlier check has read; again=True reads them nevertheless.
    """
    folder = Path(folder)
    name = folder.name
    make = f"python prepare.py {name if name in ('pydocs', 'shakespeare', *HUB) else f'SOURCE --out={folder}'}"
    files = {split: folder / f"{split}.bin" for split in ("train", "val")}
    for path in files.values():
        if not path.is_file():
            raise UserError(f"{path} not found: run `{make}` first")
    if (folder / "meta.json").is_file():
        meta = read_json(folder / "meta.json", "tokenizer", "vocab_size", "dtype", "tokens", "sha256")
        if meta["dtype"] not in ("uint16", "uint32"):
            raise UserError(f"{folder}/meta.json is not ours (dtype {meta['dtype']}): run `{make}`")
    elif vocab_size is None:
        raise UserError(f"{folder}/meta.json not found: run `{make}`, or for files of nanoGPT say --vocab_size=N")
    else:
        meta = {"tokenizer": None, "vocab_size": vocab_size, "dtype": "uint16", "tokens": {}, "sha256": {}}
    limit = min(meta["vocab_size"], vocab_size or meta["vocab_size"])
    arrays, stamps = [], {} if again else read_stamps(folder)
    known = dict(stamps)
    for split, path in files.items():
        dtype = np.dtype(meta["dtype"]).newbyteorder("<")
        if path.stat().st_size == 0 or path.stat().st_size % dtype.itemsize:
            raise UserError(f"{path} ({path.stat().st_size} bytes) is no file of {meta['dtype']}: run `{make}` again")
        tokens = np.memmap(path, dtype=dtype, mode="c")  # copy on write: the file is never changed, torch is content
        if check:
            stat = path.stat()
            now = [stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns, meta["dtype"]]
            if stamps.get(split, {}).get("stat") != now:
                sha, greatest = hashlib.sha256(), 0
                for _, part in pieces(tokens):
                    sha.update(part)
                    greatest = max(greatest, int(part.max()))
                stamps[split] = {"stat": now, "sha256": sha.hexdigest(), "greatest": greatest}
            if stamps[split]["greatest"] >= limit:
                at = next(i + int((p >= limit).argmax()) for i, p in pieces(tokens) if p.max() >= limit)
                raise UserError(
                    f"{path} holds token id {tokens[at]} at position {at}, outside the vocabulary of {limit}"
                    f" tokens: data and model do not fit, run `{make}` again or set vocab_size"
                )
            if meta["sha256"].setdefault(split, stamps[split]["sha256"]) != stamps[split]["sha256"]:
                raise UserError(f"{path} is not the file that was prepared (its sha256 differs): run `{make}` again")
            meta["tokens"].setdefault(split, len(tokens))
        arrays.append(tokens)
    if stamps != known:
        with contextlib.suppress(OSError, UserError), whole_file(folder / "checked.json") as f:  # if it can be written
            json.dump(stamps, f)
    return *arrays, meta


def windows(tokens, block_size, max_tokens=None):
    """
    Evaluation windows that do not overlap -> (n, block_size + 1), a view of tokens.

    Window k reads tokens k*T .. (k+1)*T - 1 and predicts k*T + 1 .. (k+1)*T, for T = block_size; a last partial
    window is dropped. max_tokens: only the windows within the first so many targets.
    """
    targets = len(tokens) - 1 if max_tokens is None else min(len(tokens) - 1, max_tokens)
    if targets < block_size:
        what = f"{targets + 1} tokens are too few for one window of {block_size} + 1"
        raise UserError(f"{what}: take a shorter window (block_size), or more text (eval_tokens)")
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


def decode(ids, meta):
    """Token ids of a prepared folder -> their text; None where its meta.json does not say what they mean."""
    if meta["tokenizer"] == "char":
        return "".join(meta["characters"][i] for i in ids if i < len(meta["characters"]))
    try:
        return gpt2().decode([i for i in ids if i < GPT2_VOCAB]) if meta["tokenizer"] == "gpt2" else None
    except UserError:  # no vocabulary here, and no connection
        return None


# ---------------------------------------------------------------------------------------------------------------------
# preparing


def download_shakespeare():
    import http.client
    import urllib.request

    hint = "fetch tiny Shakespeare yourself and pass it with --text=FILE"
    try:
        with urllib.request.urlopen(SHAKESPEARE_URL, timeout=60) as reply:
            raw = reply.read()
    except (OSError, http.client.HTTPException) as e:
        raise UserError(f"{SHAKESPEARE_URL} can't be downloaded ({e}): {hint}") from None
    if hashlib.sha256(raw).hexdigest() != SHAKESPEARE_SHA256:
        raise UserError(f"{SHAKESPEARE_URL} did not arrive as expected (its sha256 differs): {hint}")
    return raw.decode("utf-8")


def text_of(row, name):
    """(name, text) of a row; text may be None."""
    if not isinstance(row, dict) or "text" not in row:
        there = f" but {', '.join(row)}" if isinstance(row, dict) else ""
        raise UserError(f"{name} has no column `text`{there}: rename the one that holds the text")
    text = row["text"]
    if not isinstance(text, str | None):
        raise UserError(f"{name}: its text is of type {type(text).__name__}, it must be a string")
    if text and not text.isascii():  # JSON can hold half a surrogate pair, which is no character
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return name, text


def text_file(path):
    yield str(path), read_text(path)


def json_lines(path):
    """
    Rows of a .jsonl file.

    Not by `datasets`: its reader guesses a type for each 10 MB, so that texts that are all dates come back as dates,
    and texts that are null for long make it stop.
    """
    with open(path, "rb") as f:
        for n, line in enumerate(f, 1):
            if line.strip():
                try:
                    row = json.loads(line.decode("utf-8-sig" if n == 1 else "utf-8"))
                except (ValueError, RecursionError) as e:
                    raise UserError(f"{path} line {n} is no JSON ({e})") from None
                yield text_of(row, f"{path} line {n}")


def streamed(name, hint, *args, **kwargs):
    """Rows of datasets.load_dataset(*args, **kwargs), one at a time."""
    try:
        import datasets

        for library in ("datasets", "huggingface_hub"):  # they tell of each failure at length; we do it in one line
            datasets.logging.logging.getLogger(library).setLevel("CRITICAL")
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else each local file waits for a request to the hub
        rows = datasets.load_dataset(*args, **kwargs, split="train", streaming=True)
        if "text" in (rows.column_names or ()):
            rows = rows.select_columns("text")
        n = 0
        for batch in rows.iter(64):  # four times as fast as row by row
            for text in batch["text"] if "text" in batch else [text_of(batch, name)]:
                yield text_of({"text": text}, f"{name} row {(n := n + 1)}")
    except UserError:
        raise
    except Exception as e:  # whatever the library and those below it raise: there is no common class
        raise UserError(f"{name} can't be read ({type(e).__name__}: {textwrap.shorten(str(e), 200)}){hint}") from None


def parquet_file(path):
    # one file at a time: a column that is all null in one must not set the type for the next
    where = glob.escape(os.path.abspath(path))
    return streamed(path, ": is it a whole parquet file?", "parquet", data_files=where, batch_size=64)


READERS = {".txt": text_file, ".jsonl": json_lines, ".parquet": parquet_file}


def files_in(folder):
    """The files of a folder that are read, in the order of their names; a line tells of those that are not."""
    files = sorted(f for f in folder.rglob("*") if f.is_file())
    shown = [f for f in files if not any(part.startswith(".") for part in f.relative_to(folder).parts)]
    read = [f for f in shown if f.suffix in READERS]
    if hidden := len(files) - len(shown):
        print(f"note: {hidden} hidden files in {folder} are skipped")
    if others := [str(f.relative_to(folder)) for f in shown if f.suffix not in READERS]:
        more = f" and {len(others) - 5} more" * (len(others) > 5)
        print(f"note: not read in {folder}, as they are none of {', '.join(READERS)}: {', '.join(others[:5])}{more}")
    return read


def documents(source, text=None):
    """
    A source -> how to call it in meta.json, the tokenizer that suits, and an iterator of (name, text) of its documents.

    text is None or "" for a row that has none. Only one document is held at a time.
    """
    if text is not None and source != "shakespeare":
        raise UserError(f"--text is for shakespeare; for a file of your own: python prepare.py {text}")
    if source == "pydocs":
        from pydoc_data.topics import topics

        whole = "\n\n".join(topics[k] for k in sorted(topics))
        return f"pydocs of Python {sys.version.split()[0]}", "char", iter([(source, whole)])
    if source == "shakespeare":
        if text is None:
            return SHAKESPEARE_URL, "char", iter([(source, download_shakespeare())])
        whole = read_text(text)
        if hashlib.sha256(Path(text).read_bytes()).hexdigest() != SHAKESPEARE_SHA256:
            print(f"note: {text} is not the usual tiny Shakespeare (its sha256 differs); published losses do not apply")
        return Path(text).name, "char", iter([(text, whole)])
    if source in HUB or source.startswith("hub:"):
        source = HUB.get(source, source)
        if not re.fullmatch("hub:[^/:]+/[^/:]+(:.+)?", source):
            raise UserError(f"{source!r} names no dataset of the hub: write hub:owner/name or hub:owner/name:config")
        repo, _, config = source.removeprefix("hub:").partition(":")
        hint = ": check name and connection, or give the path of a local .txt, .jsonl, .parquet or folder instead"
        return source, "gpt2", streamed(repo, hint, repo, config or None)
    path = Path(source)
    known = ", ".join(READERS)
    files = [path]
    if path.is_dir():
        files = files_in(path)
        if not files:
            raise UserError(f"{path} holds no file of {known}")
    elif path.suffix not in READERS:
        names = ("pydocs", "shakespeare", *HUB)
        hint = nearest(source, names) or f": {', '.join(names)}, hub:owner/name, a file of {known}, or a folder of them"
        raise UserError(f"unknown source {source!r}{hint}")
    elif not path.exists():
        raise UserError(f"{path} not found")
    suits = "char" if {f.suffix for f in files} == {".txt"} else "gpt2"
    return path.name, suits, (document for f in files for document in READERS[f.suffix](f))


@functools.cache
def gpt2():
    try:
        import tiktoken

        return tiktoken.get_encoding("gpt2")
    except Exception as e:  # connection, checksum, permission, no such package
        cache = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
        cache = cache or Path(tempfile.gettempdir()) / "data-gym-cache"
        raise UserError(
            f"the GPT-2 vocabulary in {cache} is missing or damaged, and tiktoken can't fetch it ({type(e).__name__}):"
            " run once with a connection, or copy that folder from a machine where it works and set TIKTOKEN_CACHE_DIR"
        ) from None


def batches(docs):
    """Documents -> lists of (name, text) of BATCH characters together, or of one document that is longer."""
    batch, size = [], 0
    for name, text in docs:
        text = text or ""
        if batch and size + len(text) > BATCH:
            yield batch
            batch, size = [], 0
        batch.append((name, text))
        size += len(text) + 64  # rows without text take memory too
    yield batch


@contextlib.contextmanager
def quiet():
    """Nothing reaches stderr: a panic inside tiktoken prints pages."""
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def encode(batch, workers):
    """A list of (name, text) -> the tokens of each, a list of lists."""
    encoding = gpt2()
    try:
        with quiet():  # encode_ordinary: text that reads <|endoftext|> is text
            return encoding.encode_ordinary_batch([text for _, text in batch], num_threads=workers)
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # a panic is no Exception
        if len(batch) == 1:
            why = f"{type(e).__name__}: {textwrap.shorten(str(e), 200)}"
            raise UserError(f"{batch[0][0]} can't be tokenized ({why}): change or remove this document") from None
    return [encode([document], 1)[0] for document in batch]  # one of them fails again, and is named


@contextlib.contextmanager
def prepared(folder):
    """
    The files train.bin and val.bin, open to be written, and the contents of meta.json, a dict to be filled.

    All three are there whole at the end, or folder is as it was.
    """
    made = [p for p in (folder, *folder.parents) if not p.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.????????.tmp"):  # of a prepare that was killed: a living one holds a lock
        with contextlib.suppress(OSError), open(old) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            old.unlink()
    try:
        with (
            whole_file(folder / "meta.json") as f,  # renamed last: it vouches for the other two
            whole_file(folder / "train.bin", "wb") as train,
            whole_file(folder / "val.bin", "wb") as val,
        ):
            for file in (f, train, val):
                fcntl.flock(file, fcntl.LOCK_EX)
            meta = {}
            yield train, val, meta
            json.dump(meta, f, indent=1)
            for file in (f, train, val):
                file.flush()
                os.fsync(file.fileno())
            for name in ("meta.json", "train.bin", "val.bin", "checked.json"):  # all, so that old and new never mix
                (folder / name).unlink(missing_ok=True)
    except BaseException:
        with contextlib.suppress(OSError):
            for new in made:
                new.rmdir()
        raise


def described(train, val, source, tokenizer, vocab_size, dtype, **more):
    """The contents of meta.json for two files of tokens that are written but still open."""
    tokens, sha = {}, {}
    for split, file in (("train", train), ("val", val)):
        file.flush()
        tokens[split] = np.memmap(file.name, np.dtype(dtype).newbyteorder("<"), mode="r")
        with open(file.name, "rb") as f:
            sha[split] = hashlib.file_digest(f, "sha256").hexdigest()
    losses = {"unigram": None, "bigram": None}
    if len(tokens["val"]) > 1:  # each target a window of its own, so that none is dropped
        losses = reference_losses(tokens["train"], windows(tokens["val"], 1), vocab_size)
    return {
        "source": source,
        "tokenizer": tokenizer,
        "vocab_size": vocab_size,
        "dtype": dtype,
        "tokens": {split: len(ids) for split, ids in tokens.items()},
        "sha256": sha,
        **more,
        **{f"{name}_nats": None if of is None else float(of.mean()) for name, of in losses.items()},
    }


def write_gpt2(docs, folder, source, limit, workers):
    """GPT-2 tokens of documents, as train.bin, val.bin and meta.json in folder; limit: None, or stop after so many."""
    began = said = time.monotonic()
    total = n = skipped = start = 0  # tokens, documents, rows without text, bytes of train.bin before the last document
    with prepared(folder) as (train, val, meta):
        for ids in (ids for batch in batches(docs) for ids in encode(batch, workers)):
            if not ids:
                skipped += 1
                continue
            held_out = n % 10 == 9 if n < 10_000 else n % 2000 == 1999
            start, n = train.tell(), n + 1
            ids = np.array([*ids, END_OF_TEXT][: None if limit is None else limit - total], "<u2")
            (val if held_out else train).write(ids)
            total += len(ids)
            if total == limit:
                break
            if time.monotonic() > said + 10:
                said = time.monotonic()
                rate = total / (said - began)
                left = f", {(limit - total) / rate:,.0f} s left" if limit else ""
                print(f"{total:,} tokens, {rate:,.0f} tokens/s{left}", file=sys.stderr, flush=True)
        by = "whole documents: every 10th of the first 10,000, then every 2,000th"
        if not val.tell() and total > 1:
            by = "the last document" if n > 1 else "the last 10% of the tokens of a single document"
            cut = start // 2 if n > 1 else int(0.9 * total)
            train.flush()
            val.write(np.memmap(train.name, "<u2", mode="r", offset=2 * cut))
            train.truncate(2 * cut)
        if not val.tell():
            raise UserError(f"{source} has {total} tokens of text, too few to split into training and validation")
        more = {
            "documents": n,
            "skipped": skipped,
            "end_of_text": f"{END_OF_TEXT} after each document",
            "validation": by,
        }
        meta |= described(train, val, source, "gpt2", GPT2_VOCAB, "uint16", **more)
    return meta


def write_chars(text, folder, source):
    """Character tokens of text, split 90/10, as train.bin, val.bin and meta.json in folder."""
    points = np.frombuffer(text.encode("utf-32-le"), "<u4")  # one number a character
    characters, ids = np.unique(points, return_inverse=True)
    dtype = "uint16" if len(characters) <= 65535 else "uint32"
    cut = int(0.9 * len(ids))
    if cut == 0:
        raise UserError(f"{source} has {len(ids)} characters, too few to split into training and validation text")
    ids = ids.astype(np.dtype(dtype).newbyteorder("<"))
    alphabet = characters.astype("<u4").tobytes().decode("utf-32-le")
    with prepared(folder) as (train, val, meta):
        train.write(ids[:cut])
        val.write(ids[cut:])
        meta |= described(train, val, source, "char", len(characters), dtype, characters=alphabet)
    return meta


def main(argv):
    known = {"tokenizer": str, "tokens": int, "workers": int, "text": str, "out": str, "help": bool}
    sources, flags = parse(argv, known)
    if flags.get("help"):
        print(__doc__.strip())
        return
    if len(sources) != 1 or not sources[0]:
        raise UserError("name one SOURCE, as in `python prepare.py pydocs`; --help lists them")
    source = sources[0]
    if flags.get("tokenizer", "char") not in ("char", "gpt2"):
        raise UserError(f"unknown tokenizer {flags['tokenizer']!r}: char or gpt2")
    for name in ("tokens", "workers"):
        if flags.get(name, 1) < 1:
            raise UserError(f"--{name}={flags[name]} must be at least 1")
    label, suits, docs = documents(source, flags.get("text"))
    stem = Path(os.path.abspath(source)).stem
    if source.startswith("hub:"):
        stem = re.sub("[/:]", "-", source.partition("/")[2])
    folder = Path(flags.get("out") or Path("data") / stem)
    if flags.get("tokenizer", suits) == "gpt2":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        meta = write_gpt2(docs, folder, label, flags.get("tokens"), flags.get("workers", cores))
        skipped = meta["skipped"]
    else:
        texts = [text if text or name.endswith(".txt") else None for name, text in docs]
        skipped = texts.count(None)
        meta = write_chars("\n".join(t for t in texts if t is not None)[: flags.get("tokens")], folder, label)
    text = "{train:,} training and {val:,} validation tokens, ".format(**meta["tokens"])
    text += f"vocabulary {meta['vocab_size']:,}"
    for name in ("unigram", "bigram"):
        text += "" if meta[name + "_nats"] is None else f", {name} {meta[name + '_nats']:.4f} nats"
    text += f", {skipped:,} rows without text skipped" if skipped else ""
    print(f"{folder}: {text}")


if __name__ == "__main__":
    cli(main)
