"""
Checkpoints -> a verdict.

    python analyze.py runs OUT      paired statistics, audit and figure of an experiment that train.py made
    python analyze.py heads MODEL... [--data=NAME | --text=FILE] [--windows=64] [--window_length=T] [--interventions]
                                     [--bos] [--dtype=float32] [--out=DIR]

`runs` reads OUT/plan.json and each run's log.jsonl, re-measures every checkpoint that is there, and writes report.json,
report.md and report.png into OUT. All losses are nats per token.

`heads` measures how far each attention head's output points along its own value (own), how far geometry alone would
have it so (null), and with --interventions what removing the own value does to the loss (delta). MODEL is a run folder,
a ckpt.pt, or a transformers model that runs on its attention interface. Writes heads.json, heads.csv, heads.md and
figures into RUN/heads, or out/heads/MODEL; heads.pt beside them holds what is measured, so interrupted work resumes.
Default text: what a run was validated on; of its windows (at most 1,024 tokens long) 64, evenly spaced.

remove_direction (in model.py), paired, holm, causal_null and split_half are plain functions of arrays: copy them.
"""

import hashlib
import json
import math
import os
from pathlib import Path

import numpy as np
import torch
from scipy import special, stats
from tqdm import tqdm

import prepare
from configurator import UserError, cli, parse, read_json, whole_file
from heads import (
    COLOURS,
    HEADS_FLAGS,
    MARKERS,
    STYLES,
    between,
    heads_command,
    load_run,
    number,
    reliability,
    save_figure,
    table,
)
from model import window_losses
from train import PLAN, differences

# ---------------------------------------------------------------------------------------------------------------------
# statistics: arrays in, plain values out


def paired(a, b, margin=None, alpha=0.05, m=1):
    """
    Is the mean of a - b zero? A paired comparison, or a one-sample one where b is a number.

    a: (n,), b: (n,) or a number; pairs by position, None or a non-finite value where there is none. margin: half-width
    within which the two count as equivalent. m: number of planned contrasts, for mde80 at level alpha / m.

    Returns a dict; what is not defined is None, and where there is no t test `reason` says why. Besides, sd_ratio and
    p_pitman_morgan need two arms, and the latter three pairs. Its keys:
    n, mean, sd, dz = mean / sd, t, df, p and the intervals ci95, ci90 (paired t test: differences normal, pairs
    independent), p_signflip (exact sign-flip test of a symmetric difference for n <= 20, else 99,999 seeded flips) and
    p_signflip_min, the least value it can take, ranges_overlap, equivalent (ci90 within the margin, two one-sided
    tests, Schuirmann 1987), sd_ratio = sd(a) / sd(b) with p_pitman_morgan (Pitman 1939, Morgan 1939: equal variances
    of pairs), mde80 (the difference that a test at alpha / m would have found with 80% power).

    A pair that is missing voids the comparison: it is never computed on the rest. Differences that are equal up to
    rounding have no standard error, so no t, p or interval; the sign-flip test needs none and stays.
    """
    one_sample = np.ndim(b) == 0
    a = np.array([np.nan if x is None else x for x in a], dtype=np.float64)
    b = np.full(len(a), b, np.float64) if one_sample else np.array([np.nan if x is None else x for x in b], np.float64)
    if len(a) != len(b):
        raise ValueError(f"a has {len(a)} values and b {len(b)}: they are no pairs")
    names = "mean sd ci95 ci90 t df p p_signflip p_signflip_min dz ranges_overlap equivalent sd_ratio"
    r = {"n": len(a)} | dict.fromkeys(names.split() + ["p_pitman_morgan", "mde80", "reason"])
    missing = np.flatnonzero(~(np.isfinite(a) & np.isfinite(b)))
    if len(a) == 0 or len(missing):
        r["reason"] = f"{len(missing)} of {len(a)} pairs have a missing or non-finite value" if len(a) else "no pairs"
        return r
    n, d = len(a), a - b
    rounding = 8 * np.finfo(float).eps * max(np.abs(a).max(), np.abs(b).max())  # what subtraction can lose
    r["mean"] = float(d.mean())
    r["p_signflip"], r["p_signflip_min"] = signflip(d, rounding)
    r["ranges_overlap"] = bool(a.min() <= b.max() and b.min() <= a.max())
    if n == 1:
        r["reason"] = "one pair has no spread: more seeds are needed"
        return r
    sd, sd_a, sd_b = d.std(ddof=1), a.std(ddof=1), b.std(ddof=1)
    if not one_sample and sd_b > rounding:
        r["sd_ratio"] = float(sd_a / sd_b)
        if n > 2 and sd > rounding and (a + b).std() > rounding:
            r["p_pitman_morgan"] = float(stats.pearsonr(a + b, d).pvalue)
    if sd <= rounding:
        r["sd"], r["reason"] = 0.0, "all differences are equal up to rounding: no standard error, no t test"
        return r
    test = stats.ttest_1samp(d, 0.0)
    r |= {"sd": float(sd), "dz": float(d.mean() / sd), "t": float(test.statistic), "df": n - 1, "p": float(test.pvalue)}
    for name, level in (("ci95", 0.95), ("ci90", 0.90)):
        r[name] = [float(x) for x in test.confidence_interval(level)]
    if margin is not None:
        r["equivalent"] = bool(-margin < r["ci90"][0] and r["ci90"][1] < margin)
    ncp = special.nctdtrinc(n - 1, 0.2, stats.t.ppf(1 - alpha / (2 * m), n - 1))
    r["mde80"] = float(sd * ncp / math.sqrt(n)) if math.isfinite(ncp) else None
    return r


