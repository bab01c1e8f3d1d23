"""
How much of the heads' output lies along what xsa_1m removes, in each arm's trained models.

    python results/energy.py out/xsa_1m           of the runs whose checkpoints are there; writes energy.csv there

Share: the sum of (y.v)^2 / |v|^2 over the sum of |y|^2, y a head's output before removal and v its own value, over
heads, positions i >= 1 and 64 validation windows, by layer; `own` is the mean over layers. The arms self, matched and
shrink lose just that share (the column `matched` checks it along the direction removed there); baseline and NoDiag
lose none.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import normalize

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import prepare  # noqa: E402
from configurator import UserError, cli, read_json  # noqa: E402
from model import GPT, matched_direction  # noqa: E402
from report import write_csv  # noqa: E402


def shares(model, w):
    """Share of the output energy along the own value (L,), and along what `matched` removes (L,) or None."""
    own, matched = [], []

    def tap(layer, y, v):  # (B, H, T, D), (B, H, T, D)
        a, b = y[:, :, 1:].double(), v[:, :, 1:].double()
        total = a.square().sum()
        own.append(float((a * normalize(b, dim=-1)).sum(-1).square().sum() / total))
        if model.config.removal == "matched":
            d = matched_direction(a, b, b @ model.h[layer].attn.rotations.double())
            matched.append(float(((a * d).sum(-1).square() / d.square().sum(-1)).sum() / total))
        return y

    model.tap = tap
    with torch.no_grad():
        model(w[:, :-1])
    return own, matched or None


def main(argv):
    if len(argv) != 1:
        raise UserError("name the folder with the checkpoints, such as out/xsa_1m")
    out, rows = Path(argv[0]), []
    plan = read_json(out / "plan.json", "arms", "seeds", "config")
    _, val, _ = prepare.load(Path("data") / plan["config"]["dataset"])
    w = torch.as_tensor(np.array(prepare.windows(val, plan["config"]["block_size"])[:64], np.int64))  # (64, T + 1)
    for arm in plan["arms"]:
        for seed in plan["seeds"]:
            if not (out / arm / f"seed{seed}" / "ckpt.pt").exists():
                continue
            own, matched = shares(GPT.from_checkpoint(out / arm / f"seed{seed}"), w)
            row = {"arm": arm, "seed": seed, "own": np.mean(own)} | {f"layer{i}": x for i, x in enumerate(own)}
            rows.append(row | {"matched": matched and np.mean(matched)})
        share = [r["own"] for r in rows if r["arm"] == arm]
        if share:
            print(f"{arm:16} own {np.mean(share):.3f}, {min(share):.3f} to {max(share):.3f} over {len(share)} seeds")
    if not rows:
        raise UserError(f"{out}: no checkpoint of a planned run is there")
    write_csv(out / "energy.csv", rows)


if __name__ == "__main__":
    cli(main)
