"""
Finished runs -> a verdict.

    python analyze.py runs OUT               sentences, statistics, audit and figures of an experiment of train.py
    python analyze.py table FILE.csv --contrasts=A:B[,C:3.28] [--unmatched] [--margin=0.02] [--alpha=0.05] [--out=DIR]
    python analyze.py sample RUN... [--prompt=TEXT] [--tokens=256] [--temperature=1.0] [--seed=0]
    python analyze.py heads MODEL... [--data=NAME | --text=FILE] [--windows=64] [--window_length=T] [--bos]
                                     [--interventions[=own,zero]] [--dtype=float32] [--out=DIR]

`runs` reads OUT/plan.json and each run's log.jsonl, re-measures every checkpoint that is there, and writes report.json,
report.md, contrasts.csv, contrasts.png and report.png into OUT. All losses are nats per token.

`table` gives the same statistics for losses from anywhere: columns arm, seed, loss. A number may stand for the second
side. Without a seed column, or with --unmatched, nothing is paired: Welch's test. It is always exploratory.

`heads` is described in heads.py: how far heads align with their own values, and what removing that does. MODEL is a run
folder, a ckpt.pt, or a transformers model. Writes into RUN/heads, or out/heads/MODEL; interrupted work resumes.

paired, holm, signflip here and causal_null, split_half in heads.py are plain functions of arrays.
"""

import bisect
import csv
import fnmatch
import hashlib
import json
import lzma
import math
import statistics
from pathlib import Path

import numpy as np
import torch
from scipy import special, stats
from tqdm import tqdm

import prepare
from configurator import UserError, cli, parse, read_json, read_text, whole_file
from heads import HEADS_FLAGS, encode, heads_command, load_run, open_model, own_meta
from model import digest, hash_seed, window_losses
from report import (
    between,
    contrast_rows,
    contrast_table,
    doses,
    figure_contrasts,
    figure_runs,
    literal,
    markdown,
    number,
    reliability,
    side_name,
    write_csv,
)
from train import NOT_BINDING, PLAN, RULES, binding, differences

# ---------------------------------------------------------------------------------------------------------------------
# statistics: arrays in, plain values out; numpy and scipy alone

KEYS = ("mean", "sd", "ci95", "ci_equivalence", "t", "df", "p", "p_signflip", "p_signflip_min", "dz", "ranges_overlap")
KEYS += ("equivalent", "sd_ratio", "p_pitman_morgan", "mde80", "n_for_margin", "reason")


def paired(a, b, margin=None, alpha=0.05, m=1):
    """
    Is the mean of a - b zero? A paired comparison, or a one-sample one where b is a number.

    a: (n,), b: (n,) or a number; pairs by position, None or a non-finite value where there is none. margin: half-width
    within which the two count as equivalent. m: number of planned contrasts.

    Returns a dict; what is not defined is None, and `reason` says why. Its keys:
    n pairs, mean, sd, dz = mean / sd, t, df, p and ci95 (paired t test: differences normal, pairs independent),
    p_signflip (exact sign-flip test of a symmetric difference for n <= 20, else 99,999 seeded flips) and
    p_signflip_min, the least value it can take, ranges_overlap,
    equivalent: two one-sided t tests against the margin at level alpha / m each (Schuirmann 1987, Bonferroni), that is
    ci_equivalence, the interval of 1 - 2 alpha / m, lies within it,
    sd_ratio = sd(a) / sd(b) with p_pitman_morgan (equal variances of pairs; Pitman 1939, Morgan 1939), for two arms,
    mde80: the difference that a two-sided test at alpha / m finds in 80% of experiments with this n and sd,
    n_for_margin: about so many pairs find a true difference as large as the margin, in the same sense.

    A pair that is missing voids the comparison: it is never computed on the rest. Differences that are equal up to
    rounding have no standard error, so no t, p or interval; the sign-flip test needs none and stays.
    """
    one_sample = np.ndim(b) == 0
    a = np.array([np.nan if x is None else x for x in a], dtype=np.float64)
    b = np.full(len(a), b, np.float64) if one_sample else np.array([np.nan if x is None else x for x in b], np.float64)
    if len(a) != len(b):
        raise ValueError(f"a has {len(a)} values and b {len(b)}: they are no pairs")
    r = {"n": len(a)} | dict.fromkeys(KEYS)
    missing = np.flatnonzero(~(np.isfinite(a) & np.isfinite(b)))
    if len(a) == 0 or len(missing):
        r["reason"] = f"{len(missing)} of {len(a)} pairs have a missing or non-finite value" if len(a) else "no pairs"
        return r | {"n": 0}
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
            test = stats.pearsonr(a + b, d)
            if 1 - abs(test.statistic) > 1e-12:
                r["p_pitman_morgan"] = float(test.pvalue)
            else:
                r["reason"] = "the two sides lie on one line, so their spreads have no test (p_pitman_morgan)"
    if sd <= rounding:
        r["sd"], r["reason"] = 0.0, "all differences are equal up to rounding: no standard error, no t test"
        return r
    test = stats.ttest_1samp(d, 0.0)
    r |= {"sd": float(sd), "dz": float(d.mean() / sd), "t": float(test.statistic), "df": n - 1, "p": float(test.pvalue)}
    r |= intervals(test, margin, alpha, m)
    ncp = special.nctdtrinc(n - 1, 0.2, stats.t.ppf(1 - alpha / (2 * m), n - 1))
    r["mde80"] = float(sd * ncp / math.sqrt(n)) if math.isfinite(ncp) else None
    r["n_for_margin"] = None if margin is None else pairs_to_find(margin / sd, alpha / m)
    return r


