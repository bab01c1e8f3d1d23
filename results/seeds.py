"""
How many seeds? How often fewer than the 16 of xsa_1m say what all of them say.

    python results/seeds.py [results/xsa_1m]

For each planned contrast and n seeds, 500 draws of n of the 16 without replacement. Paired: the n seeds of both sides,
judged as the report does. Unpaired: n seeds for each side, drawn apart, so that some may be on both, and Welch's test;
interactions are left out there. Counted are draws that give the sign of the mean, and those that give the verdict, that
the report of all 16 gives. Where that verdict is undecided, few seeds agree for want of power. Draws of 8 or 12 of 16
overlap much, so their shares are higher than those of fresh seeds would be. Writes seeds.csv and seeds.png.
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from curves import losses  # noqa: E402

from analyze import decide, paired, welch  # noqa: E402
from configurator import cli, read_json  # noqa: E402
from report import COLOURS, STYLES, number, save_figure, side_name, write_csv  # noqa: E402

SIZES, DRAWS = (1, 2, 3, 5, 8, 12), 500


def judged(comparisons, contrasts, plan):
    """Adds what the report would say of one draw -> [(sign, verdict), ...]."""
    for c, (a, b) in zip(comparisons, contrasts, strict=True):
        c |= {"a": a, "b": b, "predicted": None}
    decide(comparisons, plan["alpha"], plan["margin"])
    return [(np.sign(c["mean"]), c["verdict"]) for c in comparisons]


def drawn(final, contrasts, plan, n, rng, matched):
    """One draw of n seeds -> what judged() says of it. final: {arm: (seeds,)}."""
    seeds, m, comparisons = plan["seeds"], len(contrasts), []
    i = rng.choice(len(seeds), n, replace=False)
    other = i if matched else rng.choice(len(seeds), n, replace=False)
    for a, b in contrasts:
        if isinstance(a, list):
            x, y = final[a[0]][i] - final[a[1]][i], final[b[0]][i] - final[b[1]][i]
        else:
            x, y = final[a][i], final[b][other]
        test = paired if matched else welch
        comparisons.append(test(x, y, plan["margin"], plan["alpha"], m))
    return judged(comparisons, contrasts, plan)


def draw(rows, names, path):
    fig = Figure(figsize=(11, 4.8), layout="constrained")
    for axis, what in zip(fig.subplots(1, 2, sharey=True), ("sign", "verdict"), strict=True):
        for k, name in enumerate(names):
            for how, style in (("paired", STYLES[0]), ("unpaired", STYLES[2])):
                line = [r for r in rows if r["contrast"] == name and r["how"] == how and r[what] is not None]
                if line:
                    x, y = [r["n"] for r in line], [r[what] for r in line]
                    axis.plot(x, y, style, color=COLOURS[k % 7], marker=".", label=name if how == "paired" else None)
        axis.set(title=f"same {what} as all 16 seeds", xlabel="seeds", xticks=SIZES, ylim=(0, 1.02))
        axis.spines[["top", "right"]].set_visible(False)
    fig.axes[0].set_ylabel("share of draws")
    handles, labels = fig.axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    save_figure(fig, path, "How many seeds? Solid: paired, dotted: unpaired")


def main(argv):
    out = Path(argv[0]) if argv else HERE / "xsa_1m"
    plan = read_json(out / "plan.json", "arms", "seeds", "contrasts")
    final = {a: losses(out, a, plan["seeds"])[1][-1] for a in plan["arms"]}
    contrasts, rng, rows = [c[:2] for c in plan["contrasts"]], np.random.default_rng(0), []
    whole = drawn(final, contrasts, plan, len(plan["seeds"]), rng, True)
    names = [f"{side_name(a)} − {side_name(b)}: {v}" for (a, b), (_, v) in zip(contrasts, whole, strict=True)]
    for n in SIZES:
        for matched in (True, False):
            asked = [k for k, (a, _) in enumerate(contrasts) if matched or isinstance(a, str)]
            draws = [drawn(final, [contrasts[k] for k in asked], plan, n, rng, matched) for _ in range(DRAWS)]
            for i, k in enumerate(asked):
                sign, verdict = (float(np.mean([d[i][j] == whole[k][j] for d in draws])) for j in (0, 1))
                row = {"contrast": names[k], "all": whole[k][1], "n": n, "how": "paired" if matched else "unpaired"}
                rows.append(row | {"sign": sign, "verdict": verdict if n > 1 else None})
    write_csv(out / "seeds.csv", rows)
    draw(rows, names, out / "seeds.png")
    for r in rows:
        print(f"{r['contrast']:60} {r['n']:3} {r['how']:9} sign {r['sign']:.2f} verdict {number(r['verdict'], '.2f')}")


if __name__ == "__main__":
    cli(main)
