"""
The picture of xsa_1m: how far each arm is from its baseline over the steps of training, a panel for each rate.

    python results/curves.py                 from the logs in results/xsa_1m; writes curves.png there

A line is the mean over seeds of an arm's validation loss minus that of the baseline with the same seed and rate, its
band the 95% t interval of that mean. Only the last step is what the report tests.
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from analyze import last_row  # noqa: E402
from configurator import UserError, cli, read_json  # noqa: E402
from report import COLOURS, STYLES, save_figure  # noqa: E402


def losses(out, arm, seeds):
    """steps (N,), validation losses (N, seeds) of an arm's finished runs."""
    rows = [last_row(out / arm / f"seed{seed}") for seed in seeds]
    if not all(row and row["val_loss"] for row in rows):
        raise UserError(f"{out / arm}: a run is missing or diverged, finish it first")
    steps = [step for step, _ in rows[0]["val_history"]]
    return np.array(steps), np.array([[loss for _, loss in row["val_history"]] for row in rows]).T


def main(argv):
    out = Path(argv[0]) if argv else HERE / "xsa_1m"
    plan = read_json(out / "plan.json", "arms", "seeds", "margin")
    rates = list(dict.fromkeys(arm.split("@")[1] for arm in plan["arms"]))
    kinds = list(dict.fromkeys(arm.split("@")[0] for arm in plan["arms"]))
    fig = Figure(figsize=(11, 4.6), layout="constrained")
    for axis, rate in zip(fig.subplots(1, len(rates), sharey=True), rates, strict=True):
        axis.axhspan(-plan["margin"], plan["margin"], color="0.92", zorder=0)
        axis.axhline(0, color="0.4", lw=1)
        steps, baseline = losses(out, f"baseline@{rate}", plan["seeds"])
        for k, kind in list(enumerate(kinds))[1:]:  # the first is the baseline, with its colour in report.png
            d = (losses(out, f"{kind}@{rate}", plan["seeds"])[1] - baseline)[1:]  # (N - 1, seeds): all start alike
            mean, half = d.mean(1), stats.t.ppf(0.975, d.shape[1] - 1) * stats.sem(d, axis=1)
            axis.plot(steps[1:], mean, STYLES[k - 1], color=COLOURS[k], lw=1.8, label=kind)
            axis.fill_between(steps[1:], mean - half, mean + half, color=COLOURS[k], alpha=0.18, lw=0)
        axis.set(title=f"learning rate {rate}", xlabel="training step", xticks=steps[2::2])
        axis.spines[["top", "right"]].set_visible(False)
    fig.axes[0].set_ylabel("validation loss minus baseline's\n(nats per token)")
    handles, labels = fig.axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    title = f"{out.name}, {len(plan['seeds'])} seeds: mean and 95% interval; grey: margin ± {plan['margin']:g}"
    save_figure(fig, out / "curves.png", title)


if __name__ == "__main__":
    cli(main)
