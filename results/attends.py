"""
What trained models of basin_1m lose when attention to the own position is taken away, or all other attention.

    python train.py config/basin_1m.py --arms=FullResidual,Help250 --seeds=100 --out_dir=out/attends
    python results/attends.py out/attends

Nothing is trained again after the cut. Losses are over the whole validation split, in nats per token:
- trained: as the run ended.
- others: without attention to the own position (self_bias -30), where there is another.
- own: with attention to the own position alone (routing False).
Writes results/basin_1m/attends.csv.
"""

import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import prepare  # noqa: E402
from configurator import UserError, cli  # noqa: E402
from model import GPT, window_losses  # noqa: E402
from report import write_csv  # noqa: E402

CUTS = {"trained": {}, "others": {"self_bias": -30.0}, "own": {"routing": False}}


def main(argv):
    if len(argv) != 1:
        raise UserError("python results/attends.py OUT: name the folder of the experiment")
    rows = []
    for path in sorted(Path(argv[0]).glob("*/seed*/ckpt.pt")):
        ckpt = torch.load(path, weights_only=True)
        config = ckpt["config"]
        _, val, _ = prepare.load(Path("data") / config["dataset"], config["vocab_size"])
        windows = prepare.windows(val, config["block_size"])
        row = {"arm": ckpt["arm"], "seed": ckpt["seed"]}
        for name, flags in CUTS.items():
            model = GPT.from_checkpoint(ckpt | {"config": config | flags})
            row[name] = f"{float(window_losses(model, windows).mean()):.4f}"
        rows.append(row)
        print(row)
    write_csv(HERE / "basin_1m/attends.csv", rows)


if __name__ == "__main__":
    cli(main)
