"""
How much of a token reaches the last layer before the first step, with help and without: a table.

    python results/start.py                 after `python prepare.py shakespeare`; a minute

At step 0, over 4,096 tokens of validation text: attention to the own position (mean over layers); what share of the
energy of the last block's vectors differs between positions; and what share of that difference the own token explains
(by chance about 0.015, as the text has 60 characters). Means over the seeds of each experiment. Writes
results/help_10m_cpu/start.csv.
"""

import sys
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from inside import look  # noqa: E402

import prepare  # noqa: E402
import train  # noqa: E402
from configurator import cli  # noqa: E402
from report import write_csv  # noqa: E402

ARMS = {
    "basin_1m": ("FullResidual", "FFNOnly", "Help250"),
    "residual_10m_cpu": ("FullResidual", "FFNOnly", "Help250"),
    "help_10m_cpu": ("Help250b6", "Help250b8"),
}


def at_start(config, arm, seed, w):
    """What is said of the model of this arm and seed before its first step."""
    model = train.first_model(config, arm, seed)
    model.at_step(0)
    seen = look(model, w)
    return np.mean(seen["own_attention"]), seen["spread"][-1], seen["own_token"][-1]


def main(argv):
    torch.set_num_threads(1)
    rows = []
    for name, arms in ARMS.items():
        config = train.read_config(str(HERE.parent / f"config/{name}.py"), {})
        config.device = "cpu"
        _, val, meta = prepare.load(Path("data") / config.dataset)
        config.vocab_size = meta["vocab_size"]
        w = torch.as_tensor(np.array(prepare.windows(val, config.block_size)[: 4096 // config.block_size], np.int64))
        for arm in arms:
            means = np.mean([at_start(config, arm, seed, w) for seed in config.seeds], axis=0)
            values = dict(zip(("own_attention", "spread", "own_token"), means, strict=True))
            row = {"experiment": name, "arm": arm, "n_layer": config.n_layer, "block_size": config.block_size}
            rows.append(row | {k: f"{v:.3g}" for k, v in values.items()})
            print(rows[-1])
    write_csv(HERE / "help_10m_cpu/start.csv", rows)


if __name__ == "__main__":
    cli(main)