def signflip(d, rounding=0.0):
    """
    Two-sided sign-flip test of differences d (n,) -> (p, the least p that n differences can give).

    The share of sign patterns whose |sum| is at least the observed one; sums that are equal on paper count as ties.
    """
    n = len(d)
    least = abs(d.sum()) - n * rounding - 1e-12 * np.abs(d).sum()  # a sum from here on counts as at least the observed
    if n <= 20:  # all 2**n sums, by doubling
        sums = np.zeros(1)
        for x in d:
            sums = np.concatenate([sums + x, sums - x])
        return float(np.mean(np.abs(sums) >= least)), 2.0 / 2**n
    rng = np.random.default_rng(0)
    hits = sum(np.sum(np.abs(rng.choice([-1.0, 1.0], (11_111, n)) @ d) >= least) for _ in range(9))
    return float((1 + hits) / 100_000), 1 / 100_000


def holm(p):
    """
    Holm's step-down correction (Holm 1979) of p values; None for one that could not be computed.

    A missing p keeps its place in the family, as if it were 1, and stays None.
    """
    full = np.array([1.0 if x is None else x for x in p])
    order = np.argsort(full, kind="stable")
    raised = np.minimum(1.0, np.maximum.accumulate(full[order] * np.arange(len(full), 0, -1)))
    out = np.empty(len(full))
    out[order] = raised
    return [None if x is None else float(y) for x, y in zip(p, out, strict=True)]


def standard_errors(d, block=16):
    """
    Would more seeds help, or more text? d: (seeds, windows) differences -> (se_seed, se_text) of their mean.

    sd / sqrt(n) over seeds with the windows fixed, and over blocks of consecutive windows, which are alike, with the
    seeds fixed. None where there are fewer than two.
    """
    usable = d.shape[1] // block * block
    means = d.mean(1), d[:, :usable].mean(0).reshape(-1, block).mean(1)
    return tuple(float(x.std(ddof=1) / math.sqrt(len(x))) if len(x) > 1 else None for x in means)


# ---------------------------------------------------------------------------------------------------------------------
# runs: from the records of an experiment to its report

WINDOW_TOLERANCE = 1e-5  # float32 sums in another order; a gain that is off by 0.001 moves a loss by more
PATH_TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-3}  # of the training path: compiled and eager round differently
RECORD = ("arm", "seed", "status", "iter", "val_loss", "window_losses", "config", "data", "source", "torch")


def no_number(name):
    raise ValueError(f"{name} is no number")