def intervals(test, margin, alpha, m):
    """ci95 and ci_equivalence of one of scipy's t tests, and whether the latter lies within the margin."""
    low, high = (float(x) for x in test.confidence_interval(1 - 2 * alpha / m))
    equivalent = None if margin is None else bool(-margin < low and high < margin)
    ci95 = [float(x) for x in test.confidence_interval(0.95)]
    return {"ci95": ci95, "ci_equivalence": [low, high], "equivalent": equivalent}


def pairs_to_find(effect, level):
    """
    The least number of pairs with which a two-sided paired t test finds a true mean of `effect` sds with 80% power.

    From the noncentral t distribution; None above 100,000.
    """

    def enough(n):
        critical, ncp = stats.t.ppf(1 - level / 2, n - 1), effect * math.sqrt(n)
        return 1 - special.nctdtr(n - 1, ncp, critical) + special.nctdtr(n - 1, ncp, -critical) >= 0.8

    most = 2
    while not enough(most) and most < 100_000:  # upwards, as the distribution has no numbers for a great ncp
        most *= 2
    n = bisect.bisect_left(range(most + 1), True, lo=max(2, most // 2), key=enough)
    return n if n <= 100_000 else None


def welch(a, b, margin=None, alpha=0.05, m=1):
    """
    The same question for runs that are not matched: Welch's t test (Welch 1947). a: (n_a,), b: (n_b,) -> as `paired`.

    n counts the runs of both sides. What needs pairs is None.
    """
    r = {"n": len(a) + len(b)} | dict.fromkeys(KEYS)
    r["mean"] = float(np.mean(a) - np.mean(b))
    r["ranges_overlap"] = bool(min(a) <= max(b) and min(b) <= max(a))
    if min(len(a), len(b)) < 2 or np.ptp(a) == np.ptp(b) == 0:
        return r | {"reason": "a side without spread has no standard error: more seeds are needed"}
    test = stats.ttest_ind(a, b, equal_var=False)
    return (
        r
        | {"t": float(test.statistic), "df": float(test.df), "p": float(test.pvalue)}
        | intervals(test, margin, alpha, m)
    )


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


def matching(pairs):
    """
    What matching bought: the correlation of the two sides over seeds, averaged over contrasts.

    pairs: [(a (n,), b (n,)), ...] -> {"r", "ci95"}, the interval from 2,000 resamplings of seeds; None below 8 seeds.
    """
    if not pairs or len(pairs[0][0]) < 8:
        return None

    def mean_r(i):  # (n,) indices of seeds
        return np.mean([np.corrcoef(a[i], b[i])[0, 1] for a, b in pairs])

    rng, n = np.random.default_rng(0), len(pairs[0][0])
    with np.errstate(all="ignore"):
        low, high = np.nanquantile([mean_r(rng.integers(n, size=n)) for _ in range(2000)], (0.025, 0.975))
        r = mean_r(np.arange(n))
    return {"r": float(r), "ci95": [float(low), float(high)]} if math.isfinite(r) else None


def decide(contrasts, alpha, margin):
    """
    Adds p_holm, family, verdict, within_margin and sentence to what `paired` or `welch` returned, with a, b and unit.

    higher or lower: p_holm < alpha (Holm). Else equivalent: `equivalent`, which is judged at alpha / family as a
    prediction is (Bonferroni). The two levels differ: Holm's is the larger one for all but the smallest p. Else
    undecided; None where it was not computed.
    """
    for c, p in zip(contrasts, holm([c["p"] for c in contrasts]), strict=True):
        differs = p is not None and p < alpha
        c |= {"p_holm": p, "family": len(contrasts)}
        c["within_margin"] = None if p is None else differs and c["equivalent"]
        if p is None:
            c["verdict"] = None
        elif differs:
            c["verdict"] = "higher" if c["mean"] > 0 else "lower"
        else:
            c["verdict"] = "equivalent" if c["equivalent"] else "undecided"
        c["sentence"] = sentence(c, alpha, margin)
    return contrasts


def sentence(c, alpha, margin):
    """A contrast in plain words."""
    a, b = c.get("chosen") or (side_name(c["a"]), side_name(c["b"]))
    tuned = f". Chosen for {c['a']} and {c['b']} on other seeds" if c.get("chosen") else ""
    if c["verdict"] is None:
        seen = "" if c["mean"] is None else f" (seen: {c['mean']:+.4f} nats)"
        return f"{a} − {b} is not computed{seen}: {c['reason']}."
    digits = 3 if abs(c["mean"]) >= 0.1 else 4
    n = f"{c['n']} {c.get('unit', 'seeds')}"
    low, high = (f"{x:+.{digits}f}" for x in c["ci95"])
    said = {True: ": as predicted", False: ": not as predicted", None: ""}[c.get("as_predicted")]
    if c.get("predicted") and c["as_predicted"] is None:
        said = ". Whether as predicted stays undecided"
    if c["verdict"] in ("higher", "lower"):
        low, high = (f"{x:.{digits}f}" for x in (c["ci95"] if c["mean"] > 0 else [-x for x in reversed(c["ci95"])]))
        where = "above" if c["mean"] > 0 else "below"
        small = f", a difference within the margin of {margin:g}" if c["within_margin"] else ""
        text = f"{a} ends {abs(c['mean']):.{digits}f} nats {where} {b} (95% interval {low} to {high}, {n}){small}"
    elif c["verdict"] == "equivalent":
        level = 100 * (1 - 2 * alpha / c["family"])
        low, high = (f"{x:+.4f}" for x in c["ci_equivalence"])
        text = f"{a} and {b} are equivalent within {margin:g} nats ({level:.4g}% interval {low} to {high}, {n})"
    else:
        text = f"{a} − {b} is undecided (p_holm {c['p_holm']:.2g}): {c['mean']:+.{digits}f} nats seen"
        text += f" (95% interval {low} to {high}, {n})"
        if c["mde80"] is not None:
            text += f". {n} find a difference of {c['mde80']:.3g} with 80% power"
        if c["n_for_margin"] is not None:
            text += f", about {c['n_for_margin']} one as large as the margin of {margin:g}"
            text += f" (but {c['n']} hardly tell the spread)" * (c["n"] < 5)
        if c.get("as_predicted"):
            said = ". The prediction is a one-sided question without this correction, and it holds"
    return text + said + tuned + "."


# ---------------------------------------------------------------------------------------------------------------------
# runs: from the records of an experiment to its report

WINDOW_TOLERANCE = 1e-5  # float32 sums in another order; a gain that is off by 0.001 moves a loss by more
PATH_TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-3}  # of the training path: compiled and eager round differently
LOGS = ("log.jsonl", "log.jsonl.xz")
RECORD = ("arm", "seed", "status", "iter", "val_loss", "window_losses", "config", "data", "source", "torch")


def last_row(folder):
    """The record that ends a finished run's log.jsonl, or None. The log may be packed: log.jsonl.xz, by `xz -9`."""
    path = next((p for name in LOGS if (p := folder / name).exists()), None)
    if path is None:
        return None
    try:
        log = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        lines = log.decode("utf-8").splitlines()
        rows = [json.loads(line, parse_constant=int) for line in lines]  # int refuses NaN and Infinity by name
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
    except (ValueError, lzma.LZMAError) as e:
        again = f"restore it, or delete {folder} and let train.py train this run again"
        raise UserError(f"{path} is damaged ({e}): {again}") from None
    return rows[-1] | {"val_history": [[r["iter"], r["val_loss"]] for r in rows if "val_loss" in r]}


def unplanned(plan, run, arm, seed, bound):
    """What in the record of a run differs from the plan: a list of clauses."""
    expected = {"config": plan["config"] | plan["arms"][arm], "data": plan["data"], "source": plan["source"]}
    lines = [f"differs from the plan in {x}" for x in differences(expected, {part: run[part] for part in expected})]
    for name, planned in (("arm", arm), ("seed", seed)):  # a folder that was copied is no run of its own
        if run[name] != planned:
            lines.append(f"differs from the plan in {name}: planned {planned}, now {run[name]}")
    loss, losses = run["val_loss"], run["window_losses"]
    if losses is not None and abs(loss - np.mean(losses)) > 1e-9:
        lines.append(f"has the val_loss {loss}, but its window_losses have mean {np.mean(losses)}")
    if run["torch"] != plan["packages"]["torch"]:
        lines.append(f"differs from the plan in torch: planned {plan['packages']['torch']}, now {run['torch']}")
    earlier = [note.get("binding_sha256") for note in plan["amendments"]]
    if run.get("binding_sha256") is None:
        lines.append("does not say under which plan it was made (no binding_sha256)")
    elif run["binding_sha256"] not in [digest(bound), *earlier]:
        changed = [part for part, sha in bound.items() if run["binding"].get(part) != sha]
        lines.append(f"was made under another plan than plan.json is now: {', '.join(changed)} changed")
    return lines


def deviations_of(out, plan, runs, seeds):
    """A sentence for each kind of deviation from the plan. seeds: those that the report uses; others may be missing."""
    deviations = []
    for name, losses in plan["reference_windows"].items():
        if losses and abs(plan["references"][name] - np.mean(losses)) > 1e-9:
            deviations.append(f"The reference {name} in plan.json is not the mean of its windows.")
    if (rules := plan.get("rules")) != RULES:
        deviations.append(f"The plan decides by {rules or 'rules that it does not name'}; this report by: {RULES}.")
    for note in plan["amendments"]:
        changes = "; ".join(note["changes"])
        deviations.append(f"The plan was amended at {note['time']}: {note['reason']} ({changes}).")
    found = {p.parent for name in (*LOGS, "ckpt.pt") for p in out.glob(f"*/*/{name}")}
    planned = {out / arm / f"seed{seed}" for arm, seed in runs}
    clauses = {}  # what is said of runs -> the runs
    for folder in sorted(found - planned):
        clauses.setdefault("is not in the plan", []).append(str(folder.relative_to(out)))
    bound = binding(plan)
    for (arm, seed), run in runs.items():
        lines = unplanned(plan, run, arm, seed, bound) if run else ["is planned and not finished"]
        for line in lines if run or seed in seeds else ():
            clauses.setdefault(line, []).append(f"{arm}/seed{seed}")
    for line, names in clauses.items():
        more = f"; so with {len(names) - 1} more: {', '.join(names[1:4])}{', ...' * (len(names) > 4)}"
        deviations.append(f"Run {names[0]} {line}{more * (len(names) > 1)}.")
    return deviations


def complete_looks(plan, runs):
    """The planned looks whose first n seeds are all there, or the first; without looks, [the number of seeds]."""
    looks = plan.get("looks") or [len(plan["seeds"])]
    return [n for n in looks if all(runs[arm, s] for arm in plan["arms"] for s in plan["seeds"][:n])] or looks[:1]


def unlike(settings):
    """Why losses that were computed under these settings can't be set side by side, or None."""
    for key in {k: None for each in settings for k in each}:
        values = sorted({str(each[key]) for each in settings if key in each})
        if len(values) > 1:
            return f"the two sides differ in {key}: {', '.join(values)}"
    return None


def settings_of(run, free):
    """All that a run's loss depends on beside its arm and seed; free: what the arms of the contrast set."""
    config = {k: v for k, v in run["config"].items() if k not in free and k not in NOT_BINDING}
    source = {name: sha["code"] if isinstance(sha, dict) else sha for name, sha in run["source"].items()}
    masks = {"processes": run.get("processes")} if run["config"].get("dropout") else {}  # dropout's depend on them
    return config | run["data"] | source | masks | {"torch": run["torch"]}


def best_arm(plan, runs, side):
    """Of the arms of a family, that with the lowest mean over the seeds that tune; raises ValueError if one lacks."""
    means = {}
    for arm in fnmatch.filter(plan["arms"], side):
        rows = [runs[arm, seed] for seed in plan["seeds"][: plan["tune_seeds"]]]
        if None in rows:
            raise ValueError(f"{arm} has not finished the seeds that choose among {side}")
        means[arm] = float(np.mean([math.inf if r["val_loss"] is None else r["val_loss"] for r in rows]))
    best = min(means, key=means.get)
    if not math.isfinite(means[best]):
        raise ValueError(f"every arm of {side} has diverged in the seeds that choose")
    return best


def contrast(plan, runs, seeds, alpha, a, b, predicted=None):
    """
    The statistics of one planned contrast over matched seeds, without what `decide` adds.

    predicted: [low, high] in nats, None for an open end. as_predicted: ci_predicted, the interval of two one-sided
    tests at alpha / m each (m planned contrasts, Bonferroni), lies within it, outside it (False), or neither (None).
    """
    result = {"a": a, "b": b, "n": 0} | dict.fromkeys(KEYS) | {"predicted": predicted, "chosen": None}
    result |= {"differences": {}} | dict.fromkeys(("ci_predicted", "as_predicted", "se_seed", "se_text"))
    interaction, m = not isinstance(a, str), len(plan["contrasts"])
    names = [*a, *b] if interaction else [a, b]
    try:
        if any("*" in name for name in names):
            seeds = seeds[plan["tune_seeds"] :]
            result["chosen"] = names = [best_arm(plan, runs, name) if "*" in name else name for name in names]
    except ValueError as e:
        return result | {"reason": str(e)}
    reference = names[-1] in plan["references"]
    arms = names[:1] if reference else names
    sides = [[runs[arm, seed] for seed in seeds] for arm in arms]
    lost = [f"{arm}/seed{s}" for arm in arms for s in seeds if (r := runs[arm, s]) is None or r["status"] == "diverged"]
    if lost:
        which = f"{lost[0]} and {len(lost) - 1} more are" if len(lost) > 1 else f"{lost[0]} is"
        return result | {"reason": f"{which} missing or diverged, and the rest alone would be another sample"}
    free = {k for arm in arms for k in plan["arms"][arm]}
    counted = [plan["data"] | {"block_size": plan["config"]["block_size"]}] if reference else []  # the reference's own
    if reason := unlike([settings_of(r, free) for side in sides for r in side] + counted):
        return result | {"reason": reason}
    losses = [np.array([r["val_loss"] for r in side]) for side in sides]  # (seeds,) each
    windows = [np.array([r["window_losses"] for r in side]) for side in sides]  # (seeds, windows)
    if reference:
        losses.append(plan["references"][names[-1]])
        windows.append(np.array([plan["reference_windows"][names[-1]]]))
    if interaction:
        losses, windows = ([x[0] - x[1], x[2] - x[3]] for x in (losses, windows))
    result |= paired(*losses, plan["margin"], alpha, m)
    result["differences"] = dict(zip(map(str, seeds), (losses[0] - losses[1]).tolist(), strict=True))
    if interaction:
        result |= {"sd_ratio": None, "p_pitman_morgan": None, "ranges_overlap": None}
    result["se_seed"], result["se_text"] = standard_errors(windows[0] - windows[1])
    if predicted and result["ci_equivalence"]:
        below, above = result["ci_predicted"] = result["ci_equivalence"]
        low, high = (end if x is None else x for x, end in zip(predicted, (-math.inf, math.inf), strict=True))
        result["as_predicted"] = (
            True if low < below and above < high else False if above < low or high < below else None
        )
    return result


def contrasts_at(plan, runs, looks):
    """Every planned contrast at the first of these looks that decides it, or at the last."""
    alpha = plan["alpha"] / len(plan.get("looks") or [1])
    final = None
    for n in looks:
        now = [contrast(plan, runs, plan["seeds"][:n], alpha, *planned) for planned in plan["contrasts"]]
        now = decide(now, alpha, plan["margin"])
        for c in now if plan.get("looks") else ():
            c["sentence"] += f" At the look of {n} seeds."
        if final is not None:
            now = [new if old["verdict"] in (None, "undecided") else old for old, new in zip(final, now, strict=True)]
        final = now
    return final


def edges(plan, contrasts):
    """Sentences on chosen arms whose setting is the least or the greatest of those that were tried."""
    chosen = {arm for c in contrasts for arm in c["chosen"] or ()}
    return [
        f"{arm} lies at the edge of its grid of {name}: a better value may lie beyond."
        for name, lines in doses(plan).items()
        for line in lines.values()
        for _, arm in (line[0], line[-1])
        if arm in chosen
    ]


def audit(out, plan, runs, previous):
    """
    Measure every finished run whose checkpoint is here again, in a fresh model built from the config saved in it.

    The windows in float32 as in training, the training-path batch under the run's own autocast, and the digest of the
    weights. A difference means that what was trained or measured is not what the config says. previous: the audit of an
    earlier report; what it measured counts for a run whose checkpoint is not here and whose record is the same.
    """
    result = {"checked": 0, "max_abs_diff": None, "max_abs_diff_path": None, "failed": [], "sentences": [], "runs": {}}
    here = {run for run in runs if runs[run] and (out / run[0] / f"seed{run[1]}" / "ckpt.pt").exists()}
    if not here and previous and "runs" not in previous:  # of the first version
        return previous | {"carried_over": previous["checked"]}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    texts = {}
    for run in tqdm(sorted(here, key=list(runs).index), "audit", leave=False, disable=None):
        name, row = f"{run[0]}/seed{run[1]}", runs[run]
        ckpt, model = load_run(out / name / "ckpt.pt")
        c = ckpt["config"]
        key = (c["dataset"], c["block_size"], c["eval_tokens"])
        if key not in texts:
            train, val, meta = prepare.load(Path("data") / c["dataset"], c["vocab_size"], again=True)
            windows = prepare.windows(val, c["block_size"], c["eval_tokens"])
            counted = prepare.reference_losses(train, windows, min(c["vocab_size"], meta["vocab_size"]))
            texts[key] = windows, meta["sha256"]["val"], {k: v if v is None else v.tolist() for k, v in counted.items()}
        windows, sha, counted = texts[key]
        if sha != ckpt["data"]["val_sha256"]:
            raise UserError(f"data/{c['dataset']}/val.bin is not the text of {name}: prepare it as it was then")
        problems = [f"ckpt.pt and log.jsonl differ in {line}" for line in differences(row, ckpt)]
        saved = ckpt["window_losses"]
        plain = ckpt | {"window_losses": saved if saved is None else saved.tolist()}
        shared = [k for k in plain if k in row and k not in ("config", "data", "source")]
        problems += [f"ckpt.pt and log.jsonl differ in {k}" for k in shared if plain[k] != row[k]]
        if counted != plan["reference_windows"] and ckpt["data"] == plan["data"]:
            problems.append("the references in plan.json are not those of the text")
        if ckpt.get("weights_sha256") not in (None, digest(ckpt["model"])):
            problems.append("its weights are not those that were trained (weights_sha256)")
        if ckpt["status"] == row["status"] == "finished":
            n = min(len(windows), len(saved))  # a changed eval_tokens is named above
            model.to(device)
            diff = float((window_losses(model, windows[:n]) - saved[:n]).abs().max())
            if not diff <= WINDOW_TOLERANCE:
                problems.append(f"a window's loss by {diff:.2g} nats")
            w = ckpt["training_path_batch"].long().to(device)  # (micro_batch_size, T + 1)
            with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=c["dtype"] == "bfloat16"):
                path = abs(float(model(w[:, :-1], w[:, 1:])[1]) - ckpt["training_path_loss"])
            if not path <= PATH_TOLERANCE[c["dtype"]]:
                problems.append(f"the training path's loss by {path:.2g} nats")
            if not all(p.isfinite().all() for p in model.parameters()):
                problems = ["the weights in ckpt.pt are not finite"]
            finite = [x if math.isfinite(x) else None for x in (diff, path)]
            result["runs"][name] = {"record_sha256": digest(row), "diff": finite[0], "path": finite[1]}
        if problems:
            result["failed"].append(name)
            where = "on re-measuring a model built from its saved config"
            result["sentences"].append(f"Run {name} fails the audit {where}: {'; '.join(problems)}.")
    old, measured = previous or {}, {f"{arm}/seed{seed}" for arm, seed in here}
    known = {f"{arm}/seed{seed}": row for (arm, seed), row in runs.items() if row}
    carried = [x for x in old.get("runs", {}).items() if x[0] in known and x[0] not in measured]
    carried = {k: v for k, v in carried if v["record_sha256"] == digest(known[k])}
    for name, text in zip(old.get("failed", ()), old.get("sentences", ()), strict=False):
        if name not in measured:  # a failure is not forgotten with its checkpoint
            result["failed"].append(name)
            result["sentences"].append(text)
    for name in sorted(set(old.get("runs", {})) & set(known) - measured - set(carried)):
        result["failed"].append(name)
        result["sentences"].append(f"The record of run {name} is not the one that an earlier report audited.")
    result["runs"] |= carried
    result |= {"checked": len(result["runs"]), "carried_over": len(carried)}
    for key, diff in (("max_abs_diff", "diff"), ("max_abs_diff_path", "path")):
        result[key] = max((r[diff] for r in result["runs"].values() if r[diff] is not None), default=None)
    return result


