"""
The picture of rate_1m: final validation loss against the learning rate, a line for each arm.

    python results/rates.py                  from the report in results/rate_1m; writes rates.png there
"""

import sys
from pathlib import Path

from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from configurator import cli, read_json  # noqa: E402
from report import doses, draw_doses, draw_references, save_figure  # noqa: E402


def main(argv):
    out = HERE / "rate_1m"
    plan = read_json(out / "plan.json", "arms", "config", "references", "seeds")
    report = read_json(out / "report.json", "arms")
    fig = Figure(figsize=(7, 4.2), layout="constrained")
    axis = fig.subplots()
    draw_doses(axis, report, "learning_rate", doses(plan)["learning_rate"])
    draw_references(axis, plan["references"])
    rates = {rate: arm.partition("@")[2] for rate, arm in next(iter(doses(plan)["learning_rate"].values()))}
    axis.set(title="", xlabel="learning rate", xticks=list(rates), xticklabels=rates.values())
    axis.minorticks_off()
    axis.get_legend().set(loc="upper left", bbox_to_anchor=(0.02, 0.85))  # clear of every line
    axis.spines[["top", "right"]].set_visible(False)
    save_figure(fig, out / "rates.png", f"rate_1m, {len(plan['seeds'])} seeds: mean, a small dot a seed")


if __name__ == "__main__":
    cli(main)