def last_row(folder):
    """The record that ends a finished run's log.jsonl, or None."""
    try:
        lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line, parse_constant=no_number) for line in lines]
        if strange := [n for n, row in enumerate(rows, 1) if not isinstance(row, dict) or "iter" not in row]:
            raise ValueError(f"line {strange[0]} is no row")
        if not rows or "status" not in rows[-1]:
            return None
        if missing := [k for k in RECORD if k not in rows[-1]]:
            raise ValueError(f"its last row holds no {missing[0]}")
        status, loss, losses = (rows[-1][k] for k in ("status", "val_loss", "window_losses"))
        numbers = isinstance(losses, list) and losses and all(isinstance(x, float) for x in [loss, *losses])
        if not (status == "finished" and numbers or status == "diverged" and loss is losses is None):
            raise ValueError(f"its last row is that of a {status} run and does not hold the losses of one")
    except FileNotFoundError:
        return None
    except ValueError as e:
        again = f"restore it, or delete {folder} and let train.py train this run again"
        raise UserError(f"{folder}/log.jsonl is damaged ({e}): {again}") from None
    return rows[-1] | {"val_history": [[r["iter"], r["val_loss"]] for r in rows if "val_loss" in r]}


def read_runs(out, plan):
    """-> ({(arm, seed): last row, or None for a planned run that is not finished}, deviations from the plan)."""
    runs = {(arm, seed): last_row(out / arm / f"seed{seed}") for arm in plan["arms"] for seed in plan["seeds"]}
    deviations = []
    for note in plan["amendments"]:
        changes = "; ".join(note["changes"])
        deviations.append(f"The plan was amended at {note['time']}: {note['reason']} ({changes}).")
    found = {p.parent for name in ("log.jsonl", "ckpt.pt") for p in out.glob(f"*/*/{name}")}
    planned = {out / arm / f"seed{seed}" for arm, seed in runs}
    deviations += [f"Run {p.relative_to(out)} is not in the plan." for p in sorted(found - planned)]
    for arm in plan["arms"]:
        if lost := [seed for seed in plan["seeds"] if runs[arm, seed] is None]:
            first, more = f"{arm}/seed{lost[0]}", len(lost) - 1
            which = f"Runs {first} and {more} more of this arm are" if more else f"Run {first} is"
            deviations.append(f"{which} planned and not finished.")
    for (arm, seed), run in runs.items():
        if run is None:
            continue
        expected = {"config": plan["config"] | plan["arms"][arm], "data": plan["data"], "source": plan["source"]}
        lines = differences(expected, {part: run[part] for part in expected})
        for name, planned in (("arm", arm), ("seed", seed)):  # a folder that was copied is no run of its own
            if run[name] != planned:
                lines.append(f"{name}: planned {planned}, now {run[name]}")
        loss, losses = run["val_loss"], run["window_losses"]
        if losses is not None and abs(loss - np.mean(losses)) > 1e-9:
            lines.append(f"val_loss: {loss}, but its window_losses have mean {np.mean(losses)}")
        if run["torch"] != plan["packages"]["torch"]:
            lines.append(f"torch: planned {plan['packages']['torch']}, now {run['torch']}")
        deviations += [f"Run {arm}/seed{seed} differs from the plan in {line}." for line in lines]
    return runs, deviations


def unlike(settings):
    """Why losses that were computed under these settings can't be set side by side, or None."""
    words = {"val_sha256": "validation text", "windows": "number of windows"}
    for key in ("dtype", "compile", "device", "block_size", *words):
        values = sorted({str(each[key]) for each in settings if key in each})
        if len(values) > 1:
            return f"the two sides differ in {words.get(key, key)}: {', '.join(values)}"
    return None