def report_runs(out):
    """Read an experiment -> (the contents of report.json, the plan, the runs)."""
    if not (out / "plan.json").exists():
        raise UserError(f"{out}/plan.json not found: name the folder of an experiment that train.py made")
    plan = read_json(out / "plan.json", *PLAN)
    sha = hashlib.sha256((out / "plan.json").read_bytes()).hexdigest()
    # {(arm, seed): last row, or None for a planned run that is not finished}
    runs = {(arm, seed): last_row(out / arm / f"seed{seed}") for arm in plan["arms"] for seed in plan["seeds"]}
    looks = complete_looks(plan, runs)
    seeds = plan["seeds"][: looks[-1]]
    deviations = deviations_of(out, plan, runs, seeds)
    try:
        old = read_json(out / "report.json", "plan_sha256", "audit", "arms")
    except UserError:  # none, or a damaged one, which is written anew
        old = {"plan_sha256": None}
    arms = {}
    for arm in plan["arms"]:
        rows = [runs[arm, seed] for seed in seeds]
        there = [r for r in rows if r]
        finite = [r["val_loss"] for r in there if r["val_loss"] is not None]
        whole = len(finite) == len(there) and finite  # no divergence hides behind a mean of the rest
        best = [min(v for _, v in r["val_history"] if v is not None) for r in there if r["val_loss"] is not None]
        arms[arm] = {
            "n": len(there),
            "n_finite": len(finite),
            "mean": float(np.mean(finite)) if whole else None,
            "sd": float(np.std(finite, ddof=1)) if whole and len(finite) > 1 else None,
            "min": min(finite, default=None),
            "max": max(finite, default=None),
            "best_mean": float(np.mean(best)) if whole else None,
            "seeds": {str(s): r and r["val_loss"] for s, r in zip(seeds, rows, strict=True)},
            "settings": plan["arms"][arm],
            "parameters": next((r["parameters"] for r in there if "parameters" in r), None),
            "seconds": statistics.median(r["seconds"] for r in there) if there and "seconds" in there[0] else None,
            "sample": there[0].get("sample") if there else None,
        }
    if old["plan_sha256"] != sha or not isinstance(old["audit"], dict):
        old = {}
    if (old.get("look") or 0) > looks[-1]:
        deviations.append(f"An earlier report was made at the look of {old['look']} seeds, of which runs are gone.")
    checked = audit(out, plan, runs, old.get("audit"))
    deviations += checked["sentences"]
    contrasts = contrasts_at(plan, runs, looks)
    both = [c for c in contrasts if isinstance(c["a"], str) and c["n"] >= 8 and c["b"] not in plan["references"]]
    names = [c["chosen"] or (c["a"], c["b"]) for c in both]
    losses = {arm: np.array([a["seeds"][str(s)] for s in seeds], float) for arm, a in arms.items()}  # NaN for None
    report = {
        "status": "exploratory" if deviations else "confirmatory",
        "deviations": deviations,
        "plan_sha256": sha,
        "outcome": "final",
        "look": looks[-1] if plan.get("looks") else None,
        "rules": RULES,
        "pairing": matching([(losses[a], losses[b]) for a, b in names if np.isfinite(losses[a] + losses[b]).all()]),
        **{k: plan[k] for k in ("alpha", "margin", "references")},
        "arms": arms,
        "contrasts": contrasts,
        "edges": edges(plan, contrasts),
        "audit": checked,
    }
    return report, plan, runs


