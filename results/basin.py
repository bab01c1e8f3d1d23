"""
The picture of basin_1m: validation loss over the steps of training, an arm a panel, the help shaded.

    python results/basin.py                  from the logs in results/basin_1m; writes basin.png and help.png there
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from curves import losses  # noqa: E402

from configurator import cli, read_json  # noqa: E402
from model import at_points  # noqa: E402
from report import arm_styles, save_figure  # noqa: E402

SAID = {  # the four panels of README's figure
    "FullResidual": "both skip paths",
    "FFNOnly": "none around attention",
    "Help250": "none, but helped to step 250",
    "Late250": "none, the same help from step 500 on",
}


def draw(plan, arms, titles, columns, path, title):
    rows = -(-len(arms) // columns)
    fig = Figure(figsize=(3.1 * columns, 0.6 + 3.1 * rows), layout="constrained")
    axes = fig.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    styles = arm_styles(plan["arms"])
    steps = np.arange(plan["config"]["max_iters"] + 1)
    for axis, arm in zip(axes.flat, arms, strict=True):
        bias = np.array([at_points(plan["arms"][arm].get("self_bias", 0.0), step) for step in steps])
        if bias.any():
            shade = 1 - 0.2 * bias[None, :] / 4
            axis.imshow(shade, cmap="gray", vmin=0, vmax=1, aspect="auto", extent=(0, steps[-1], 1.7, 4.4), zorder=0)
        style = {name: styles[arm][name] for name in ("color", "linestyle")}
        axis.plot(*losses(HERE / "basin_1m", arm, plan["seeds"]), **style, lw=1)
        for name in ("unigram", "bigram"):
            axis.axhline(plan["references"][name], color="0.35", lw=1, ls=(0, (6, 3)))
            axis.annotate(
                name, (steps[-1], plan["references"][name]), (-2, 3), textcoords="offset points", ha="right", size=8
            )
        axis.set(title=titles.get(arm, arm), xlim=(0, steps[-1]), ylim=(1.7, 4.4), xticks=(0, 1000, 2000))
        axis.spines[["top", "right"]].set_visible(False)
    fig.supxlabel("training step", size=10)
    fig.supylabel("validation loss (nats per token)", size=10)
    save_figure(fig, path, title)


def main(argv):
    plan = read_json(HERE / "basin_1m/plan.json", "arms", "seeds", "references")
    said = f"{len(plan['seeds'])} seeds, a line each; grey: attention to the own position is favoured"
    draw(plan, list(plan["arms"]), {}, 5, HERE / "basin_1m/basin.png", f"basin_1m, {said} (self_bias, darkest at 4)")
    titles = {arm: f"{arm}:\n{words}" for arm, words in SAID.items()}
    draw(plan, list(SAID), titles, 4, HERE / "basin_1m/help.png", said)


if __name__ == "__main__":
    cli(main)