def contrast(plan, runs, a, b, predicted=None):
    """
    The statistics of one planned contrast over matched seeds, without the correction for their number.

    predicted: [low, high] in nats, None for an open end. as_predicted: ci_predicted, the interval of two one-sided
    tests at alpha / m each (m planned contrasts, Bonferroni), lies within it, outside it (False), or neither (None).
    """
    seeds, reference = plan["seeds"], b in plan["references"]
    arms = (a,) if reference else (a, b)
    sides = [[runs[arm, seed] for seed in seeds] for arm in arms]
    losses = [[r and r["val_loss"] for r in side] for side in sides]
    against = plan["references"][b] if reference else losses[1]
    result = paired(losses[0], against, plan["margin"], plan["alpha"], len(plan["contrasts"]))
    result |= {"a": a, "b": b, "predicted": predicted}
    result |= dict.fromkeys(("ci_predicted", "as_predicted", "se_seed", "se_text"))
    lost = [f"{arm}/seed{s}" for arm in arms for s in seeds if (r := runs[arm, s]) is None or r["status"] == "diverged"]
    counted = [plan["data"] | {"block_size": plan["config"]["block_size"]}] if reference else []  # the reference's own
    if lost:
        which = f"{lost[0]} and {len(lost) - 1} more are" if len(lost) > 1 else f"{lost[0]} is"
        result["reason"] = f"{which} missing or diverged, and the rest alone would be another sample"
    elif reason := unlike([r["config"] | r["data"] for side in sides for r in side] + counted):
        result = dict.fromkeys(result) | {k: result[k] for k in ("a", "b", "n", "predicted")} | {"reason": reason}
    else:
        if predicted and result["sd"]:
            n, m = result["n"], len(plan["contrasts"])
            reach = stats.t.ppf(1 - plan["alpha"] / m, n - 1) * result["sd"] / math.sqrt(n)
            below, above = result["ci_predicted"] = [float(result["mean"] - reach), float(result["mean"] + reach)]
            low, high = (end if x is None else x for x, end in zip(predicted, (-math.inf, math.inf), strict=True))
            result["as_predicted"] = (
                True if low < below and above < high else False if above < low or high < below else None
            )
        windows = [np.array([r["window_losses"] for r in side]) for side in sides]  # (seeds, windows)
        other = np.array([plan["reference_windows"][b]]) if reference else windows[1]
        result["se_seed"], result["se_text"] = standard_errors(windows[0] - other)
    return result


def audit(out, runs, previous):
    """
    Measure every checkpoint again, in a fresh model built from the config that is saved in it.

    The windows in float32 as in training, and the training-path batch under the run's own autocast. A difference means
    that what was trained or measured is not what the config says. previous: the audit of an earlier report; where
    no checkpoint is here it is carried over.
    """
    result = {"checked": 0, "max_abs_diff": None, "max_abs_diff_path": None, "failed": [], "sentences": []}
    todo = [(arm, seed) for arm, seed in runs if (out / arm / f"seed{seed}" / "ckpt.pt").exists()]
    if not todo and previous and previous.get("checked"):
        return previous | {"carried_over": True}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cache, worst, worst_path = {}, 0.0, 0.0
    for arm, seed in tqdm(todo, "audit", leave=False, disable=None):
        name = f"{arm}/seed{seed}"
        path = out / arm / f"seed{seed}" / "ckpt.pt"
        ckpt, model = load_run(path)
        c = ckpt["config"]
        key = (c["dataset"], c["block_size"], c["eval_tokens"])
        if key not in cache:
            _, val, meta = prepare.load(Path("data") / c["dataset"], c["vocab_size"])
            cache[key] = prepare.windows(val, c["block_size"], c["eval_tokens"]), meta["sha256"]["val"]
        windows, sha = cache[key]
        if sha != ckpt["data"]["val_sha256"]:
            raise UserError(f"data/{c['dataset']}/val.bin is not the text of {name}: prepare it as it was then")
        model.to(device)
        run = runs[arm, seed] or ckpt
        problems = [f"ckpt.pt and log.jsonl differ in {line}" for line in differences(run, ckpt)]
        if ckpt["val_history"] != run["val_history"]:
            problems.append("ckpt.pt and log.jsonl hold different validation losses during training")
        if ckpt["status"] != run["status"]:
            problems.append(f"ckpt.pt says {ckpt['status']}, log.jsonl {run['status']}")
        elif ckpt["status"] == "finished":
            saved = ckpt["window_losses"].numpy()
            if list(saved) != list(run["window_losses"]):
                problems.append("ckpt.pt and log.jsonl hold different losses")
            both = min(len(windows), len(saved))  # a changed eval_tokens is named above
            diff = float(np.abs(window_losses(model, windows[:both]).numpy() - saved[:both]).max())
            worst = max(worst, diff)
            if not diff <= WINDOW_TOLERANCE:
                problems.append(f"a window's loss by {diff:.2g} nats")
            w = ckpt["training_path_batch"].long().to(device)  # (micro_batch_size, T + 1)
            with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=c["dtype"] == "bfloat16"):
                diff = abs(float(model(w[:, :-1], w[:, 1:])[1]) - ckpt["training_path_loss"])
            worst_path = max(worst_path, diff)
            if not diff <= PATH_TOLERANCE[c["dtype"]]:
                problems.append(f"the training path's loss by {diff:.2g} nats")
            result["checked"] += 1
        if problems:
            result["failed"].append(name)
            where = "on re-measuring a model built from its saved config"
            result["sentences"].append(f"Run {name} fails the audit {where}: {'; '.join(problems)}.")
    measured = {f"{arm}/seed{seed}" for arm, seed in todo}
    for name, sentence in zip((previous or {}).get("failed", ()), (previous or {}).get("sentences", ()), strict=False):
        if name not in measured:  # a failure is not forgotten with its checkpoint
            result["failed"].append(name)
            result["sentences"].append(sentence)
    return result | ({"max_abs_diff": worst, "max_abs_diff_path": worst_path} if result["checked"] else {})


