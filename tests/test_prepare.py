import hashlib
import json
import math
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import prepare

ROOT = Path(prepare.__file__).parent
END = 50256
OFFLINE = {"HF_HUB_OFFLINE": "1", "HTTPS_PROXY": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, vocabulary):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def bpe(vocabulary):
    import tiktoken

    return tiktoken.get_encoding("gpt2")


def command(*args, python=(), env=None, **kwargs):
    line = [sys.executable, *python, str(ROOT / "prepare.py"), *map(str, args)]
    return subprocess.Popen(
        line, env=os.environ | (env or {}), stderr=subprocess.PIPE, stdout=subprocess.PIPE, **kwargs
    )


def refused(*args, **kwargs):
    """The house form of an error: its line. Nothing is written."""
    before = sorted(Path().rglob("*"))
    process = command(*args, **kwargs)
    err = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 2 and "Traceback" not in err
    assert err.startswith("error: ") and err.count("\n") == 1, err
    assert sorted(p for p in Path().rglob("*") if p.name != "data") == [p for p in before if p.name != "data"]
    return err


def make(*args):
    """Prepare in this process -> (train, val) as lists and meta, all checked by load."""
    out = Path("out")
    shutil.rmtree(out, ignore_errors=True)
    prepare.main([*map(str, args), "--out=out"])
    train, val, meta = prepare.load(out)
    written = sorted(p.name for p in out.iterdir() if p.name != "checked.json")  # of an earlier check
    assert written == ["meta.json", "train.bin", "val.bin"]
    return train.tolist(), val.tolist(), meta


def jsonl(path, *texts):
    Path(path).write_text("".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(texts)))
    return path


def parquet(path, values, kind=None, name="text"):
    pq.write_table(pa.table({"id": list(range(len(values))), name: pa.array(values, kind)}), path)
    return path


def characters(ids, meta):
    return "".join(meta["characters"][i] for i in ids)


# ---------------------------------------------------------------------------------------------------------------------
# reading side


@pytest.mark.parametrize("n,size,most", [(10, 3, None), (11, 3, None), (13, 3, 7), (4, 3, None), (50, 7, 1000)])
def test_windows_are_those_of_a_slow_loop(n, size, most):
    tokens = np.arange(100, 100 + n, dtype=np.uint16)
    slow, k = [], 0
    while (k + 1) * size < n and (most is None or (k + 1) * size <= most):
        slow.append([100 + k * size + i for i in range(size + 1)])
        k += 1
    assert prepare.windows(tokens, size, most).tolist() == slow


def test_too_few_tokens_for_a_window():
    with pytest.raises(prepare.UserError, match="3 tokens are too few for one window of 3"):
        prepare.windows(np.arange(3), 3)


def test_references_against_counts_by_hand(monkeypatch):
    train = np.array([0, 1, 0, 1, 1], np.uint16)  # 0 twice, 1 three times, 2 never; pairs 01 10 01 11
    windows = np.array([[0, 1, 2], [1, 1, 0]])
    first = -(math.log(4 / 8) + math.log(1 / 8)) / 2
    second = -(math.log(4 / 8) + math.log(3 / 8)) / 2
    after = -(math.log(3 / 5) + math.log(1 / 5)) / 2, -(math.log(2 / 5) + math.log(2 / 5)) / 2
    for chunk in (prepare.CHUNK, 2):  # no pair is lost between chunks
        monkeypatch.setattr(prepare, "CHUNK", chunk)
        losses = prepare.reference_losses(train, windows, 3)
        assert losses["unigram"] == pytest.approx([first, second], abs=1e-12)
        assert losses["bigram"] == pytest.approx(after, abs=1e-12)
    assert prepare.reference_losses(train, windows, 1025)["bigram"] is None


def test_load_names_what_is_wrong():
    Path("a.txt").write_text("abcdefghij" * 10)
    make("a.txt")
    for name in ("openwebtext", "fineweb", "fineweb-edu", "pydocs"):
        with pytest.raises(prepare.UserError, match=f"run `python prepare.py {name}` first"):
            prepare.load(f"data/{name}")
    with pytest.raises(prepare.UserError, match="prepare.py SOURCE --out=data/mine"):
        prepare.load("data/mine")
    with pytest.raises(prepare.UserError, match="token id 9 at position 9, outside the vocabulary of 9"):
        prepare.load("out", 9)
    raw = bytearray(Path("out/val.bin").read_bytes())
    raw[0] = 1
    Path("out/val.bin").write_bytes(raw)
    with pytest.raises(prepare.UserError, match="sha256 differs"):
        prepare.load("out")
    Path("out/val.bin").write_bytes(raw[:-1])
    with pytest.raises(prepare.UserError, match="no file of uint16"):
        prepare.load("out")


