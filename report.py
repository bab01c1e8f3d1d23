"""
Numbers -> what a reader sees: report.md, heads.md, tables, figures.

Nothing is computed here that a JSON file does not hold. All losses are nats per token; null is "not defined".

report.json
    status, deviations      confirmatory only if nothing deviates from the plan; a sentence for each deviation
    plan_sha256             of the file plan.json, to be compared with the committed one
    look                    the number of seeds of the planned look that is reported; null without looks
    rules                   of the decision, as this report applied them
    pairing                 what matching bought: mean correlation of the two sides over seeds, r with ci95
    references              losses of counts on the training text: unigram, bigram
    arms                    n finished, n_finite, mean, sd, min, max, best_mean over seeds; seeds: the loss of each;
                            settings of the arm, parameters, seconds (median of a run), sample (text by its first run)
    contrasts               a, b (first minus second; an interaction has pairs), chosen (arms of families), all that
                            `paired` in analyze.py returns, differences by seed, family (their number), p_holm, verdict,
                            sentence, within_margin, predicted, ci_predicted, as_predicted, se_seed and se_text
                            (standard errors over seeds and over blocks of text); contrasts.csv has the same in rows
    edges                   arms that were chosen at the edge of their grid
    audit                   checked, max_abs_diff (of a window), max_abs_diff_path, failed runs, runs: digest of each
"""

import csv
import math
import os
import re
import textwrap
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from configurator import whole_file

# ---------------------------------------------------------------------------------------------------------------------
# numbers and tables


def number(x, spec=".4f"):
    return "–" if x is None else format(x, spec)


def between(ci, spec="+.2f"):
    return "" if ci is None else f" [{ci[0]:{spec}}, {ci[1]:{spec}}]"


def reliability(summary, k):
    """A correlation between halves of the text, r_stat or r_delta, and what the whole text would reach."""
    return f"{number(summary[k], '.3f')} (Spearman-Brown {number(summary[k + '_spearman_brown'], '.3f')})"