def report_runs(out):
    """Read an experiment -> the contents of report.json."""
    if not (out / "plan.json").exists():
        raise UserError(f"{out}/plan.json not found: name the folder of an experiment that train.py made")
    plan = read_json(out / "plan.json", *PLAN)
    sha = hashlib.sha256((out / "plan.json").read_bytes()).hexdigest()
    runs, deviations = read_runs(out, plan)
    try:
        old = read_json(out / "report.json", "plan_sha256", "audit", "arms")
    except UserError:  # none, or a damaged one, which is written anew
        old = {"plan_sha256": None}
    arms = {}
    for arm in plan["arms"]:
        rows = [runs[arm, seed] for seed in plan["seeds"]]
        finite = [r["val_loss"] for r in rows if r and r["val_loss"] is not None]
        whole = len(finite) == len([r for r in rows if r]) and finite  # no divergence hides behind a mean of the rest
        best = [min(v for _, v in r["val_history"] if v is not None) for r in rows if r and r["val_loss"] is not None]
        arms[arm] = {
            "n": sum(r is not None for r in rows),
            "n_finite": len(finite),
            "mean": float(np.mean(finite)) if whole else None,
            "sd": float(np.std(finite, ddof=1)) if whole and len(finite) > 1 else None,
            "min": min(finite, default=None),
            "max": max(finite, default=None),
            "best_mean": float(np.mean(best)) if whole else None,
            "seeds": {str(s): r and r["val_loss"] for s, r in zip(plan["seeds"], rows, strict=True)},
        }
    previous = old["audit"] if old["plan_sha256"] == sha else None
    if previous and any(a["seeds"] != old["arms"].get(arm, {}).get("seeds") for arm, a in arms.items()):
        previous = previous | {"checked": 0}  # of other losses: only its failures are remembered
    checked = audit(out, runs, previous)
    deviations += checked["sentences"]
    contrasts = [contrast(plan, runs, *planned) for planned in plan["contrasts"]]
    for c, p in zip(contrasts, holm([c["p"] for c in contrasts]), strict=True):
        c["p_holm"] = p
    report = {
        "status": "exploratory" if deviations else "confirmatory",
        "deviations": deviations,
        "plan_sha256": sha,
        "outcome": "final",
        **{k: plan[k] for k in ("alpha", "margin", "references")},
        "arms": arms,
        "contrasts": contrasts,
        "audit": checked,
    }
    return report, plan, runs


def verdict(c, alpha):
    if c["p_holm"] is None:
        return "not computed"
    differs = c["p_holm"] < alpha
    if differs:
        return ("higher" if c["mean"] > 0 else "lower") + (", within the margin" if c["equivalent"] else "")
    return "equivalent" if c["equivalent"] else "undecided"


