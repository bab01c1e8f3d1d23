"""
How often is the whole verdict wrong? `python tests/error_rates.py`, half a minute; not part of `make test`.

20,000 simulated experiments of 4 contrasts. (a) All true differences are 0: how often is any contrast called higher or
lower? (b) All are as large as the margin: how often is any called equivalent? Each may be alpha + 3 standard errors at
most. (c) Tuned contrasts without a true difference: one side takes the best of four rates by two seeds that are then
left out, or by the seeds that it is judged on. The vectorised rules are first compared with those of analyze.py.
"""

import sys
from pathlib import Path

import numpy as np
from scipy import stats

sys.path.insert(0, str(Path(__file__).parents[1]))

import analyze

EXPERIMENTS, CONTRASTS, ALPHA, MARGIN = 20_000, 4, 0.05, 0.02


def verdicts(d, alpha):
    """d: (experiments, contrasts, seeds) -> two bool arrays (experiments, contrasts): differs, equivalent."""
    n, m = d.shape[2], d.shape[1]
    mean, se = d.mean(2), d.std(2, ddof=1) / np.sqrt(n)
    p = 2 * stats.t.sf(abs(mean / se), n - 1)
    order = p.argsort(1)
    steps = np.maximum.accumulate(np.take_along_axis(p, order, 1) * np.arange(m, 0, -1), 1)  # Holm, step by step
    corrected = np.empty_like(p)
    np.put_along_axis(corrected, order, steps, 1)
    reach = stats.t.ppf(1 - alpha / m, n - 1) * se
    differs = corrected < alpha
    return differs, (mean - reach > -MARGIN) & (mean + reach < MARGIN) & ~differs


def at_looks(d, looks):
    """The verdicts of the first look that decides, as verdicts()."""
    differs, equivalent = (np.zeros(d.shape[:2], bool) for _ in range(2))
    for n in looks:
        undecided = ~(differs | equivalent)
        now = verdicts(d[:, :, :n], ALPHA / len(looks))
        differs |= now[0] & undecided
        equivalent |= now[1] & undecided
    return differs, equivalent


def same_as_analyze(d):
    for experiment, differs, equivalent in zip(d, *verdicts(d, ALPHA), strict=True):
        contrasts = [analyze.paired(x, 0, MARGIN, ALPHA, len(experiment)) | {"a": "A", "b": "B"} for x in experiment]
        words = [c["verdict"] for c in analyze.decide(contrasts, ALPHA, MARGIN)]
        assert [w in ("higher", "lower") for w in words] == differs.tolist()
        assert [w == "equivalent" for w in words] == equivalent.tolist()


def main():
    rng = np.random.default_rng(0)
    same_as_analyze(rng.normal(0.005, 0.015, (300, CONTRASTS, 8)))
    print(f"at most {ALPHA + 3 * np.sqrt(ALPHA * (1 - ALPHA) / EXPERIMENTS):.4f}")
    for sd in (0.01, 0.03):
        for looks in ((8,), (4, 8), (8, 16, 32)):
            noise = rng.normal(0, sd, (EXPERIMENTS, CONTRASTS, max(looks)))
            a, b = at_looks(noise, looks)[0].any(1).mean(), at_looks(noise + MARGIN, looks)[1].any(1).mean()
            print(f"sd {sd}, looks {looks}: (a) {a:.4f} (b) {b:.4f}")
    losses = rng.normal(0, 0.01, (EXPERIMENTS, 5, 8))  # four rates of one side, and the other side
    rows = np.arange(EXPERIMENTS)
    for name, tuning, judged in (("left out", slice(0, 2), slice(2, 8)), ("the same", slice(0, 8), slice(0, 8))):
        best = losses[rows, losses[:, :4, tuning].mean(2).argmin(1)]
        wrong = stats.ttest_1samp((best - losses[:, 4])[:, judged], 0, axis=1).pvalue < ALPHA
        print(f"tuned, seeds {name}: (c) {wrong.mean():.4f}")


if __name__ == "__main__":
    main()