def test_s5_no_file_of_a_folder_is_passed_over_or_taken_in_silence(capsys):
    for name in ("a.txt", ".ipynb_checkpoints/a-checkpoint.txt", ".git/x.txt", "sub/b.txt", "notes.pdf", ".hidden.txt"):
        path = Path("texts") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name} " * 20)
    make("texts")
    train, val, meta = prepare.load("out")
    assert prepare.decode([*train, *val], meta) == "a.txt " * 20 + "\n" + "sub/b.txt " * 20
    said = capsys.readouterr().out
    assert (
        "3 hidden files in texts are skipped" in said
        and "as they are none of .txt, .jsonl, .parquet: notes.pdf" in said
    )


def test_a_file_is_read_whole_once_and_again_when_it_was_touched(monkeypatch):
    Path("a.txt").write_text("abcdefghij" * 1000)
    make("a.txt")
    prepare.load("out")
    read = []
    plain = prepare.pieces
    monkeypatch.setattr(prepare, "pieces", lambda tokens: read.append(len(tokens)) or plain(tokens))
    *_, meta = prepare.load("out")
    assert read == [] and meta["tokens"] == {"train": 9000, "val": 1000}
    prepare.load("out", again=True)  # as the audit does
    assert read == [9000, 1000]
    with pytest.raises(prepare.UserError, match="outside the vocabulary of 5"):
        prepare.load("out", 5)
    raw = bytearray(Path("out/val.bin").read_bytes())
    raw[2] ^= 1
    old = Path("out/val.bin").stat()
    Path("out/val.bin").write_bytes(raw)
    os.utime("out/val.bin", ns=(old.st_atime_ns, old.st_mtime_ns))  # the size and the time of before
    with pytest.raises(prepare.UserError, match="sha256 differs"):
        prepare.load("out")


# ---------------------------------------------------------------------------------------------------------------------
# characters


def test_pydocs_is_the_same_text_and_needs_neither_library():
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import prepare; prepare.main(['pydocs', '--out=out'])"
    code += "; assert not {'tiktoken', 'datasets', 'tqdm', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    train, val, meta = prepare.load("out")
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[k] for k in sorted(topics))
    assert characters(train, meta) + characters(val, meta) == text and len(train) == int(0.9 * len(text))
    keys = "source tokenizer vocab_size dtype tokens sha256 characters unigram_nats bigram_nats"
    assert " ".join(meta) == keys
    assert (meta["tokenizer"], meta["dtype"], meta["vocab_size"]) == ("char", "uint16", len(set(text)))
    for split in ("train", "val"):
        raw = Path(f"out/{split}.bin").read_bytes()
        assert hashlib.sha256(raw).hexdigest() == meta["sha256"][split] and len(raw) == 2 * meta["tokens"][split]
    counts = np.bincount(train, minlength=len(set(text)))
    nats = -np.log((counts[val[1:]] + 1) / (counts.sum() + len(counts))).mean()
    assert meta["unigram_nats"] == pytest.approx(nats, abs=1e-9)
    pairs = np.zeros((len(counts), len(counts)), int)
    np.add.at(pairs, (train[:-1], train[1:]), 1)
    p = (pairs + 1) / (pairs + 1).sum(1, keepdims=True)
    assert meta["bigram_nats"] == pytest.approx(-np.log(p[val[:-1], val[1:]]).mean(), abs=1e-9)


EVERY_NEWLINE = "a\n\u2029\u2028\x0c\x85b\r\nc\rd\n\n\ne"


def test_a_text_file_is_kept_to_the_byte(bpe):  # P1
    Path("a.txt").write_bytes(EVERY_NEWLINE.encode())
    Path("f").mkdir()
    shutil.copy("a.txt", "f")
    jsonl("a.jsonl", EVERY_NEWLINE)
    parquet("a.parquet", [EVERY_NEWLINE])
    for source in ("a.txt", "f", "a.jsonl", "a.parquet"):
        train, val, meta = make(source, "--tokenizer=char")
        assert characters(train + val, meta) == EVERY_NEWLINE
    for source in ("f", "a.parquet"):
        train, val, meta = make(source, "--tokenizer=gpt2", "--workers=1")
        assert train + val == [*bpe.encode_ordinary(EVERY_NEWLINE), END]