def prediction(c):
    if c["predicted"] is None:
        return "–"
    low, high = c["predicted"]
    ends = f"< {high:g}" if low is None else f"> {low:g}" if high is None else f"{low:g} .. {high:g}"
    came = {True: "as predicted", False: "not", None: "undecided"}[c["as_predicted"]]
    came = "not computed" if c["reason"] else came
    return f"{ends}: {came}"


def markdown(report, plan, name):
    """report.json and the plan -> report.md."""
    head = [f"# {name}: {report['status']}", ""]
    c = plan["config"]
    head.append(
        f"{len(plan['arms'])} arms × {len(plan['seeds'])} seeds, {c['n_layer']} layers, {c['n_head']} heads, width"
        f" {c['n_embd']}, context {c['block_size']}, {c['max_iters']:,} steps of {c['batch_size']} sequences on"
        f" {c['dataset']}; {plan['data']['windows']:,} validation windows ({plan['data']['dropped_targets']}"
        f" targets in a last partial window are dropped). Losses in nats per token. Plan {report['plan_sha256'][:12]}."
    )
    text = "\n".join(head) + "\n"
    if report["deviations"]:
        text += "\nDeviations from the plan:\n\n" + "".join(f"- {d}\n" for d in report["deviations"])
    rows = []
    for arm, a in report["arms"].items():
        n = f"{a['n']}" if a["n"] == a["n_finite"] else f"{a['n']} ({a['n'] - a['n_finite']} diverged)"
        rows.append([arm, n, *(number(a[k]) for k in ("mean", "sd", "min", "max", "best_mean"))])
    rows += [[k, "", number(v), "", "", "", ""] for k, v in report["references"].items() if v is not None]
    text += "\n" + table(["arm", "n", "mean", "sd", "min", "max", "best_mean"], rows) + "\n"
    if report["contrasts"]:
        cs = report["contrasts"]
        foretold = any(c["predicted"] for c in cs)
        rows = [[
            f"{c['a']} − {c['b']}",
            number(c["mean"], "+.4f"),
            "–" if c["ci95"] is None else f"[{c['ci95'][0]:+.4f}, {c['ci95'][1]:+.4f}]",
            number(c["p"], ".3g"),
            number(c["p_holm"], ".3g"),
            "–" if c["p_signflip"] is None else f"{c['p_signflip']:.3g} (≥ {c['p_signflip_min']:.2g})",
            number(c["dz"], "+.2f"),
            verdict(c, report["alpha"]),
            *[prediction(c)] * foretold,
        ] for c in cs]  # fmt: skip
        text += "\nPlanned contrasts, paired over seeds, first minus second:\n\n"
        columns = ["contrast", "mean", "ci95", "p", "p_holm", "p_signflip", "dz", "verdict"]
        text += table(columns + ["predicted"] * foretold, rows) + "\n"
        text += f"\nhigher or lower: p_holm < {report['alpha']:g}. equivalent, uncorrected: ci90 within"
        text += f" ± {report['margin']:g} nats."
        if foretold:
            text += f" as predicted, not: a one-sided test at {report['alpha']:g} / {len(cs)} for each end."
        text += "\n\n"
        rows = [[
            f"{c['a']} − {c['b']}",
            {True: "yes", False: "no", None: "–"}[c["ranges_overlap"]],
            number(c["sd_ratio"], ".2f"),
            number(c["p_pitman_morgan"], ".3g"),
            number(c["mde80"]),
            number(c["se_seed"]),
            number(c["se_text"]),
        ] for c in cs]  # fmt: skip
        columns = ["contrast", "ranges_overlap", "sd_ratio", "p_pitman_morgan", "mde80", "se_seed", "se_text"]
        text += table(columns, rows) + "\n"
        text += "".join(f"\n{c['a']} − {c['b']}: {c['reason']}.\n" for c in cs if c["reason"])
    a = report["audit"]
    if a["checked"]:
        carried = " (carried over from an earlier report: the weights are not here)" if a.get("carried_over") else ""
        text += (
            f"\nAudit{carried}: {a['checked']} of {sum(v['n'] for v in report['arms'].values())} runs measured"
            f" again, {len(a['failed'])} failed; largest"
            f" difference {a['max_abs_diff']:.1e} in a window (tolerance {WINDOW_TOLERANCE:g}),"
            f" {a['max_abs_diff_path']:.1e} on the training path.\n"
        )
    else:
        text += "\nAudit: no checkpoint of a finished run is here, so none was measured again.\n"
    return text