def table(head, rows):
    """A Markdown table whose columns line up in a terminal too."""
    cells = [head, *rows]
    widths = [max(len(str(row[i])) for row in cells) for i in range(len(head))]
    lines = ["| " + " | ".join(str(c).ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


def write_csv(path, rows):
    with whole_file(path) as f:
        writer = csv.DictWriter(f, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)  # None becomes an empty field


COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito
STYLES, MARKERS = ("-", "--", ":", "-."), ("o", "s", "^", "D")


def p_value(p):
    return "–" if p is None else "< 0.0001" if p < 1e-4 else f"{p:.3g}"


def side_name(side):
    """A side of a contrast: an arm, a family of arms, a reference, or a pair of arms."""
    return side if isinstance(side, str) else f"({side[0]} − {side[1]})"


def literal(text):
    """Text that matplotlib draws as it is written, no formula."""
    return text.replace("$", r"\$")


def legend(axis):
    """
    A legend of all that has a label, drawn as it is written; matplotlib leaves out names that begin with _.

    Beside the lines where they leave room for it, below the axis if there are more than four.
    """
    handles, labels = [], []
    for artist in [*axis.lines, *axis.collections]:
        if (name := artist.get_gid()) is not None:
            handles.append(artist)
            labels.append(name)
    where = {"loc": "upper left", "bbox_to_anchor": (0, -0.16), "ncols": 3} if len(labels) > 4 else {}
    box = axis.legend(handles, range(len(labels)), frameon=False, fontsize=8, **where)
    for text, name in zip(box.get_texts(), labels, strict=True):
        text.set_text(literal(textwrap.fill(name, 40)))


def save_figure(fig, path, title):
    fig.suptitle(title, fontsize=11)
    for axis in fig.axes:
        axis.title.set_size(10)
    with whole_file(path, "wb") as f:
        fig.savefig(f, dpi=150, format="png", metadata={"Software": None})


# ---------------------------------------------------------------------------------------------------------------------
# experiments


def prediction(c):
    if c["predicted"] is None:
        return "–"
    low, high = c["predicted"]
    ends = f"< {high:g}" if low is None else f"> {low:g}" if high is None else f"{low:g} .. {high:g}"
    came = {True: "as predicted", False: "not", None: "undecided"}[c["as_predicted"]]
    return f"{ends}: {came if c['ci_predicted'] else 'not computed'}"


def contrast_rows(contrasts):
    """A flat row for each contrast, for contrasts.csv."""
    rows = []
    for c in contrasts:
        row = {"a": side_name(c["a"]), "b": side_name(c["b"])}
        for k, v in c.items():
            if k.startswith("ci") or k == "predicted":
                row |= {f"{k}_low": v and v[0], f"{k}_high": v and v[1]}
            elif k not in ("a", "b"):
                row[k] = " ".join(v) if isinstance(v, list) else v
        rows.append(row)
    return rows


def contrast_table(contrasts, alpha, margin):
    """What stands behind the sentences, as Markdown; contrasts.csv has the rest."""
    foretold = any(c["predicted"] for c in contrasts)
    rows = [[
        f"{side_name(c['a'])} − {side_name(c['b'])}",
        c["n"],
        number(c["mean"], "+.4f"),
        between(c["ci95"], "+.4f").strip() or "–",
        between(c["ci_equivalence"], "+.4f").strip() or "–",
        p_value(c["p"]),
        p_value(c["p_holm"]),
        "–" if c["p_signflip"] is None else f"{p_value(c['p_signflip'])} (≥ {c['p_signflip_min']:.2g})",
        c["verdict"] or "not computed",
        *[prediction(c)] * foretold,
    ] for c in contrasts]  # fmt: skip
    head = ["contrast", "n", "mean", "ci95", "ci_equivalence", "p", f"p_holm (of {len(contrasts)})", "p_signflip"]
    level = f"{alpha:g} / {len(contrasts)}"
    return (
        table([*head, "verdict", *["predicted"] * foretold], rows)
        + f"\n\nhigher or lower: p_holm < {alpha:g}. equivalent, as predicted: one-sided tests at {level} each, that is"
        f" ci_equivalence within ± {margin:g}, or within what was predicted. contrasts.csv has all numbers."
    )


def markdown(report, plan, name):
    """report.json and the plan -> report.md: the answer, then what it rests on."""
    c, seeds = plan["config"], len(next(iter(report["arms"].values()))["seeds"])
    parts = [f"# {name}: {report['status']}"]
    parts.append("\n".join(f"- {x['sentence']}" for x in report["contrasts"]) or "No contrast was planned.")
    if report["edges"]:
        parts.append(" ".join(report["edges"]))
    if report["deviations"]:
        parts.append("Why it is exploratory:\n\n" + "\n".join(f"- {d}" for d in report["deviations"]))
    look = f" This is the look at {report['look']} of {len(plan['seeds'])} seeds." if report["look"] else ""
    parts.append(
        f"{len(plan['arms'])} arms × {seeds} seeds, {c['n_layer']} layers, {c['n_head']} heads, width {c['n_embd']},"
        f" context {c['block_size']}, {c['max_iters']:,} steps of {c['batch_size']} sequences on {c['dataset']};"
        f" {plan['data']['windows']:,} validation windows ({plan['data']['dropped_targets']} targets in a last partial"
        f" window are dropped). Losses in nats per token.{look} Plan {report['plan_sha256'][:12]}."
    )
    if report["contrasts"]:
        alpha = plan["alpha"] / len(plan.get("looks") or [1])
        parts.append("![Each planned contrast: mean, 95% interval, a dot per seed, margin](contrasts.png)")
        parts.append("Planned contrasts, first minus second, over matched seeds:")
        parts.append(contrast_table(report["contrasts"], alpha, plan["margin"]))
    parts.append("![Losses of every run, and differences over the steps of training](report.png)")
    rows = []
    for arm, a in report["arms"].items():
        n = f"{a['n']}" if a["n"] == a["n_finite"] else f"{a['n']} ({a['n'] - a['n_finite']} diverged)"
        sets = ", ".join(f"{k}={v:.12g}" if isinstance(v, float) else f"{k}={v}" for k, v in a["settings"].items())
        rows.append([arm, n, *(number(a[k]) for k in ("mean", "sd", "min", "max", "best_mean")), sets or "–"])
        rows[-1] += [number(a["parameters"], ",d"), number(a["seconds"], ",.0f")]
    rows += [[k, "", number(v), *[""] * 7] for k, v in report["references"].items() if v is not None]
    head = ["arm", "n", "mean", "sd", "min", "max", "best_mean", "settings", "parameters", "seconds"]
    parts.append(
        table(head, rows) + "\n\nbest_mean: of the lowest losses during training. seconds: of a run, the median."
    )
    if any(a["sample"] for a in report["arms"].values()):
        parts.append("What each arm's first run writes, all from one random stream:")
        samples = {arm: " ".join((a["sample"] or "–").split()).replace("`", " ") for arm, a in report["arms"].items()}
        parts.append("\n".join(f"- {arm}: `{text}`" for arm, text in samples.items()))
    if p := report["pairing"]:
        parts.append(
            f"Matched seeds: the two sides of a contrast correlate by {p['r']:.2f}{between(p['ci95'])} over seeds."
        )
    a = report["audit"]
    if a["checked"]:
        carried = f" ({a['carried_over']} by an earlier report)" if a["carried_over"] else ""
        parts.append(
            f"Audit: {a['checked']} of {sum(v['n_finite'] for v in report['arms'].values())} finished runs measured"
            f" again{carried}, {len(a['failed'])} failed; largest difference {number(a['max_abs_diff'], '.1e')} in a"
            f" window, {number(a['max_abs_diff_path'], '.1e')} on the training path."
        )
    else:
        parts.append("Audit: no checkpoint of a finished run is here, so none was measured again.")
    return "\n\n".join(parts) + "\n"


def arm_styles(arms):
    """
    A colour for each arm, by its place in the plan; A+x and A@x share the colour of A, in another line style.

    The arms that several of our experiments share come first, so that each has one colour in all of them.
    """
    split = {arm: arm.replace("@", "+").partition("+") for arm in arms}
    bases, ends = (list(dict.fromkeys(parts[i] for parts in split.values())) for i in (0, 2))
    shared = ["FullResidual", "AttnOnly", "FFNOnly", "NoResidual", "Help250"]
    if set(bases) & set(shared):
        bases = list(dict.fromkeys(shared + bases))
    styles = {}
    for arm in arms:
        i = bases.index(split[arm][0])
        j = ends.index(split[arm][2]) + len(ends) * (i // 7)
        styles[arm] = {"color": COLOURS[i % 7], "linestyle": STYLES[j % 4], "marker": MARKERS[j % 4]}
    return styles


def figure_contrasts(path, contrasts, margin, title):
    """
    A row for each contrast: mean, ci95, a dot per seed, the predicted interval, zero and margin.

    The scale is linear within the margin and logarithmic beyond, so that effects of any size can be read.
    """
    fig = Figure(figsize=(9, 1.6 + 0.55 * len(contrasts)), layout="constrained")
    axis = fig.subplots()
    axis.axvspan(-margin, margin, color="0.9", zorder=0, label=f"margin ± {margin:g}")
    axis.axvline(0, color="0.4", lw=1, zorder=1)
    shown = [x for c in contrasts for x in [*c["differences"].values(), *(c["ci95"] or ())]] + [margin, -margin]
    low, high = min(shown) * (1.6 if min(shown) < 0 else 0.6), max(shown) * 1.6
    for y, c in enumerate(contrasts):
        colour = {"higher": COLOURS[1], "lower": COLOURS[0], "equivalent": COLOURS[2]}.get(c["verdict"], "0.3")
        if c.get("predicted"):
            ends = [edge if x is None else x for x, edge in zip(c["predicted"], (low, high), strict=True)]
            axis.plot(ends, [y + 0.28] * 2, color=COLOURS[3], lw=3, solid_capstyle="butt", label="predicted")
        dots = list(c["differences"].values())
        axis.scatter(dots, [y] * len(dots), 14, color="0.55", zorder=2, label="one seed")
        if c["mean"] is None:
            axis.text(0, y, "not computed", ha="center", va="center", size=8)
            continue
        axis.plot(c["ci95"] or [c["mean"]] * 2, [y - 0.22] * 2, color=colour, lw=3, zorder=3)
        axis.plot(c["mean"], y - 0.22, "|", ms=13, mew=2, color=colour, zorder=3)
        axis.annotate(
            c["verdict"] or "", (1.01, y), xycoords=("axes fraction", "data"), va="center", size=8, color=colour
        )
    names = [f"{side_name(c['a'])} − {side_name(c['b'])}" for c in contrasts]
    axis.set_yticks(range(len(names)), [literal(textwrap.fill(name, 44)) for name in names], size=8)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.set_xscale("symlog", linthresh=margin, linscale=1.0)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlim(low, high)
    axis.set_xlabel("first minus second (nats per token), with its 95% interval; linear within the margin, log beyond")
    axis.spines[["top", "right"]].set_visible(False)
    axis.plot([], [], "|-", ms=13, mew=2, lw=3, color="0.3", label="mean, 95% interval")
    handles, labels = axis.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    fig.legend(once.values(), once.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    save_figure(fig, path, title)


def draw_curves(axis, plan, runs, styles):
    """Validation loss over the steps of training, a line for each run."""
    arms = list(plan["arms"])
    for (arm, _), run in runs.items():
        history = [(i, v) for i, v in (run["val_history"] if run else ()) if v is not None]
        line = {k: styles[arm][k] for k in ("color", "linestyle")}
        # an arm that covers another leaves its rim to be seen
        line["linewidth"] = max(1.2, 3.0 - 0.6 * arms.index(arm))
        axis.plot(*(zip(*history, strict=True) if history else ([], [])), **line)
    axis.set(title="every run", xlabel="training step", ylabel="validation loss (nats per token)")


def draw_ends(axis, report, styles):
    """Final losses by arm, with the runs of a seed joined."""
    arms = list(report["arms"])
    for i, arm in enumerate(arms):
        a = report["arms"][arm]
        values = [v for v in a["seeds"].values() if v is not None]
        axis.scatter([i] * len(values), values, 26, zorder=2, color=styles[arm]["color"], marker=styles[arm]["marker"])
        if lost := a["n"] - a["n_finite"]:
            axis.text(i, 1, f"{lost} diverged", transform=axis.get_xaxis_transform(), ha="center", va="top", size=8)
    for seed in report["arms"][arms[0]]["seeds"]:
        losses = [report["arms"][arm]["seeds"][seed] for arm in arms]
        axis.plot(range(len(arms)), [math.nan if v is None else v for v in losses], color="0.7", lw=0.8, zorder=1)
    few = len(arms) <= 4 and max(map(len, arms)) <= 16
    names = [literal(textwrap.fill(arm, 24)) for arm in arms]
    axis.set_xticks(range(len(arms)), names, rotation=0 if few else 35, ha="center" if few else "right", size=8)
    axis.set_xlim(-0.5, len(arms) - 0.5)
    axis.set(title="final loss, a line joins the runs of one seed", ylabel="final validation loss (nats per token)")


def draw_differences(axis, report, runs):
    """The paired difference of each contrast between arms over the steps of training, with its 95% interval."""
    for k, c in enumerate(c for c in report["contrasts"] if isinstance(c["a"], str) and c["n"] > 1):
        arms = c["chosen"] or [c["a"], c["b"]]
        if arms[1] not in report["arms"]:
            continue
        curves = [[dict(runs[arm, int(seed)]["val_history"]) for seed in c["differences"]] for arm in arms]
        steps = sorted(set.intersection(*(set(h) for side in curves for h in side)))
        d = np.array([[x[i] - y[i] for i in steps] for x, y in zip(*curves, strict=True)])  # (seeds, steps)
        half = stats.t.ppf(0.975, len(d) - 1) * d.std(0, ddof=1) / math.sqrt(len(d))
        colour = COLOURS[k % 7]
        axis.plot(steps, d.mean(0), STYLES[k // 7 % 4], color=colour, marker=".", gid=f"{arms[0]} − {arms[1]}")
        axis.fill_between(steps, d.mean(0) - half, d.mean(0) + half, color=colour, alpha=0.2, lw=0)
    axis.axhline(0, color="0.4", lw=1)
    axis.set_yscale("symlog", linthresh=report["margin"])
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set(title="paired differences between arms, 95% interval", xlabel="training step")
    axis.set_ylabel("first minus second (nats); log beyond the margin")
    legend(axis)


def doses(plan):
    """
    Arms that are alike but for one number -> {name: {rest: [(value, arm), ...]}}, with three values or more.

    min_lr goes with learning_rate. True and False are no numbers.
    """
    found = {}
    numbers = {k for flags in plan["arms"].values() for k, v in flags.items() if type(v) in (int, float)} - {"min_lr"}
    for name in sorted(numbers):
        groups = {}
        for arm, flags in plan["arms"].items():
            value = flags.get(name, plan["config"].get(name))
            with_it = {name, "min_lr"} if name == "learning_rate" else {name}
            rest = tuple(sorted((k, str(v)) for k, v in flags.items() if k not in with_it))
            if type(value) in (int, float):
                groups.setdefault(rest, []).append((value, arm))
        lines = {rest: sorted(line) for rest, line in groups.items() if len({v for v, _ in line}) > 2}
        if lines:
            found[name] = lines
    return found


def draw_doses(axis, report, name, lines):
    """The loss against the one number in which arms differ, a line for each rest."""
    for k, line in enumerate(lines.values()):
        arms = [arm for _, arm in line]
        shared = os.path.commonprefix(arms)  # A@1e-3, A@3e-3: A
        label = shared.partition("@")[0] if "@" in shared else re.sub(r"[+_=.\d-]*$", "", shared) or arms[0]
        means = [report["arms"][arm]["mean"] for arm in arms]
        style = {"color": arm_styles(report["arms"])[arms[0]]["color"], "marker": MARKERS[k % 4]}
        axis.plot([v for v, _ in line], [math.nan if m is None else m for m in means], gid=label, **style)
        for value, arm in line:
            seeds = [v for v in report["arms"][arm]["seeds"].values() if v is not None]
            axis.scatter([value] * len(seeds), seeds, 10, color=style["color"], alpha=0.5)
    values = [v for line in lines.values() for v, _ in line]
    if min(values) > 0 and max(values) >= 10 * min(values):
        axis.set_xscale("log")
        axis.xaxis.set_minor_formatter("")
    axis.set(title=f"final loss against {name}", xlabel=name, ylabel="final validation loss (nats per token)")
    legend(axis)


def draw_references(axis, references):
    """A line for each reference that lies between the axis' limits, its name beside it."""
    low, high = axis.get_ylim()
    for name, value in references.items():
        if value is not None and low < value < high:
            axis.axhline(value, color="0.35", lw=1, ls=(0, (6, 3)), zorder=0)
            place = (1, value)  # the right end of the line
            axis.annotate(name, place, (3, 0), axis.get_yaxis_transform(), "offset points", va="center", size=8)
    axis.set_ylim(low, high)


def figure_runs(path, report, plan, runs):
    """Curves, final losses, paired differences over the steps, and the loss against a number where one was varied."""
    arms, styles = list(plan["arms"]), arm_styles(plan["arms"])
    panels = [lambda axis: draw_curves(axis, plan, runs, styles), lambda axis: draw_ends(axis, report, styles)]
    if any(isinstance(c["a"], str) and c["n"] > 1 and c["b"] not in report["references"] for c in report["contrasts"]):
        panels.append(lambda axis: draw_differences(axis, report, runs))
    for name, lines in doses(plan).items():
        panels.append(lambda axis, name=name, lines=lines: draw_doses(axis, report, name, lines))
    rows = math.ceil(len(panels) / 2)
    fig = Figure(figsize=(11 if len(arms) <= 4 else 11 + 0.25 * len(arms), 4.6 * rows), layout="constrained")
    grid, axes = fig.add_gridspec(rows, 2), []
    for i, draw in enumerate(panels):
        alone = i == len(panels) - 1 and i % 2 == 0  # the last of an odd number has a row
        axes.append(fig.add_subplot(grid[i // 2, :] if alone else grid[i // 2, i % 2]))
        draw(axes[i])
        axes[i].spines[["top", "right"]].set_visible(False)
    for axis in axes:
        if "validation loss" in axis.get_ylabel():
            draw_references(axis, plan["references"])
    for arm in arms:
        axes[0].plot([], [], color=styles[arm]["color"], linestyle=styles[arm]["linestyle"], gid=arm)
    legend(axes[0])
    save_figure(fig, path, literal(f"{Path(plan['config']['out_dir']).name}: {report['status']}"))


# ---------------------------------------------------------------------------------------------------------------------
# heads

PREDICTORS = {"stat": "own", "null": "null", "own_minus_null": "own − null"}


def heads_sentences(report):
    """One sentence for each check, as Markdown."""
    s, text = report["summary"], f"{report['windows']:,} windows, {report['tokens']:,} tokens"
    lines = [f"Noise floor: other text of this length ranks the heads alike by own with r {number(s['r_stat'], '.3f')}"]
    lines[0] += f", by delta with r {number(s['r_delta'], '.3f')}" * (s["r_delta"] is not None) + f" ({text})."
    gap = f"{number(s['own_minus_null'], '+.3f')}{between(s['own_minus_null_ci95'], '+.3f')}"
    shared = f"{number(s['explained'], '.0%')} of own is" if s["explained"] is not None else "own is near 0; it is"
    lines.append(f"Null: {shared} shared with earlier positions; what is left, own − null, is {gap}.")
    if report["delta_all"] is None:
        lines.append("What removal costs was not measured (--interventions).")
    else:
        cost = f"{number(report['delta_all'], '+.4f')} nats in all heads at once, {number(s['delta'], '+.5f')} in one"
        foretold = f"r {number(s['r_stat_delta'], '.2f')} between own and that on other text"
        worth = f" (setting it to zero: {number(s['delta_zero'], '+.5f')})" * (s["delta_zero"] is not None)
        lines.append(
            f"Effect: removing the own value, at all positions but the first, costs {cost}{worth}; {foretold}."
        )
    return "\n".join(f"- {line}" for line in lines)


def markdown_heads(report):
    """heads.json -> heads.md: the numbers, and what each says."""
    summary, effects = report["summary"], report["delta_all"] is not None
    gap = f"{number(summary['own_minus_null'], '+.3f')}{between(summary['own_minus_null_ci95'], '+.3f')}"
    rows = [
        ["own", number(summary["own"], "+.3f"), "cosine of a head's output with its own value"],
        ["null", number(summary["null"], "+.3f"), "cosine with values of earlier positions"],
        ["own − null", gap, "what is left for the own value, with 95% over windows"],
        ["explained", number(summary["explained"], ".1%"), "null / own (– where own is near 0; above 100%: null wins)"],
    ]
    if summary["across"] is not None:
        gap = f"{number(summary['across'], '+.3f')} − {number(summary['across_null'], '+.3f')}"
        rows.append(["across − across_null", gap, "own − null with the values of the other groups"])
    if effects:
        cost = number(report["delta_all"], "+.4f")
        rows.append(["delta_all", cost, "nats lost by removing the own value in all heads at once"])
        rows.append(["delta", number(summary["delta"], "+.5f"), "the same in one head, mean over heads"])
    if summary["delta_zero"] is not None:
        rows.append(
            ["delta_zero", number(summary["delta_zero"], "+.5f"), "by setting one head to zero, mean over heads"]
        )
    rows.append(["r_stat", reliability(summary, "r_stat"), "would other text rank the heads alike by own?"])
    if effects:
        rows.append(["r_delta", reliability(summary, "r_delta"), "and by delta, what removal in one head loses?"])
        for k, name in PREDICTORS.items():
            r, rho = (number(summary[f"r_{k}_delta{end}"], ".3f") for end in ("", "_spearman"))
            ceiling = f", ceiling {number(summary['r_stat_delta_ceiling'], '.3f')}" * (k == "stat")
            rows.append([f"r_{k}_delta", r, f"does {name} foretell delta on other text? Spearman {rho}{ceiling}"])
    groups = f" in {report['n_kv_head']} key-value groups" * (report["n_kv_head"] != report["n_head"])
    weights = f" (from {report['weights']})" if report["weights"] else ""
    lines = [
        f"# {report['model']}: heads",
        heads_sentences(report),
        f"{report['n_layer']} layers × {report['n_head']} heads{groups}, {report['parameters']:,} parameters,"
        f" {report['dtype']}{weights}; {report['windows']:,} windows of {report['window_length']:,} tokens of"
        f" {report['text']}, {'with' if report['bos'] else 'without'} a beginning-of-text token in front. Loss of the"
        f" untouched model: {number(report['loss'])} nats per token.",
        table(["measure", "value", "meaning"], rows),
        f"Each r is over {report['n_layer'] * report['n_head']} heads, between even and odd ones of"
        f" {report['windows']:,} windows, {report['tokens']:,} tokens: it grows with the text. Spearman-Brown is what"
        " all of them together would reach. All of it is about other text, and not about other heads or models.",
    ]
    if not effects:
        lines.append("What removal does to the loss was not measured: --interventions.")
    if report["removal"] != "none":
        zero = ": every delta is zero by construction" * (report["removal"] == "self")
        lines.append(
            f"The model itself removes a direction ({report['removal']}) after the place of measurement{zero}."
        )
    if not report["routing"]:
        lines.append("Its positions see themselves only; null is over all earlier positions, though none is seen.")
    return "\n\n".join(lines) + "\n"


def figure_map(path, report, own, null):
    """Layer x head maps of own, null and own - null (L, H) on one colour scale."""
    L, H = own.shape
    maps = {"own": own, "null": null, "own − null": own - null}
    fig = Figure(figsize=(5 + min(9, 1.5 + H / 4), 2 + min(6.5, 0.7 + L / 6)), layout="constrained")
    axes = fig.subplots(1, 3, sharey=True)
    limit = max(np.abs(a).max() for a in maps.values()) or 1.0
    for axis, (name, a) in zip(axes, maps.items(), strict=True):
        image = axis.imshow(a, cmap="PuOr_r", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
        axis.set(title=f"{name}, mean {a.mean():+.3f}", xlabel="head")
        axis.set_xticks(range(0, H, math.ceil(H / 12)))
        axis.set_yticks(range(0, L, math.ceil(L / 12)))
    axes[0].set_ylabel("layer")
    fig.colorbar(image, ax=axes, label="cosine", fraction=0.05)
    save_figure(fig, path, report["model"])


def figure_scatter(path, report, panels):
    """Heads as points, coloured by layer. panels: [(x, y, title, x label, y label, standard error of y or None)]."""
    L, H = report["n_layer"], report["n_head"]
    fig = Figure(figsize=(1.2 + 4.6 * len(panels), 4.6), layout="constrained")
    axes = fig.subplots(1, len(panels), squeeze=False)[0]
    for axis, (x, y, title, xlabel, ylabel, se) in zip(axes, panels, strict=True):
        size = 22 if L * H < 400 else 8
        marks = axis.scatter(x, y, size, np.repeat(np.arange(L), H), cmap="cividis", linewidths=0, zorder=2)
        axis.locator_params(nbins=6)
        if se is None:
            axis.set(xlim=axis.get_xlim(), ylim=axis.get_ylim())  # the line where both are equal may lie outside
            axis.axline((0, 0), slope=1, color="0.6", lw=1, zorder=1)
        else:
            axis.errorbar(x, y, se, fmt="none", ecolor="0.75", elinewidth=0.8, zorder=1)
            axis.axhline(0, color="0.6", lw=1, zorder=0)
        axis.set(title=title, xlabel=xlabel, ylabel=ylabel)
        axis.spines[["top", "right"]].set_visible(False)
    fig.colorbar(marks, ax=axes, label="layer", ticks=range(0, L, math.ceil(L / 12)))
    save_figure(fig, path, f"{report['model']}: {report['windows']:,} windows, {report['tokens']:,} tokens")


def figures_heads(out, report, measures):
    """heads_map.png, heads_null.png, heads_halves.png (two windows or more), heads_delta.png (with interventions)."""
    for old in out.glob("heads_*.png"):  # of an earlier measurement, which may have had more
        old.unlink()
    summary, names = report["summary"], ("own", "null", "across", "delta", "delta_zero")
    means = {k: measures[k].mean(0) for k in names}  # (L, H)
    figure_map(out / "heads_map.png", report, means["own"], means["null"])
    own, null, across, delta, zero = (a.ravel() for a in means.values())
    title = "own against null; on the line both are equal"
    panels = [(null, own, title, "null (cosine, earlier values)", "own (cosine)", None)]
    if summary["across"] is not None:
        title = "own group against the others"
        panels.append((across, own, title, "across (cosine, other groups)", "own (cosine)", None))
    figure_scatter(out / "heads_null.png", report, panels)
    effects = np.isfinite(delta).all()
    if effects:
        se = np.array([h["delta_se"] or 0.0 for h in report["heads"]])
        title = f"removing the own value; r across halves {number(summary['r_stat_delta'], '.2f')}"
        panel = (own, delta, title, "own (cosine)", "delta, loss added (nats per token, ± se)", se)
        worth = (zero, delta, "what the whole head is worth", "delta_zero (nats), head set to zero", panel[4], se)
        figure_scatter(out / "heads_delta.png", report, [panel, worth] if np.isfinite(zero).all() else [panel])
    if report["windows"] > 1:
        panels = []
        for k, r_k, name in (("own", "r_stat", "own (cosine)"), ("delta", "r_delta", "delta (nats)"))[: 1 + effects]:
            even, odd = (measures[k][i::2].mean(0).ravel() for i in (0, 1))
            title = f"{r_k} {reliability(summary, r_k)}"
            panels.append((even, odd, title, f"{name}, even windows", f"{name}, odd windows", None))
        figure_scatter(out / "heads_halves.png", report, panels)
