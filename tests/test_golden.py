"""
20 steps of every arm on synthetic tokens, float32, against tests/golden.json, within 1e-4 nats.

A change that moves a loss is not the same experiment any more. `python tests/test_golden.py` writes the file anew, for
a change that is meant to.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import train

CONFIG = """
dataset, vocab_size = "synthetic", 32
n_layer, n_head, n_embd, block_size = 2, 4, 32, 32
batch_size, max_iters, warmup_iters, learning_rate, eval_interval, log_interval = 8, 20, 2, 3e-3, 10, 1
device, dtype, compile = "cpu", "float32", False
_kept = [("FullResidual", True, True), ("AttnOnly", True, False)]
_kept += [("FFNOnly", False, True), ("NoResidual", False, False)]
_paths = {"": {}, "+NoRouting": {"routing": False}, "+SelfBias": {"self_bias": 4.0}}
arms = {
    arm + path: {"attn_residual": attn, "ffn_residual": ffn} | flags
    for path, flags in _paths.items()
    for arm, attn, ffn in _kept
}
arms |= {removal: {"removal": removal} for removal in ("self", "fixed", "rotated", "previous")}
arms |= {"gains": {"attn_gain": 0.5, "ffn_gain": 2.0}, "grouped": {"n_kv_head": 2, "removal": "self"}}
arms["no_bias"] = {"bias": False}
arms |= {"matched": {"removal": "matched"}, "shrink": {"removal": "shrink"}, "value": {"attn_residual": "value"}}
arms["helped"] = {"attn_residual": False, "self_bias": ((0, 4.0), (12, 0.0))}
"""


def losses(place):
    """{arm: the 20 training losses and the validation losses}, trained in the folder `place`, now the current one."""
    os.chdir(place)
    Path("data/synthetic").mkdir(parents=True)
    steps = np.random.default_rng(0).integers(1, 4, 6000)  # a walk: the next token is 1 to 3 above the last, modulo 32
    walk = (np.cumsum(steps) % 32).astype("<u2")
    walk[:5000].tofile("data/synthetic/train.bin")
    walk[5000:].tofile("data/synthetic/val.bin")
    Path("golden.py").write_text(CONFIG)
    train.main(["golden.py"])
    found = {}
    for path in sorted(Path("out/golden").glob("*/seed0/log.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        arm = path.parent.parent.name
        found[arm] = {key: [row[key] for row in rows if key in row] for key in ("loss", "val_loss")}
    return found


def test_golden_losses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    golden, now = json.loads((HERE / "golden.json").read_text()), losses(tmp_path)
    assert list(now) == list(golden) and len(golden) == 23
    for arm, expected in golden.items():
        assert len(expected["loss"]) == 20 and len(expected["val_loss"]) == 3
        for key, values in expected.items():
            assert now[arm][key] == pytest.approx(values, abs=1e-4), arm


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        golden = losses(scratch)
    rounded = {arm: {key: [round(x, 6) for x in values] for key, values in v.items()} for arm, v in golden.items()}
    lines = [f" {json.dumps(arm)}: {json.dumps(v)}" for arm, v in rounded.items()]
    (HERE / "golden.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