def arm_styles(arms):
    """A colour for each arm, by its place in the plan; A+x shares the colour of A, in another line style."""
    bases = list(dict.fromkeys(arm.split("+")[0] for arm in arms))
    ends = list(dict.fromkeys(arm.partition("+")[2] for arm in arms))
    styles = {}
    for arm in arms:
        i, j = bases.index(arm.split("+")[0]), ends.index(arm.partition("+")[2]) + bases.index(arm.split("+")[0]) // 7
        styles[arm] = {"color": COLOURS[i % 7], "linestyle": STYLES[j % 4], "marker": MARKERS[j % 4]}
    return styles


def figure_runs(path, report, plan, runs):
    """Validation curves of every seed, and final losses by arm with the runs of a seed joined."""
    from matplotlib.figure import Figure

    arms, styles = list(plan["arms"]), arm_styles(plan["arms"])
    few = len(arms) <= 4
    fig = Figure(figsize=(11 if few else 11 + 0.25 * len(arms), 4.6), layout="constrained")
    left, right = fig.subplots(1, 2)
    for (arm, _), run in runs.items():
        history = [(i, v) for i, v in (run["val_history"] if run else ()) if v is not None]
        line = {k: styles[arm][k] for k in ("color", "linestyle")}
        # an arm that covers another leaves its rim to be seen
        line["linewidth"] = max(1.2, 3.0 - 0.6 * arms.index(arm))
        left.plot(*(zip(*history, strict=True) if history else ([], [])), **line)
    for i, arm in enumerate(arms):
        left.plot([], [], color=styles[arm]["color"], linestyle=styles[arm]["linestyle"], label=arm)
        values = [v for v in report["arms"][arm]["seeds"].values() if v is not None]
        marks = {"color": styles[arm]["color"], "marker": styles[arm]["marker"]}
        right.scatter([i] * len(values), values, 26, zorder=2, **marks)
        if lost := report["arms"][arm]["n"] - report["arms"][arm]["n_finite"]:
            right.text(i, 1, f"{lost} diverged", transform=right.get_xaxis_transform(), ha="center", va="top", size=8)
    for seed in plan["seeds"]:
        losses = [report["arms"][arm]["seeds"][str(seed)] for arm in arms]
        right.plot(range(len(arms)), [math.nan if v is None else v for v in losses], color="0.7", lw=0.8, zorder=1)
    right.set_xticks(range(len(arms)), arms, rotation=0 if few else 35, ha="center" if few else "right")
    right.set_xlim(-0.5, len(arms) - 0.5)
    left.set(title="every run", xlabel="training step", ylabel="validation loss (nats per token)")
    right.set(title="final loss, a line joins the runs of one seed", ylabel="final validation loss (nats per token)")
    for axis in (left, right):
        low, high = axis.get_ylim()
        for name, value in plan["references"].items():
            if value is not None and low < value < high:
                axis.axhline(value, color="0.35", lw=1, ls=(0, (6, 3)), zorder=0)
                axis.annotate(
                    name, (axis.get_xlim()[1], value), (-4, 3), textcoords="offset points", ha="right", size=8
                )
        axis.set_ylim(low, high)
        axis.spines[["top", "right"]].set_visible(False)
    # many arms: below, where the tick labels of the other side need room anyway
    below = {} if few else {"loc": "upper left", "bbox_to_anchor": (0, -0.16), "ncols": 3}
    left.legend(frameon=False, fontsize=8, **below)
    save_figure(fig, path, f"{Path(plan['config']['out_dir']).name}: {report['status']}")


