import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before any import of transformers: a test never waits for a network