@pytest.mark.parametrize("n,dtype", [(65535, "uint16"), (65536, "uint32"), (65537, "uint32")])
def test_ids_above_16_bits_do_not_wrap(n, dtype):  # P8
    text = "".join(map(chr, range(0x10000, 0x10000 + n))) * 3
    Path("a.txt").write_text(text, encoding="utf-8")
    train, val, meta = make("a.txt")
    assert (meta["dtype"], meta["vocab_size"]) == (dtype, n)
    cut = int(0.9 * 3 * n)
    assert train == [i % n for i in range(cut)] and val == [i % n for i in range(cut, 3 * n)]
    counts = np.bincount(np.arange(cut) % n, minlength=n)
    assert meta["unigram_nats"] == pytest.approx(np.log((cut + n) / (counts[val[1:]] + 1)).mean(), abs=1e-9)


def test_the_platform_does_not_choose_the_encoding():  # P9
    text = "naïve café – 東京\n" * 20
    Path("a.txt").write_text(text, encoding="utf-8")
    Path("a.jsonl").write_text(json.dumps({"text": text}, ensure_ascii=False), encoding="utf-8")
    posix = {"PYTHONCOERCECLOCALE": "0", "LC_ALL": "POSIX"}
    for args in (["a.txt"], ["a.jsonl", "--workers=1"]):
        *_, meta = make(*args)
        process = command(*args, "--out=posix", python=("-X", "utf8=0"), env=posix)
        assert process.communicate()[1] == b"" and process.returncode == 0
        assert prepare.load("posix")[2] == meta
    Path("marked.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    train, val, meta = make("marked.txt")
    assert characters(train + val, meta) == text
    Path("latin.txt").write_bytes("naïve".encode("latin-1"))
    for tokenizer in ("char", "gpt2"):
        line = refused("latin.txt", f"--tokenizer={tokenizer}")
        assert "latin.txt is not UTF-8 (byte 0xef at offset 2)" in line


# ---------------------------------------------------------------------------------------------------------------------
# GPT-2 tokens


def test_one_long_document_for_any_number_of_workers(bpe):  # P7
    rng = random.Random(0)
    for text, numbers in (
        ("Hello world, information " * 1_200_000, (1, 2, 7)),
        (" ".join("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=40)) for _ in range(40_000)), (2,)),
    ):
        Path("a.txt").write_text(text)
        whole = np.array([*bpe.encode_ordinary(text), END], np.uint16)
        metas = []
        for workers in numbers:
            prepare.main(["a.txt", "--tokenizer=gpt2", f"--workers={workers}", "--out=out"])
            train, val, meta = prepare.load("out")
            assert np.array_equal(np.concatenate([train, val]), whole) and len(train) == int(0.9 * len(whole))
            assert meta["validation"] == "the last 10% of the tokens of a single document"
            metas.append(meta)
        assert all(meta == metas[0] for meta in metas)


def test_nulls_and_empty_files_in_either_order(capsys, bpe):  # P3
    parquet("1.parquet", [None, None], pa.null())
    parquet("2.parquet", ["aa", None, "", "bb"])
    parquet("3.parquet", [], pa.string())
    Path("4.jsonl").touch()
    jsonl("5.jsonl", None, "")
    expected = [*bpe.encode_ordinary("aa"), END], [*bpe.encode_ordinary("bb"), END]
    for i, order in enumerate(((1, 2, 3, 4, 5), (5, 4, 3, 2, 1), (2, 1, 3, 5, 4))):
        Path(f"f{i}").mkdir()
        for place, n in enumerate(order):
            source = next(Path().glob(f"{n}.*"))
            shutil.copy(source, f"f{i}/{place}{source.suffix}")
        train, val, meta = make(f"f{i}", "--workers=1")
        assert (train, val) == expected
        assert (meta["documents"], meta["skipped"], meta["validation"]) == (2, 6, "the last document")
        assert "6 rows without text skipped" in capsys.readouterr().out
        train, val, meta = make(f"f{i}", "--tokenizer=char")
        assert characters(train + val, meta) == "aa\nbb"
        assert "6 rows without text skipped" in capsys.readouterr().out


def test_rows_keep_their_text_whatever_it_looks_like(bpe):
    texts = ["2020-01-01", "None", "1", "true", "  ", "null"]  # a reader that guesses types makes dates of dates
    for source in (jsonl("a.jsonl", *texts), parquet("a.parquet", texts)):
        train, val, _ = make(source, "--workers=1")
        assert train + val == [i for t in texts for i in [*bpe.encode_ordinary(t), END]]
    Path("b.jsonl").write_text('{"text": "a\\ud83d\\ude00b\\ud800c"}\n')
    for tokenizer in ("char", "gpt2"):
        train, val, meta = make("b.jsonl", "--workers=1", f"--tokenizer={tokenizer}")
        text = characters(train + val, meta) if tokenizer == "char" else bpe.decode((train + val)[:-1])
        assert text == "a😀b\ufffdc"


def test_text_that_reads_end_of_text():  # P5
    train, val, meta = make(jsonl("a.jsonl", "a<|endoftext|>b", "b"), "--workers=1")
    assert train == [64, 27, 91, 437, 1659, 5239, 91, 29, 65, END] and val == [65, END]
    assert meta["end_of_text"] == "50256 after each document"
    keys = "source tokenizer vocab_size dtype tokens sha256 documents skipped end_of_text validation"
    assert " ".join(meta) == keys + " unigram_nats bigram_nats"
    assert (meta["vocab_size"], meta["dtype"], meta["bigram_nats"]) == (50257, "uint16", None)
    assert meta["unigram_nats"] == pytest.approx(math.log((10 + 50257) / 2), abs=1e-9)  # 50256 was seen once


def test_long_runs_of_one_character(bpe):  # P6
    source = jsonl("a.jsonl", "An ordinary one.", "^" * 1_000_000, "a" * 1_000_000, "Another one.")
    began = time.monotonic()
    train, val, meta = make(source, "--workers=4")
    assert time.monotonic() < began + 30 and meta["documents"] == 4
    ends = [i for i, t in enumerate(train) if t == END]
    assert train[: ends[0]] == bpe.encode_ordinary("An ordinary one.")
    assert ends[1] - ends[0] == ends[2] - ends[1] == 250_001
    assert val == [*bpe.encode_ordinary("Another one."), END]


def test_a_panic_names_the_document():  # P6; so many spaces make tiktoken panic, which is no Exception
    source = jsonl("a.jsonl", "A text.", " " * 1_500_000 + "x", "Another text.")
    assert "a.jsonl line 2 can't be tokenized (PanicException" in refused(source, "--workers=2")
    assert not Path("data").exists()


def test_whole_documents_are_held_out(bpe, monkeypatch):
    monkeypatch.setattr(prepare, "BATCH", 5000)  # many batches
    texts = [f"Document {k}." for k in range(12_001)]
    docs = [[*ids, END] for ids in bpe.encode_ordinary_batch(texts)]
    out = [k for k in range(12_001) if (k % 10 == 9 and k < 10_000) or k % 2000 == 1999]
    expected = [i for k in out for i in docs[k]], [i for k in sorted({*range(12_001)} - {*out}) for i in docs[k]]
    train, val, meta = make(jsonl("a.jsonl", *texts), "--workers=2")
    assert (val, train) == expected and meta["documents"] == 12_001
    assert meta["validation"].startswith("whole documents")
    windows = prepare.windows(np.array(val), len(val) - 1)
    nats = prepare.reference_losses(np.array(train), windows, 50257)["unigram"][0]
    assert meta["unigram_nats"] == pytest.approx(nats, abs=1e-9)
    train, val, meta = make("a.jsonl", "--workers=1", "--tokens=1000")  # the same documents, and stops to the token
    assert len(train) + len(val) == 1000
    assert train == expected[1][: len(train)] and val == expected[0][: len(val)]


def test_hub_and_parquet_stop_early(bpe):
    texts = [f"Document {k} of the hub. " * 20 for k in range(5_000)]
    Path("owner/name").mkdir(parents=True)  # `datasets` takes a folder of that name before it asks the hub
    pq.write_table(pa.table({"text": texts, "n": range(5_000)}), "owner/name/train.parquet", row_group_size=1000)
    expected = [i for t in texts[:9] for i in [*bpe.encode_ordinary(t), END]]
    process = command("hub:owner/name", "--tokens=5000", "--workers=2", env=OFFLINE)
    said = process.communicate(timeout=60)[1].splitlines()  # on a busy machine it tells how far it is, and no more
    assert process.returncode == 0 and all(
        re.fullmatch(rb"[\d,]+ tokens, [\d,]+ tokens/s, [\d,]+ s left", x) for x in said
    )
    train, val, meta = prepare.load("data/name")
    assert train.tolist()[: len(expected)] == expected and len(train) + len(val) == 5000
    assert meta["source"] == "hub:owner/name"


# ---------------------------------------------------------------------------------------------------------------------
# what goes wrong


def started(*args):
    """A command that has written its first document and now tokenizes its long second one."""
    jsonl("long.jsonl", "An ordinary one. " * 14_000, "a" * 30_000_000, "The last.")
    process = command("long.jsonl", "--workers=1", "--out=out", *args)
    until = time.monotonic() + 40
    while not any(p.stat().st_size for p in Path().glob("out/train.bin.*.tmp")):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.05)
    return process


def test_a_killed_run_starts_again_and_never_mixes():
    jsonl("a.jsonl", "An old text.", "Another old text.")
    *_, old = make("a.jsonl", "--workers=1")
    process = started()
    process.kill()
    process.communicate()
    assert prepare.load("out")[2] == old  # the old files are whole
    assert list(Path("out").glob("*.tmp"))
    jsonl("a.jsonl", "A new text.", "Another new text.")
    prepare.main(["a.jsonl", "--workers=1", "--out=out"])
    assert prepare.load("out")[2] != old
    assert not list(Path("out").glob("*.tmp"))


def test_two_at_once_in_one_folder():
    process = started()
    jsonl("a.jsonl", "A text.", "Another text.")
    *_, meta = prepare.main(["a.jsonl", "--workers=1", "--out=out"]), *prepare.load("out")
    assert len(list(Path("out").glob("*.tmp"))) == 3  # the other run goes on
    process.kill()
    process.communicate()
    assert prepare.load("out")[2] == meta


def test_disk_full():
    jsonl("a.jsonl", *["An ordinary text. " * 50] * 2000)
    limit = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))}
    Path("a.txt").write_text("An ordinary text. " * 5000)
    assert "File too large" in refused("a.jsonl", "--workers=1", **limit)
    assert "File too large" in refused("a.txt", "--out=new", **limit)
    Path("b.txt").write_text("An old text.")
    *_, old = make("b.txt")
    for source in ("a.txt", "a.jsonl"):
        assert "File too large" in refused(source, "--workers=1", "--out=out", **limit)
        assert prepare.load("out")[2] == old