def three_checks(report, heads, arms=None):
    """
    Study B's three checks as one verdict: lines of Markdown.

    report: report.json of an experiment. heads: {folder: heads.json} of models measured beside it. arms: {arm: config};
    by default an arm is called by the direction that it removes. A control differs from self in that direction alone.
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
    tested = False
    for c in report["contrasts"]:
        a, b = (arms.get(c[side], {}) if isinstance(c[side], str) else {} for side in ("a", "b"))
        removed = {a.get("removal"), b.get("removal")}
        if "self" not in removed or not removed & {"fixed", "rotated", "matched", "shrink"}:
            continue
        if a | {"removal": "self"} == b | {"removal": "self"}:
            tested = True
            lines.append(f"- Direction specificity ([figure](contrasts.png)): {c['sentence']}")
    if not tested:
        lines.append("- Direction specificity: no planned contrast sets self beside a control: not tested.")
    return lines


# ---------------------------------------------------------------------------------------------------------------------
# commands


def write_report(out, report, text):
    """report.json, report.md and contrasts.csv."""
    with whole_file(out / "report.json") as f:
        json.dump(report, f, indent=1, allow_nan=False)
    with whole_file(out / "report.md") as f:
        f.write(text)
    if report["contrasts"]:
        write_csv(out / "contrasts.csv", contrast_rows(report["contrasts"]))
    print(text)
    print(f"written: {out}/report.json, report.md, contrasts.csv and figures")


def runs_command(out):
    out = Path(out)
    try:
        report, plan, runs = report_runs(out)
    except (TypeError, KeyError, IndexError, AttributeError, RecursionError, RuntimeError) as e:
        raise UserError(f"{out}: a file of it is damaged ({type(e).__name__}: {str(e)[:120]}): restore it") from e
    name = Path(plan["config"]["out_dir"]).name
    text = markdown(report, plan, name)
    found = sorted(out.rglob("heads.json"))
    if heads := {str(p.parent.relative_to(out)): read_json(p, "model", "summary") for p in found}:
        final = {f"{arm}/seed{seed}": run and run["val_loss"] for (arm, seed), run in runs.items()}
        if stale := [f for f, r in heads.items() if r["model"] in final and r.get("val_loss") != final[r["model"]]]:
            raise UserError(f"{out}/{stale[0]}/heads.json is not of the run as it is now: measure again, or delete it")
        arms = {arm: plan["config"] | flags for arm, flags in plan["arms"].items()}
        text += "\n" + "\n".join(three_checks(report, heads, arms)) + "\n"
    figure_runs(out / "report.png", report, plan, runs)
    if report["contrasts"]:
        title = literal(f"{name}: {report['status']}")
        figure_contrasts(out / "contrasts.png", report["contrasts"], plan["margin"], title)
    write_report(out, report, text)


def read_table(path):
    """A file of columns arm, seed (perhaps), loss -> {arm: {seed or row number: loss}}, and whether it has seeds."""
    rows = csv.DictReader(read_text(path).splitlines())
    if not {"arm", "loss"} <= set(rows.fieldnames or ()):
        raise UserError(f"{path} must begin with the names of its columns: arm,seed,loss")
    arms = {}
    for n, row in enumerate(rows, 2):
        try:
            loss = float(row["loss"])
        except (TypeError, ValueError):
            raise UserError(f"{path} row {n}: loss is {row['loss']!r}, it must be a number") from None
        seed = row.get("seed") or n
        if not abs(loss) < 1e9 or seed in arms.setdefault(row["arm"], {}):
            what = f"seed {seed} of {row['arm']} is there twice" if abs(loss) < 1e9 else "the loss is not finite"
            raise UserError(f"{path} row {n}: {what}; take the row out")
        arms[row["arm"]][seed] = loss
    return arms, "seed" in rows.fieldnames


def table_command(path, flags):
    """The statistics of a table of losses from anywhere; nothing was planned, so it is exploratory."""
    arms, matched = read_table(path)
    matched = matched and not flags.get("unmatched", False)
    alpha, margin = flags.get("alpha", 0.05), flags.get("margin", 0.02)
    if not 1e-9 < alpha < 0.5 or not 0 < margin < 1e9:
        raise UserError(f"--alpha={alpha} must lie between 0 and 0.5, and --margin={margin} above 0")
    pairs = [pair.partition(":")[::2] for pair in flags.get("contrasts", "").split(",")]
    contrasts = []
    for a, b in pairs:
        value = b if b in arms or not b.replace(".", "", 1).isdecimal() else float(b)
        if a not in arms or isinstance(value, str) and value not in arms:
            raise UserError(f"say --contrasts=A:B or A:3.28, with commas between, of the arms {', '.join(arms)}")
        left, by_seed = list(arms[a].values()), {}
        if isinstance(value, float):
            result = paired(left, value, margin, alpha, len(pairs))
            by_seed = {s: x - value for s, x in arms[a].items()}
        elif matched:
            if odd := set(arms[a]) ^ set(arms[b]):
                what = f"seed {min(odd)} is there for one of {a} and {b}"
                raise UserError(f"{path}: {what}, so they are no pairs: add it, or say --unmatched")
            result = paired(left, [arms[b][s] for s in arms[a]], margin, alpha, len(pairs))
            by_seed = {s: x - arms[b][s] for s, x in arms[a].items()}
        else:
            result = welch(left, list(arms[b].values()), margin, alpha, len(pairs)) | {"unit": "runs"}
        contrasts.append(
            {"a": a, "b": b, "differences": by_seed} | result | dict.fromkeys(("predicted", "ci_predicted"))
        )
    decide(contrasts, alpha, margin)
    out = Path(flags.get("out", Path("out/table") / Path(path).stem))
    out.mkdir(parents=True, exist_ok=True)
    how = "over matched seeds (paired t test)" if matched else "unmatched (Welch's t test): nothing was paired"
    text = f"# {Path(path).name}: exploratory\n\n" + "\n".join(f"- {c['sentence']}" for c in contrasts)
    text += f"\n\n![Each contrast: mean, 95% interval, margin](contrasts.png)\n\nFirst minus second, {how}:\n\n"
    text += contrast_table(contrasts, alpha, margin) + "\n"
    figure_contrasts(out / "contrasts.png", contrasts, margin, literal(f"{Path(path).name}: exploratory"))
    write_report(out, {"status": "exploratory", "alpha": alpha, "margin": margin, "contrasts": contrasts}, text)


def sample_command(names, flags):
    """Text from the models of runs, one after the other, from one random stream."""
    if flags.get("prompt") == "" or flags.get("tokens", 1) < 1 or not 0.01 <= flags.get("temperature", 1.0) < 1e6:
        raise UserError("--prompt must hold a character, --tokens be at least 1, and --temperature at least 0.01")
    for name in names:
        if not Path(name).exists():
            raise UserError(f"{name} not found: name the folder of a run, such as out/demo/FFNOnly/seed0")
        model, subject = open_model(name)
        device = next(model.parameters()).device
        meta = own_meta(subject)
        prompt = flags.get("prompt", "\n" if "\n" in (meta.get("characters") or "\n") else meta["characters"][0])
        ids = torch.tensor([encode(prompt, subject)], device=device)  # (1, n)
        generator = torch.Generator(device).manual_seed(hash_seed(flags.get("seed", 0), "sample"))
        ids = model.generate(ids, flags.get("tokens", 256), flags.get("temperature", 1.0), generator=generator)
        print(f"--- {subject.label}\n{prepare.decode(ids[0].tolist(), meta)}\n")


FLAGS = {
    "runs": {},
    "table": {"contrasts": str, "unmatched": bool, "margin": float, "alpha": float, "out": str},
    "sample": {"prompt": str, "tokens": int, "temperature": float, "seed": int},
    "heads": HEADS_FLAGS,
}


def main(argv):
    words, flags = parse(argv, FLAGS.get(argv[0] if argv else "", {}) | {"help": bool})
    if flags.pop("help", False) or not words:
        return print(__doc__.strip())
    command, *names = words
    if command not in FLAGS:
        raise UserError(f"unknown command {command!r}: {', '.join(FLAGS)}")
    needed = {"runs": "one OUT, the folder of an experiment", "table": "one FILE.csv", "sample": "a RUN or more"}
    if command in needed and (not names or command != "sample" and len(names) > 1):
        raise UserError(f"python analyze.py {command}: name {needed[command]}")
    if command == "runs":
        runs_command(names[0])
    elif command == "table":
        table_command(names[0], flags)
    elif command == "sample":
        sample_command(names, flags)
    else:
        heads_command(names, flags)


if __name__ == "__main__":
    cli(main)