def three_checks(report, heads, arms=None):
    """
    Study B's three checks as one verdict: lines of Markdown.

    report: report.json of an experiment. heads: {folder: heads.json} of models measured beside it. arms: {arm: config};
    by default an arm is called by the direction that it removes. A control differs from self in that direction alone.
    A number that is missing is said to be missing.
    """
    lines = ["## Three checks", ""]
    for folder, r in heads.items():
        s, ci = r["summary"], r["summary"]["own_minus_null_ci95"]
        where = f"{r['model']}, {r['windows']:,} windows, {r['tokens']:,} tokens"
        floor = ", ".join(f"{k} {reliability(s, k)}" for k in ("r_stat", "r_delta"))
        lines.append(
            f"- Noise floor ({where}): {floor}. This is how far other text would rank the heads alike by alignment and"
            f" by effect; 1 is no noise ([figure]({folder}/heads_halves.png))."
        )
        side = "not told apart from" if ci is None or ci[0] <= 0 <= ci[1] else "above" if ci[0] > 0 else "below"
        lines.append(
            f"- Geometric null ({where}): explained {number(s['explained'], '.1%')}, own − null"
            f" {number(s['own_minus_null'], '+.3f')}{between(ci, '+.3f')}. Alignment with the own value is {side} what"
            f" earlier positions give ([figure]({folder}/heads_map.png))."
        )
    arms = arms or {arm: {"removal": arm} for arm in report["arms"]}
    controls = {"fixed": "a fixed direction", "rotated": "another direction that depends on the token"}
    tested = False
    for c in report["contrasts"]:
        a, b = (arms.get(c[side], {}) for side in ("a", "b"))  # a reference has no config
        control = next((k for k in controls if {a.get("removal"), b.get("removal")} == {"self", k}), None)
        if control is None or a | {"removal": "self"} != b | {"removal": "self"}:
            continue
        tested = True
        found = verdict(c, report["alpha"])
        better, worse = ("lower", "higher") if a["removal"] == "self" else ("higher", "lower")
        does = {better: "does better than", worse: "does worse than"}.get(found.split(",")[0], "is not told apart from")
        said = f"Removing the own value {does} removing {controls[control]}"
        said = f"Not tested: {c['reason']}" if c["reason"] else said
        lines.append(
            f"- Direction specificity: {c['a']} − {c['b']} {number(c['mean'], '+.4f')}{between(c['ci95'], '+.4f')}"
            f" nats, p_holm {number(c['p_holm'], '.2g')}, {found}. {said} ([figure](report.png))."
        )
    if not tested:
        lines.append("- Direction specificity: no planned contrast sets self beside fixed or rotated: not tested.")
    return lines


def runs_command(out):
    out = Path(out)
    report, plan, runs = report_runs(out)
    text = markdown(report, plan, Path(plan["config"]["out_dir"]).name)
    found = sorted(out.rglob("heads.json"))
    if heads := {str(p.parent.relative_to(out)): read_json(p, "model", "summary") for p in found}:
        final = {f"{arm}/seed{seed}": run and run["val_loss"] for (arm, seed), run in runs.items()}
        if stale := [f for f, r in heads.items() if r["model"] in final and r.get("val_loss") != final[r["model"]]]:
            raise UserError(f"{out}/{stale[0]}/heads.json is not of the run as it is now: measure again, or delete it")
        arms = {arm: plan["config"] | flags for arm, flags in plan["arms"].items()}
        text += "\n" + "\n".join(three_checks(report, heads, arms)) + "\n"
    with whole_file(out / "report.json") as f:
        json.dump(report, f, indent=1, allow_nan=False)
    with whole_file(out / "report.md") as f:
        f.write(text)
    figure_runs(out / "report.png", report, plan, runs)
    print(text)
    print(f"written: {out}/report.json, report.md, report.png")


def main(argv):
    words, flags = parse(argv, HEADS_FLAGS if argv[:1] == ["heads"] else {"help": bool})
    if flags.get("help") or not words:
        print(__doc__.strip())
    elif words[0] == "runs":
        if len(words) != 2:
            raise UserError("name one experiment: python analyze.py runs OUT")
        runs_command(words[1])
    elif words[0] == "heads":
        heads_command(words[1:], flags)
    else:
        raise UserError(f"unknown command {words[0]!r}: runs or heads")


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    cli(main)