def test_vocabulary_out_of_reach(vocabulary):  # P10
    Path("a.jsonl").write_text('{"text": "a b"}\n')
    damaged = Path("cache")
    shutil.copytree(vocabulary, damaged)
    for file in damaged.iterdir():
        with open(file, "ab") as f:
            f.write(b"\n")
    env = OFFLINE | {"TIKTOKEN_CACHE_DIR": str(damaged)}
    process = command("a.jsonl", env=env)  # tiktoken deletes the damaged file, so `refused` does not fit
    err = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 2 and err.count("\n") == 1 and not Path("data").exists()
    assert "the GPT-2 vocabulary in cache is missing or damaged" in err and "set TIKTOKEN_CACHE_DIR" in err
    line = refused("a.jsonl", env=OFFLINE | {"TIKTOKEN_CACHE_DIR": "empty"})
    assert "the GPT-2 vocabulary in empty is missing or damaged" in line and not Path("data").exists()


def test_hub_out_of_reach():
    line = refused("fineweb-edu", env=OFFLINE)
    assert "HuggingFaceFW/fineweb-edu can't be read" in line and "local .txt, .jsonl, .parquet or folder" in line


@pytest.mark.parametrize(
    "name,raw,message",
    [
        ("a.jsonl", b'{"text": "a"}\n\n{"text": "\xe9"}\n', "a.jsonl line 3 is no JSON ('utf-8' codec"),
        ("a.jsonl", b'{"content": "a", "id": 1}\n', "a.jsonl line 1 has no column `text` but content, id"),
        ("a.jsonl", b'{"text": 5}\n', "a.jsonl line 1: its text is of type int"),
        ("a.jsonl", b"", "a.jsonl has 0 tokens of text"),
        ("a.parquet", b"no parquet", "a.parquet can't be read (ArrowInvalid"),
        ("finewebb", None, "unknown source 'finewebb', did you mean fineweb?"),
        ("b.jsonl", None, "b.jsonl not found"),
    ],
)
def test_bad_input_gets_one_line(name, raw, message):
    if raw is not None:
        Path(name).write_bytes(raw)
    assert message in refused(name, "--workers=1")


@pytest.mark.parametrize(
    "args,message",
    [
        ([], "name one SOURCE"),
        (["pydocs", "--tokenizer=bpe"], "unknown tokenizer 'bpe': char or gpt2"),
        (["pydocs", "--workers=0"], "--workers=0 must be at least 1"),
        (["hub:name"], "'hub:name' names no dataset of the hub: write hub:owner/name"),
        (["pydocs", "--text=a.txt"], "--text is for shakespeare"),
    ],
)
def test_bad_flags_get_one_line(args, message):
    assert message in refused(*args)
