"""Statistics against scipy, published examples and hand calculation; reports against experiments that were run."""

import dataclasses
import itertools
import json
import lzma
import math
import shutil
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

import analyze
import model
import prepare
import report
import train
from analyze import holm, paired, signflip, standard_errors
from configurator import UserError

# Student (1908), The probable error of a mean: hours of sleep gained under two drugs, ten patients
SLEEP = ([0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0], [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4])
# Darwin (1876), cross- minus self-fertilised maize in eighths of an inch; worked in Fisher (1935), The Design of
# Experiments, sections 16 to 21: t = 2.148 with 14 degrees of freedom, 1,726 of 32,768 sign patterns reach |314|
DARWIN = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]


def test_paired_against_scipy_and_student():
    a, b = SLEEP
    r = paired(a, b)
    test = stats.ttest_rel(a, b)
    assert (r["n"], r["df"]) == (10, 9)
    assert r["t"] == pytest.approx(test.statistic, rel=1e-12) and r["p"] == pytest.approx(test.pvalue, rel=1e-12)
    # as R prints them: t.test(extra ~ group, data = sleep, paired = TRUE)
    assert r["t"] == pytest.approx(-4.0621, abs=5e-5) and r["p"] == pytest.approx(0.002833, abs=5e-7)
    assert r["mean"] == pytest.approx(-1.58) and r["ci95"] == pytest.approx([-2.4598858, -0.7001142], abs=5e-8)
    half = stats.t.ppf(1 - 0.05 / 3, 9) * r["sd"] / math.sqrt(10)
    assert paired(a, b, m=3)["ci_equivalence"] == pytest.approx([-1.58 - half, -1.58 + half])
    assert r["dz"] == pytest.approx(-1.58 / r["sd"]) and r["ranges_overlap"] is True and r["reason"] is None


def test_fisher_on_darwins_maize():
    r = paired(DARWIN, 0)
    assert r["t"] == pytest.approx(2.148, abs=5e-4) and r["p"] == pytest.approx(0.0497, abs=5e-5)
    assert r["p_signflip"] == 1726 / 32768 and r["p_signflip_min"] == 2 / 32768


@pytest.mark.parametrize("scale", [1, 1e-6, 1e6])
def test_ties_count_at_every_scale(scale):
    """R4: sums that are equal on paper differ in the last bit."""
    tenths = [1, 2, 3, -1, -2, 3]
    observed = abs(sum(tenths))
    signs = itertools.product((1, -1), repeat=6)
    hits = sum(abs(sum(s * x for s, x in zip(sign, tenths, strict=True))) >= observed for sign in signs)
    assert Fraction(hits, 64) == Fraction(3, 8)
    assert signflip(np.array(tenths) / 10 * scale)[0] == 0.375
    assert paired([x / 10 * scale for x in tenths], 0)["p_signflip"] == 0.375


def test_signflip_of_many_pairs_is_seeded_and_near_the_exact_one():
    d = np.random.default_rng(1).normal(0.4, 1, 20)
    exact = signflip(d)[0]
    many = np.concatenate([d, [1e-15]])  # one more pair that decides nothing
    p, least = signflip(many)
    assert p == signflip(many)[0] and least == 1e-5
    assert p == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / 1e5))


def test_equal_differences_have_no_p():
    """R1."""
    a, b = [1.915, 1.904, 1.923, 1.911], [1.912, 1.901, 1.920, 1.908]
    r = paired(a, b)
    assert r["mean"] == pytest.approx(0.003) and r["sd"] == 0 and "equal up to rounding" in r["reason"]
    assert all(r[k] is None for k in ("t", "p", "ci95", "ci_equivalence", "dz", "mde80", "equivalent", "n_for_margin"))
    assert r["p_signflip"] == 0.125
    same = paired(a, a)
    assert same["mean"] == 0 and same["p"] is None and same["p_signflip"] == 1
    one = paired([1.5], [1.4])
    assert one["n"] == 1 and one["mean"] == pytest.approx(0.1) and one["sd"] is None and "more seeds" in one["reason"]
    two = paired([1.5, 1.7], [1.4, 1.5])
    assert two["df"] == 1 and two["p"] == pytest.approx(stats.ttest_rel([1.5, 1.7], [1.4, 1.5]).pvalue)
    assert two["p_pitman_morgan"] is None
    for each in (r, same, one, two, paired([], [])):
        json.dumps(each, allow_nan=False)


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf])
def test_a_missing_pair_voids_the_comparison(bad):
    r = paired([1.0, bad, 3.0], [1.0, 2.0, 2.5])
    assert r["n"] == 0 and r["reason"] == "1 of 3 pairs have a missing or non-finite value"
    assert all(v is None for k, v in r.items() if k not in ("n", "reason"))
    with pytest.raises(ValueError, match="no pairs"):
        paired([1.0, 2.0], [1.0])


def test_pitman_morgan_and_sd_ratio():
    a, b = (np.array(x) for x in SLEEP)
    r = paired(a, b)
    # in the form of Snedecor and Cochran (1989), section 10.8: F = ratio of variances, r = correlation of the pairs
    f, corr = a.var(ddof=1) / b.var(ddof=1), np.corrcoef(a, b)[0, 1]
    t = (f - 1) * math.sqrt(8) / (2 * math.sqrt(f * (1 - corr**2)))
    assert r["p_pitman_morgan"] == pytest.approx(2 * stats.t.sf(abs(t), 8), rel=1e-9)
    line = paired([1.0, 2.0, 3.0, 4.0], [2.0, 4.0, 6.0, 8.0])  # S9
    assert line["p_pitman_morgan"] is None and "no test" in line["reason"] and line["p"] is not None
    assert r["sd_ratio"] == pytest.approx(math.sqrt(f))


def test_mde80_is_found_with_80_percent_power():
    rng = np.random.default_rng(0)
    for n, m in ((8, 4), (5, 1)):
        r = paired(rng.normal(size=n), 0, m=m)
        critical = stats.t.ppf(1 - 0.05 / (2 * m), n - 1)
        d = rng.normal(r["mde80"] / r["sd"], 1, (200_000, n))  # in units of sd
        t = d.mean(1) / d.std(1, ddof=1) * math.sqrt(n)
        assert np.mean(t > critical) == pytest.approx(0.8, abs=0.004)


def test_n_for_margin_is_the_least_n_with_80_percent_power():
    """By simulation: n finds the margin in 80% of experiments, n - 1 in less."""
    rng = np.random.default_rng(0)
    d = rng.normal(0, 0.02, 8)
    r = paired(d, 0, margin=0.02, m=4)
    power = {}
    for n in (r["n_for_margin"] - 1, r["n_for_margin"]):
        sample = rng.normal(0.02 / r["sd"], 1, (400_000, n))
        t = sample.mean(1) / sample.std(1, ddof=1) * math.sqrt(n)
        power[n] = np.mean(abs(t) > stats.t.ppf(1 - 0.05 / 8, n - 1))
    few, enough = power.values()
    assert few < 0.8 + 0.003 and enough > 0.8 - 0.003
    assert paired(d, 0, margin=1e-5)["n_for_margin"] is None and paired(d, 0)["n_for_margin"] is None


def test_welch_against_scipy():
    a, b = [1.9, 2.0, 2.2, 1.95], [1.7, 1.8, 1.65]
    r, theirs = analyze.welch(a, b, margin=0.6, m=2), stats.ttest_ind(a, b, equal_var=False)
    assert (r["n"], r["t"], r["p"], r["df"]) == (7, theirs.statistic, theirs.pvalue, theirs.df)
    assert r["ci_equivalence"] == pytest.approx(list(theirs.confidence_interval(0.95))) and r["equivalent"] is True
    assert analyze.welch([1.0], b)["p"] is None and "more seeds" in analyze.welch([1.0], b)["reason"]


def test_equivalence_is_judged_at_the_level_of_a_prediction():
    r = paired([0.010, 0.012, 0.009, 0.011], [0.009, 0.010, 0.009, 0.012], margin=0.02)
    assert r["equivalent"] is True and max(map(abs, r["ci_equivalence"])) < 0.02
    d = np.array([0.010, 0.012, 0.009, 0.011, 0.016])
    bound = d.mean() + stats.t.ppf(1 - 0.05 / 4, 4) * d.std(ddof=1) / math.sqrt(5)
    assert paired(d, 0, margin=bound + 1e-9, m=4)["equivalent"] is True
    assert paired(d, 0, margin=bound - 1e-9, m=4)["equivalent"] is False
    assert paired(*SLEEP, margin=0.02)["equivalent"] is False and paired(*SLEEP)["equivalent"] is None


def test_holm():
    """R5, and Holm (1979) by hand."""
    assert holm([0.01, None, 0.03]) == [pytest.approx(0.03), None, pytest.approx(0.06)]
    assert holm([]) == [] and holm([0.2]) == [0.2] and holm([None, None]) == [None, None]
    assert holm([0.04, 0.01, 0.03, 0.005]) == pytest.approx([0.06, 0.03, 0.06, 0.02])
    assert holm([0.02, 0.02, 0.9]) == pytest.approx([0.06, 0.06, 0.9])
    assert holm([0.9, 0.8, 1.0]) == [1.0, 1.0, 1.0]
    from statsmodels.stats.multitest import multipletests

    p = np.random.default_rng(0).uniform(0, 0.2, 12)
    assert holm(p) == pytest.approx(multipletests(p, method="holm")[1])


def test_paired_against_statsmodels():
    from statsmodels.stats.weightstats import DescrStatsW, ttost_paired

    rng = np.random.default_rng(3)
    a, b = rng.normal(2, 0.02, 8), rng.normal(2, 0.02, 8)
    r, theirs = paired(a, b, margin=0.02), DescrStatsW(a - b)
    assert r["t"] == pytest.approx(theirs.ttest_mean(0)[0]) and r["p"] == pytest.approx(theirs.ttest_mean(0)[1])
    assert r["ci95"] == pytest.approx(theirs.tconfint_mean(0.05))
    assert r["ci_equivalence"] == pytest.approx(theirs.tconfint_mean(0.1))
    for margin in (0.005, 0.02, 0.05):
        assert paired(a, b, margin=margin)["equivalent"] == (ttost_paired(a, b, -margin, margin)[0] < 0.05)


def test_seeds_and_text_stay_apart():
    """R6: 3 seeds, 200 windows, shifts between seeds, hardly any between windows."""
    rng = np.random.default_rng(0)
    shift = np.array([-0.05, 0.0, 0.05])
    d = shift[:, None] + rng.normal(0, 0.001, (3, 200))
    r = paired(d.mean(1), 0)
    assert (r["n"], r["df"]) == (3, 2)
    assert r["ci95"] == pytest.approx(stats.ttest_1samp(d.mean(1), 0).confidence_interval(0.95))
    se_seed, se_text = standard_errors(d)
    assert se_seed == pytest.approx(stats.sem(d.mean(1)))
    blocks = d[:, :192].mean(0).reshape(12, 16).mean(1)
    assert se_text == pytest.approx(stats.sem(blocks)) and se_text < 0.001
    assert standard_errors(d[:1])[0] is None and standard_errors(d[:, :20])[1] is None


CONFIG = """
dataset = "toy"
n_layer, n_head, n_embd, block_size = 2, 2, 16, 16
bias, device = False, "cpu"
batch_size, max_iters, warmup_iters, eval_interval, learning_rate = 8, 30, 5, 10, 3e-3
arms = {"Full": {}, "FFNOnly": {"attn_residual": False}, "Half": {"attn_gain": 0.5}}
seeds = range(5)
contrasts = [
    ("FFNOnly", "Full", (0, None)), ("Half", "Full", (-9, 9)), ("FFNOnly", "unigram", (5, 6)), ("Full", "bigram")
]
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished experiment in a folder of its own."""
    place = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        words = np.array(["the", "cat", "sat", "on", "a", "mat", "and", "saw", "that", "rat", "ate", "all", "of", "it"])
        Path("toy.txt").write_text(" ".join(np.random.default_rng(0).choice(words, 2500)))
        prepare.main(["toy.txt"])
        Path("toy.py").write_text(CONFIG)
        train.main(["toy.py"])
    return place


@pytest.fixture
def out(finished, tmp_path, monkeypatch):
    """A copy of it, to be spoiled."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return Path("out/toy")


def reported(out="out/toy"):
    analyze.main(["runs", str(out)])
    return json.loads((Path(out) / "report.json").read_text())


def log(out, arm, seed):
    return [json.loads(x) for x in (out / arm / f"seed{seed}" / "log.jsonl").read_text().splitlines()]


def test_a_whole_experiment(out):
    r = reported()
    assert (r["status"], r["deviations"], r["outcome"]) == ("confirmatory", [], "final")
    losses = {arm: [log(out, arm, s)[-1]["val_loss"] for s in range(5)] for arm in ("Full", "FFNOnly", "Half")}
    for arm, values in losses.items():
        a = r["arms"][arm]
        assert (a["n"], a["n_finite"]) == (5, 5) and list(a["seeds"].values()) == values
        assert a["mean"] == pytest.approx(np.mean(values)) and a["sd"] == pytest.approx(np.std(values, ddof=1))
        best = [min(x["val_loss"] for x in log(out, arm, s) if "val_loss" in x) for s in range(5)]
        assert a["best_mean"] == pytest.approx(np.mean(best))
    first, second, third, fourth = r["contrasts"]
    assert (first["a"], first["b"]) == ("FFNOnly", "Full")
    assert first["p"] == pytest.approx(stats.ttest_rel(losses["FFNOnly"], losses["Full"]).pvalue)
    # the reference once more, by counting
    train_text = np.fromfile("data/toy/train.bin", "<u2")
    val = np.fromfile("data/toy/val.bin", "<u2")
    V = json.loads(Path("data/toy/meta.json").read_text())["vocab_size"]
    targets = val[1 : 1 + (len(val) - 1) // 16 * 16]
    p = [(np.sum(train_text == t) + 1) / (len(train_text) + V) for t in targets]
    assert r["references"]["unigram"] == pytest.approx(-np.mean(np.log(p)))
    assert third["p"] == pytest.approx(stats.ttest_1samp(losses["FFNOnly"], r["references"]["unigram"]).pvalue)
    ps = [c["p"] for c in r["contrasts"]]
    assert [c["p_holm"] for c in r["contrasts"]] == pytest.approx(holm(ps))
    windows = np.array([log(out, "FFNOnly", s)[-1]["window_losses"] for s in range(5)])
    reference = np.array(json.loads((out / "plan.json").read_text())["reference_windows"]["unigram"])
    assert third["se_text"] == standard_errors(windows - reference)[1] and fourth["sd_ratio"] is None
    assert r["audit"]["checked"] == 15 and r["audit"]["failed"] == [] and r["audit"]["max_abs_diff"] <= 1e-5
    assert [c["predicted"] for c in r["contrasts"]] == [[0, None], [-9, 9], [5, 6], None]
    low, high = stats.ttest_rel(losses["FFNOnly"], losses["Full"]).confidence_interval(1 - 0.1 / 4)
    assert first["ci_predicted"] == pytest.approx([low, high])
    assert [c["as_predicted"] for c in r["contrasts"]] == [
        True if low > 0 else False if high < 0 else None,
        True,
        False,
        None,
    ]
    text = (out / "report.md").read_text()
    assert "# toy: confirmatory" in text and "FFNOnly − unigram" in text and "nan" not in text.lower()
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")


def test_a_report_is_made_again_without_weights(out):
    before = reported()
    text, picture = (out / "report.md").read_text(), (out / "report.png").read_bytes()
    for path in out.glob("*/*/ckpt.pt"):
        path.unlink()
    shutil.rmtree("data")
    after = reported()
    assert (before["audit"].pop("carried_over"), after["audit"].pop("carried_over")) == (0, 15) and after == before
    assert (out / "report.md").read_text().replace(" (15 by an earlier report)", "") == text
    assert (out / "report.png").read_bytes() == picture
    path = out / "Half/seed0/log.jsonl"  # losses that were never audited do not inherit an audit
    lines = path.read_text().splitlines()
    last = json.loads(lines[-1])
    last |= {"val_loss": last["val_loss"] - 0.5, "window_losses": [x - 0.5 for x in last["window_losses"]]}
    path.write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")
    assert reported()["audit"]["checked"] == 14
    path.write_text("\n".join(lines) + "\n")
    (out / "report.json").unlink()
    assert reported()["audit"]["checked"] == 0 and "none was measured again" in (out / "report.md").read_text()


def test_a_deleted_run_makes_it_exploratory(out):
    shutil.rmtree(out / "Half" / "seed3")
    shutil.copytree(out / "Full" / "seed0", out / "Fall" / "seed0")
    r = reported()
    assert r["status"] == "exploratory"
    assert r["deviations"] == ["Run Fall/seed0 is not in the plan.", "Run Half/seed3 is planned and not finished."]
    half = r["contrasts"][1]
    assert half["p"] is None and half["p_holm"] is None and half["n"] == 0 and "Half/seed3 is missing" in half["reason"]
    assert r["contrasts"][0]["p_holm"] == pytest.approx(holm([c["p"] for c in r["contrasts"]])[0])
    assert r["arms"]["Half"]["n"] == 4 and r["arms"]["Half"]["seeds"]["3"] is None
    assert "not computed" in (out / "report.md").read_text()


def test_heads_of_another_run_are_not_reported(out):
    analyze.main(["heads", "out/toy/Full/seed0", "--windows=4"])
    reported()
    assert "Noise floor (Full/seed0, 4 windows" in (out / "report.md").read_text()
    shutil.copy(out / "Full/seed1/log.jsonl", out / "Full/seed0/log.jsonl")  # as if it had been trained again
    with pytest.raises(UserError, match="Full/seed0/heads/heads.json is not of the run as it is now"):
        reported()


def test_a_diverged_run_stays(out):
    shutil.rmtree(out / "Half" / "seed2")
    plan = json.loads((out / "plan.json").read_text())
    with pytest.MonkeyPatch.context() as patch:  # a run that really diverges, kept under the planned config
        real = train.learning_rate
        patch.setattr(train, "learning_rate", lambda config, step: 1e30 if step > 3 else real(config, step))
        train.main(["toy.py"])
    r = reported()
    assert r["status"] == "confirmatory" and plan["seeds"] == [0, 1, 2, 3, 4]
    half = r["arms"]["Half"]
    assert (half["n"], half["n_finite"], half["mean"], half["sd"], half["seeds"]["2"]) == (5, 4, None, None, None)
    assert "Half/seed2 is missing or diverged" in r["contrasts"][1]["reason"] and r["contrasts"][1]["p"] is None
    assert "5 (1 diverged)" in (out / "report.md").read_text()
    assert r["audit"]["checked"] == 14 and "14 of 14 finished runs measured again" in (out / "report.md").read_text()


def test_a_report_without_spread_prints(out):
    """R1: equal differences, and a single pair."""
    r, plan, _ = analyze.report_runs(out)
    for a, b in (([1.915, 1.904], [1.912, 1.901]), ([1.5], [1.4])):
        r["contrasts"][0] |= paired(a, b)
        analyze.decide(r["contrasts"], 0.05, 0.02)
        text = analyze.markdown(r, plan, "toy")
        assert "not computed" in text and r["contrasts"][0]["reason"] in text and "nan" not in text.lower()


def respoil(path, change):
    c = torch.load(path, weights_only=True)
    change(c)
    torch.save(c, path)


def test_the_audit_names_a_gain_that_changed_after_training(out):
    respoil(out / "Half/seed1/ckpt.pt", lambda c: c["config"].update(attn_gain=0.51))
    r = reported()
    assert r["status"] == "exploratory" and r["audit"]["failed"] == ["Half/seed1"]
    (sentence,) = [d for d in r["deviations"] if "audit" in d]
    assert "Half/seed1" in sentence and "config.attn_gain: planned 0.5, now 0.51" in sentence
    size = float(sentence.split("a window's loss by ")[1].split()[0])
    c = torch.load(out / "Half/seed1/ckpt.pt", weights_only=True)
    shape = {k: c["config"][k] for k in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd", "bias")}
    fresh = model.GPT(model.GPTConfig(**shape, attn_gain=0.51))
    fresh.load_state_dict(c["model"])
    val = prepare.windows(np.fromfile("data/toy/val.bin", "<u2"), 16)
    expected = (model.window_losses(fresh, val) - c["window_losses"]).abs().max()
    assert size == pytest.approx(float(expected), rel=0.1) and size > 1e-5


@pytest.mark.parametrize("when", ["always", "training"])
def test_the_audit_names_a_run_trained_with_another_gain(out, when):
    """Study A's confound: a gain that is not the one that the config says, in all passes or in training passes only."""
    shutil.rmtree(out / "Full/seed0")
    plain = model.Block.forward

    def forward(self, x, mask, tap):
        wrong = when == "always" or torch.is_grad_enabled() or not measuring
        self.config = dataclasses.replace(self.config, attn_gain=0.97 if wrong else 1.0)
        return plain(self, x, mask, tap)

    measuring = []
    real = train.window_losses

    def measured(*args):
        measuring.append(1)
        try:
            return real(*args)
        finally:
            measuring.clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "window_losses", measured)
        patch.setattr(model.Block, "forward", forward)
        train.main(["toy.py"])
    r = reported()
    assert r["audit"]["failed"] == ["Full/seed0"] and r["status"] == "exploratory"
    (sentence,) = r["deviations"]
    assert ("a window's loss by" in sentence) == (when == "always") and "the training path's loss by" in sentence


def test_a_changed_plan_shows(out):
    train.main(["toy.py", "--margin=0.5", "--amend=a wider margin"])
    r = reported()
    assert r["status"] == "exploratory" and len(r["deviations"]) == 1
    assert "a wider margin (margin: planned 0.02, now 0.5)" in r["deviations"][0]


def test_a_run_of_another_config_shows(out):
    path = out / "Full/seed0/log.jsonl"
    lines = path.read_text().splitlines()
    last = json.loads(lines[-1])
    last["config"]["beta2"], last["config"]["dtype"] = 0.5, "bfloat16"
    last["source"]["train.py"] = "0" * 64
    path.write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")
    r = reported()
    text = "\n".join(r["deviations"])
    assert "Run Full/seed0 differs from the plan in config.beta2: planned 0.95, now 0.5." in text
    assert "source.train.py" in text and r["status"] == "exploratory"
    # T11 and its kind: the two sides were not computed alike
    assert r["contrasts"][0]["reason"] == "the two sides differ in beta2: 0.5, 0.95" and r["contrasts"][0]["n"] == 0
    assert r["contrasts"][0]["p"] is None and r["contrasts"][0]["p_holm"] is None


def test_other_windows_are_refused(out):
    """T11: a second invocation with other validation text stops; its losses would not be set side by side."""
    with pytest.raises(UserError, match="plans another experiment"):
        train.main(["toy.py", "--eval_tokens=100"])
    last = log(out, "Full", 0)[-1]
    settings = last["config"] | last["data"]
    assert analyze.unlike([settings, settings]) is None
    assert analyze.unlike([settings, settings | {"windows": 3}]).startswith("the two sides differ in windows: 3")
    train.main(["toy.py", "--eval_tokens=100", "--amend=a trial"])  # the references are counted on fewer windows now
    r = reported()
    assert r["contrasts"][0]["p"] is not None and r["contrasts"][2]["p"] is None
    assert r["contrasts"][2]["reason"].startswith("the two sides differ in windows: ")


def test_a_foreign_pickle_is_refused_and_not_run(out):
    class Bomb:
        def __reduce__(self):
            return (open, ("exploded", "w"))

    import pickle

    path = out / "Full/seed0/ckpt.pt"
    for data in (pickle.dumps(Bomb()), b"", path.read_bytes()[:5000]):
        path.write_bytes(data)
        with pytest.raises(UserError, match="Full/seed0/ckpt.pt is damaged, or no checkpoint of ours"):
            reported()
    torch.save({"model": {}}, path)
    with pytest.raises(UserError, match="damaged, or no checkpoint of ours"):
        reported()
    assert not Path("exploded").exists()


def test_errors(tmp_path):
    for argv, message in (
        (["runs", str(tmp_path)], "plan.json not found"),
        (["runs"], "runs: name one OUT"),
        (["run", "x"], "unknown command 'run'"),
        (["runs", "--x=1", "y"], "unknown flag --x"),
    ):
        with pytest.raises(UserError, match=message):
            analyze.main(argv)
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(UserError, match="no JSON"):
        analyze.main(["runs", str(tmp_path)])
    for damaged, message in (("[]", "holds a list"), ("{}", "holds no config"), ("null", "holds a NoneType")):
        (tmp_path / "plan.json").write_text(damaged)
        with pytest.raises(UserError, match=f"plan.json is damaged, it {message}"):
            analyze.main(["runs", str(tmp_path)])


EMPTY = dict.fromkeys(analyze.RECORD) | {"status": "finished"}


@pytest.mark.parametrize(
    "tail, words",
    [
        (json.dumps(EMPTY), "does not hold the losses"),
        (json.dumps(EMPTY | {"status": "weird", "val_loss": 1.0, "window_losses": [1.0]}), "that of a weird run"),
        (json.dumps(EMPTY | {"status": "diverged", "val_loss": 1.0}), "does not hold the losses"),
        (json.dumps(EMPTY | {"val_loss": 1.0, "window_losses": [1.0, None]}), "does not hold the losses"),
        ('{"iter": 3, "val_loss": NaN}', "NaN"),
        ("5", "line 5 is no row"),
        ("null", "no row"),
        ('{"iter": 3', "Expecting"),
    ],
)
def test_a_damaged_log_is_named(out, tail, words):
    with open(out / "Full/seed0/log.jsonl", "a") as f:
        f.write(tail + "\n")
    with pytest.raises(UserError, match=f"Full/seed0/log.jsonl is damaged .*{words}.* delete"):
        reported()


def test_a_packed_log_is_read_like_the_plain_one(out):
    whole = reported()
    for path in out.glob("*/*/log.jsonl"):
        path.with_name("log.jsonl.xz").write_bytes(lzma.compress(path.read_bytes()))
        path.unlink()
    assert not list(out.glob("*/*/log.jsonl")) and reported() == whole
    path = out / "Full/seed0/log.jsonl.xz"
    good = path.read_bytes()
    for damaged in (good[:-40], good[:60] + b"?" + good[61:], b"", b"no archive"):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"Full/seed0/log\.jsonl\.xz is damaged .* delete"):
            reported()


def test_a_damaged_report_is_written_anew(out):
    whole = reported()
    for damaged in ("[]", "", '{"audit": 5}'):
        (out / "report.json").write_text(damaged)
        assert reported() == whole


def test_a_checkpoint_and_a_log_that_disagree_on_the_end_fail_the_audit(out):
    respoil(out / "Full/seed0/ckpt.pt", lambda c: c.update(status="diverged"))
    path = out / "Half/seed0/log.jsonl"
    lines = path.read_text().splitlines()
    last = json.loads(lines[-1]) | {"status": "diverged", "val_loss": None, "window_losses": None}
    path.write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")
    r = reported()
    assert r["audit"]["failed"] == ["Full/seed0", "Half/seed0"] and r["status"] == "exploratory"
    assert all("ckpt.pt and log.jsonl differ in status" in d for d in r["deviations"])


def test_a_loss_during_training_that_was_altered_fails_the_audit(out):
    path = out / "Full/seed0/log.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps(json.loads(lines[0]) | {"val_loss": 0.1}), *lines[1:]]) + "\n")
    r = reported()
    assert r["audit"]["failed"] == ["Full/seed0"] and "differ in val_history" in r["deviations"][0]


@pytest.mark.parametrize("flag, value", [("n_layer", 3), ("removal", "fixed"), ("removal", "slef"), ("n_head", None)])
def test_a_config_that_the_weights_do_not_fit_is_named(out, flag, value):
    respoil(out / "Half/seed1/ckpt.pt", lambda c: c["config"].update({flag: value}))
    with pytest.raises(UserError, match="Half/seed1/ckpt.pt is damaged, or no checkpoint of ours"):
        reported()


def test_a_checkpoint_that_says_another_eval_tokens_fails_the_audit(out):
    respoil(out / "Half/seed1/ckpt.pt", lambda c: c["config"].update(eval_tokens=100))
    r = reported()
    assert r["audit"]["failed"] == ["Half/seed1"] and "config.eval_tokens: planned None, now 100" in r["deviations"][0]


def test_many_missing_runs_are_one_sentence_an_arm(out):
    for seed in (1, 2, 4):
        shutil.rmtree(out / f"Half/seed{seed}")
    assert reported()["deviations"] == [
        "Run Half/seed1 is planned and not finished; so with 2 more: Half/seed2, Half/seed4."
    ]


def test_arms_have_their_own_colours():
    styles = report.arm_styles(
        [a + b for b in ("", "+NoRouting", "+SelfBias") for a in ("Full", "Attn", "FFN", "None")]
    )
    assert len({(s["color"], s["linestyle"]) for s in styles.values()}) == 12
    assert styles["FFN+SelfBias"]["color"] == styles["FFN"]["color"]
    many = report.arm_styles([f"arm{i}" for i in range(20)])
    assert len({(s["color"], s["linestyle"]) for s in many.values()}) == 20
    mixed = report.arm_styles([*(f"arm{i}" for i in range(9)), "NoResidual+Help"])
    assert len({(s["color"], s["linestyle"]) for s in mixed.values()}) == 10
    alone = report.arm_styles(["FFNOnly", "Help250"])
    assert alone["FFNOnly"]["color"] == styles["FFN"]["color"] == report.COLOURS[2]


def test_a_failed_audit_is_not_forgotten_with_its_checkpoint(out):
    respoil(out / "Half/seed1/ckpt.pt", lambda c: c["model"]["wte.weight"].mul_(1.1))
    first = reported()
    assert first["status"] == "exploratory" and first["audit"]["failed"] == ["Half/seed1"]
    (out / "Half/seed1/ckpt.pt").unlink()
    some = reported()
    assert some["deviations"] == first["deviations"] and some["audit"]["checked"] == 15
    assert "15 of 15 finished runs measured again (1 by an earlier report), 1 failed" in (out / "report.md").read_text()
    for path in out.glob("*/*/ckpt.pt"):
        path.unlink()
    none = reported()
    assert none["status"] == "exploratory" and none["deviations"] == first["deviations"]


def test_a_copied_run_is_no_run_of_its_own(out):
    shutil.rmtree(out / "Full/seed1")
    shutil.copytree(out / "Full/seed0", out / "Full/seed1")
    r = reported()
    assert r["status"] == "exploratory" and r["deviations"] == [
        "Run Full/seed1 differs from the plan in seed: planned 1, now 0."
    ]


def test_a_loss_that_is_not_the_mean_of_its_windows_shows(out):
    path = out / "Full/seed0/log.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:-1], json.dumps(json.loads(lines[-1]) | {"val_loss": 1.0})]) + "\n")
    r = reported()
    assert r["status"] == "exploratory" and "val_loss 1.0, but its window_losses have mean" in r["deviations"][0]


# --- a plan binds


def edited(path, change):
    """Change a JSON file as an attacker would, keeping all else."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value, indent=1))


@pytest.mark.parametrize(
    "part, change",
    [
        ("margin", lambda p: p.update(margin=0.5)),
        ("alpha", lambda p: p.update(alpha=0.2)),
        ("contrasts", lambda p: p["contrasts"][0].__setitem__(2, [-1, 1])),
        ("contrasts", lambda p: p["contrasts"].pop()),
        ("references", lambda p: p["references"].update(unigram=2.0)),
        ("reference_windows", lambda p: p["reference_windows"]["unigram"].__setitem__(0, 1.0)),
        ("looks", lambda p: p.update(looks=[3, 5])),
        ("tune_seeds", lambda p: p.update(tune_seeds=1)),
        ("config", lambda p: p["config"].update(max_iters=31)),
    ],
)
def test_s1_a_plan_that_was_edited_after_the_runs_is_exploratory(out, part, change):
    edited(out / "plan.json", change)
    r = reported()
    assert r["status"] == "exploratory"
    (sentence,) = [d for d in r["deviations"] if "another plan than plan.json is now" in d]
    assert f"now: {part} changed; so with 14 more" in sentence


def test_s1_the_untouched_plan_and_what_does_not_bind_stay_confirmatory(out):
    edited(out / "plan.json", lambda p: p["config"].update(log_interval=7, out_dir="elsewhere", threads=3))
    edited(out / "plan.json", lambda p: p.update(time="2020", commit="abc"))
    assert reported()["status"] == "confirmatory"


def test_rules_that_changed_after_the_plan_make_it_exploratory(out, monkeypatch):
    monkeypatch.setattr(analyze, "RULES", "another rule")
    r = reported()
    assert r["status"] == "exploratory" and r["rules"] == "another rule"
    assert "The plan decides by outcome: loss over the whole" in r["deviations"][0]
    assert "this report by: another rule." in r["deviations"][0]


def test_s2_arms_that_were_trained_with_other_settings_are_not_compared(out):
    shutil.rmtree(out / "FFNOnly")
    train.main(["toy.py", "--learning_rate=1e-3", "--amend=x"])
    r = reported()
    assert r["contrasts"][0]["reason"] == "the two sides differ in learning_rate: 0.001, 0.003"
    assert (r["contrasts"][0]["n"], r["contrasts"][0]["p"], r["contrasts"][0]["verdict"]) == (0, None, None)
    assert "is not computed: the two sides differ in learning_rate" in r["contrasts"][0]["sentence"]
    assert r["contrasts"][3]["p"] is not None  # Full against its reference is as it was


def test_s3_dropout_masks_of_other_processes_are_not_compared(out):
    for seed, processes in ((0, 1), (1, 2)):
        last = log(out, "Full", seed)[-1]
        for rate, alike in ((0.0, True), (0.2, False)):
            row = last | {"config": last["config"] | {"dropout": rate}, "processes": processes}
            first = log(out, "Full", 0)[-1]
            first = first | {"config": first["config"] | {"dropout": rate}, "processes": 1}
            why = analyze.unlike([analyze.settings_of(x, set()) for x in (first, row)])
            assert (why is None) == (alike or processes == 1)
            assert why is None or why == "the two sides differ in processes: 1, 2"


def test_s4_a_weight_changed_in_its_last_digits_is_named(out):
    def nudge(c):
        c["model"]["wte.weight"][3, 3] += 1e-6

    respoil(out / "Half/seed1/ckpt.pt", nudge)
    r = reported()
    assert r["status"] == "exploratory" and r["audit"]["failed"] == ["Half/seed1"]
    assert "its weights are not those that were trained" in r["deviations"][0]


def test_c6_weights_that_are_no_numbers_and_a_folder_copied_twice(out):
    respoil(out / "Half/seed1/ckpt.pt", lambda c: c["model"]["ln_f.weight"].fill_(math.nan))
    shutil.copytree(out / "Full/seed0", out / "Full/seed7")
    r = reported()
    assert "Run Full/seed7 is not in the plan." in r["deviations"]
    assert any("Half/seed1" in d and "the weights in ckpt.pt are not finite" in d for d in r["deviations"])
    assert "15 of 15 finished runs measured again, 1 failed" in (out / "report.md").read_text()


def test_the_audit_counts_the_references_again(out):
    """A plan and records that were rewritten alike, but not the text."""

    def lower(plan):
        plan["reference_windows"]["unigram"] = [x - 0.5 for x in plan["reference_windows"]["unigram"]]
        plan["references"]["unigram"] -= 0.5

    edited(out / "plan.json", lower)
    bound = train.binding(json.loads((out / "plan.json").read_text()))
    for path in out.glob("*/*/log.jsonl"):
        lines = path.read_text().splitlines()
        last = json.loads(lines[-1]) | {"binding": bound, "binding_sha256": model.digest(bound)}
        path.write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")
    r = reported()
    assert r["status"] == "exploratory" and len(r["audit"]["failed"]) == 15
    assert "the references in plan.json are not those of the text" in r["deviations"][0]


def test_a_reference_edited_before_training_is_no_mean_of_its_windows(out):
    """One file, changed between --plan and the first step, so that every run records its hash."""
    shutil.rmtree("out")
    train.main(["toy.py", "--plan"])
    edited(out / "plan.json", lambda p: p["references"].update(unigram=1.0))
    train.main(["toy.py", "--seeds=0"])
    assert any("unigram in plan.json is not the mean of its windows" in d for d in reported()["deviations"])


def test_an_amendment_that_was_cut_out_shows(out):
    train.main(["toy.py", "--margin=0.5", "--amend=wider", "--plan"])
    shutil.rmtree(out / "Full/seed0")
    train.main(["toy.py", "--margin=0.5"])
    edited(out / "plan.json", lambda p: p.update(amendments=[]))
    r = reported()
    assert any("amendments changed" in d or "amendments" in d for d in r["deviations"]) and r["status"] == "exploratory"


def test_a_record_that_changed_since_it_was_audited_shows_without_weights(out):
    reported()
    for path in out.glob("*/*/ckpt.pt"):
        path.unlink()
    path = out / "Full/seed2/log.jsonl"
    lines = path.read_text().splitlines()
    last = json.loads(lines[-1])
    last["window_losses"] = last["window_losses"][::-1]  # the same mean
    path.write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")
    r = reported()
    assert r["audit"]["failed"] == ["Full/seed2"] and r["audit"]["checked"] == 14
    assert "The record of run Full/seed2 is not the one that an earlier report audited." in r["deviations"]


@pytest.mark.parametrize("key", ["parameters", "sample", "seconds", "weights_sha256", "threads"])
def test_what_the_record_claims_is_compared_with_the_checkpoint(out, key):
    path = out / "Full/seed2/log.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:-1], json.dumps(json.loads(lines[-1]) | {key: 0})]) + "\n")
    r = reported()
    assert r["audit"]["failed"] == ["Full/seed2"] and f"differ in {key}" in r["deviations"][0]


def test_a_look_whose_runs_were_deleted_after_the_report_shows(out):
    Path("toy.py").write_text(CONFIG + "looks = (2, 5)\nmax_iters = 6\n")
    train.main(["toy.py", "--out_dir=out/looks"])
    assert reported("out/looks")["look"] == 5
    shutil.rmtree("out/looks/Half/seed4")
    r = reported("out/looks")
    assert (r["look"], r["status"]) == (2, "exploratory")
    assert "An earlier report was made at the look of 5 seeds, of which runs are gone." in r["deviations"]


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.update(seeds=[]),
        lambda p: p.update(contrasts=[["Full", "Nobody"]]),
        lambda p: p.update(arms=5),
        lambda p: p["packages"].clear(),
        lambda p: p.update(data=None),
    ],
)
def test_a_plan_with_wrong_types_is_one_line(out, change):
    edited(out / "plan.json", change)
    with pytest.raises(UserError, match="out/toy: a file of it is damaged"):
        reported()


@pytest.mark.parametrize("flags", [["--prompt="], ["--tokens=0"], ["--temperature=0.0"], ["--temperature=-1.0"]])
def test_a_sample_that_can_not_be_is_one_line(out, flags, capsys):
    with pytest.raises(UserError, match="--prompt must hold a character"):
        analyze.main(["sample", "out/toy/Full/seed0", *flags])
    analyze.main(["sample", "out/toy/Full/seed0", "out/toy/Half/seed1", "--tokens=30", "--prompt=the "])
    said = capsys.readouterr().out
    assert "--- Full/seed0\nthe " in said and "--- Half/seed1\nthe " in said
    with pytest.raises(UserError, match="out/toy/Full holds several runs: name one, such as out/toy/Full/seed0"):
        analyze.main(["sample", "out/toy/Full"])


# --- looks, families, interactions: on records made from numbers


def experiment(losses, contrasts, **more):
    """(plan, runs) as report_runs reads them. losses: {arm: [loss of seed 0, ...]}, None for a run that is missing."""
    n = max(map(len, losses.values()))
    config = {"block_size": 4, "dropout": 0.0, "learning_rate": 1e-3}
    plan = {"config": config, "arms": {a: {} for a in losses}, "seeds": list(range(n)), "contrasts": contrasts}
    plan |= {"alpha": 0.05, "margin": 0.02, "looks": [], "tune_seeds": 0, "references": {"unigram": 3.0}}
    plan |= {"reference_windows": {"unigram": [3.0] * 32}, "data": {"windows": 32}} | more
    runs = {}
    for arm, values in losses.items():
        for seed in range(n):
            loss = values[seed] if seed < len(values) else None
            status = "diverged" if loss is not None and math.isinf(loss) else "finished"
            row = {"val_loss": None if status == "diverged" else loss, "window_losses": [loss] * 32, "status": status}
            row |= {"config": config, "data": plan["data"], "source": {}, "torch": "2"}
            runs[arm, seed] = None if loss is None else row
    return plan, runs


def decided(plan, runs):
    return analyze.contrasts_at(plan, runs, analyze.complete_looks(plan, runs))


def test_an_interaction_is_the_paired_test_of_two_differences():
    rng = np.random.default_rng(0)
    a, b, c, d = rng.normal(2, 0.02, (4, 8)).tolist()
    losses = dict(zip("ABCD", (a, b, c, d), strict=True))
    plan, runs = experiment(losses, [[["A", "B"], ["C", "D"], [-9, 9]]])
    (r,) = decided(plan, runs)
    theirs = stats.ttest_rel(np.subtract(a, b), np.subtract(c, d))
    assert r["p"] == pytest.approx(theirs.pvalue) and r["a"] == ["A", "B"] and r["as_predicted"] is True
    assert r["sd_ratio"] is None and r["p_pitman_morgan"] is None and r["family"] == 1
    assert r["sentence"].startswith("(A − B) − (C − D) is undecided")
    runs["C", 3] = None
    (r,) = decided(plan, runs)
    assert r["n"] == 0 and "C/seed3 is missing or diverged" in r["sentence"]


def test_a_family_is_chosen_on_seeds_that_the_contrast_leaves_out():
    losses = {"A@1": [1.0, 1.2, 9.0, 9.1, 9.3], "A@2": [2.0, 2.0, 0.1, 0.2, 0.4], "B@1": [3.0, 3.0, 3.0, 3.1, 3.0]}
    losses |= {"B@2": [math.inf, 1.0, 1.0, 1.0, 1.0], "B@3": [4.0, 4.0, 0.0, 0.0, 0.0]}
    plan, runs = experiment(losses, [["A@*", "B@*"], ["A@*", "unigram"], ["A@1", "B@1"]], tune_seeds=2)
    tuned, against, plain = decided(plan, runs)
    assert tuned["chosen"] == ["A@1", "B@1"] and tuned["n"] == 3 and list(tuned["differences"]) == ["2", "3", "4"]
    assert tuned["p"] == pytest.approx(stats.ttest_rel([9.0, 9.1, 9.3], [3.0, 3.1, 3.0]).pvalue)
    assert against["chosen"] == ["A@1", "unigram"] and against["mean"] == pytest.approx(9.1333333 - 3)
    assert plain["n"] == 5 and plain["chosen"] is None
    assert "A@1 ends" in tuned["sentence"] and "Chosen for A@* and B@* on other seeds." in tuned["sentence"]
    runs["A@2", 1] = None
    assert "A@2 has not finished the seeds that choose among A@*" in decided(plan, runs)[0]["reason"]


def test_the_edge_of_a_grid_is_named():
    losses = {f"A@{k}": [1.0 + 0.1 * k, 1.0 + 0.1 * k, 1.0, 1.1] for k in range(4)}
    plan, runs = experiment(losses, [["A@*", "unigram"]], tune_seeds=2)
    plan["arms"] = {f"A@{k}": {"learning_rate": 10.0**-k, "min_lr": 10.0 ** -(k + 1)} for k in range(4)}
    assert analyze.edges(plan, decided(plan, runs)) == [
        "A@0 lies at the edge of its grid of learning_rate: a better value may lie beyond."
    ]
    (line,) = report.doses(plan)["learning_rate"].values()
    assert [value for value, _ in line] == [1e-3, 1e-2, 1e-1, 1.0]


def test_looks_divide_alpha_and_the_first_that_decides_stands():
    rng = np.random.default_rng(2)
    a = [2.0 + x for x in rng.normal(0, 0.01, 8)]
    losses = {"A": a, "B": [x - 0.01 + y for x, y in zip(a, rng.normal(0, 0.004, 8), strict=True)], "C": a[::-1]}
    contrasts = [["A", "B"], ["A", "C"]]
    plan, runs = experiment(losses, contrasts, looks=[4, 8])
    first, last = decided(plan, runs)
    whole, _ = decided(*experiment(losses, contrasts))
    few = {k: v[:4] for k, v in losses.items()}
    at_four, _ = decided(*experiment(few, contrasts, alpha=0.025))
    assert at_four["verdict"] == "higher" and whole["n"] == 8
    assert (first["n"], first["p"], first["verdict"]) == (4, at_four["p"], "higher")
    assert first["sentence"].endswith(" At the look of 4 seeds.")
    assert last["n"] == 8 and last["sentence"].endswith(" At the look of 8 seeds.")
    assert last["ci_equivalence"] == pytest.approx(
        list(stats.ttest_rel(losses["A"], losses["C"]).confidence_interval(1 - 2 * 0.025 / 2))
    )
    runs["C", 6] = None  # of the later look: it is not complete, and missing runs are no fault
    assert analyze.complete_looks(plan, runs) == [4] and decided(plan, runs)[1]["n"] == 4


def test_a_report_at_a_look_is_confirmatory_and_names_it(out, tmp_path):
    Path("toy.py").write_text(CONFIG + "looks = (2, 5)\n")
    train.main(["toy.py", "--out_dir=out/looks", "--seeds=0-2"])
    r = reported("out/looks")
    assert (r["status"], r["look"], r["deviations"]) == ("confirmatory", 2, [])
    assert list(r["arms"]["Full"]["seeds"]) == ["0", "1"] and all(c["n"] == 2 for c in r["contrasts"])
    assert "This is the look at 2 of 5 seeds." in Path("out/looks/report.md").read_text()


def test_what_matching_bought():
    rng = np.random.default_rng(0)
    shared = rng.normal(size=(200,))
    a, b = shared + rng.normal(size=200), shared + rng.normal(size=200)
    m = analyze.matching([(a, b)])
    assert m["r"] == pytest.approx(stats.pearsonr(a, b).statistic) and m["ci95"][0] < 0.5 < m["ci95"][1]
    fisher = np.tanh(np.arctanh(m["r"]) + np.array([-1.96, 1.96]) / math.sqrt(197))
    assert m["ci95"] == pytest.approx(fisher, abs=0.03)
    assert analyze.matching([(a[:7], b[:7])]) is None and analyze.matching([]) is None


# --- anyone's results


def test_a_table_of_twelve_losses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a, b = [3.31, 3.29, 3.3, 3.33, 3.28, 3.3], [3.27, 3.28, 3.25, 3.3, 3.26, 3.25]
    rows = [f"{arm},{s},{x}" for arm, values in (("$x$", a), ("_base", b)) for s, x in enumerate(values)]
    Path("t.csv").write_text("arm,seed,loss\n" + "\n".join(rows) + "\n")
    analyze.main(["table", "t.csv", "--contrasts=$x$:_base,_base:3.28", "--margin=0.1"])
    r = json.loads(Path("out/table/t/report.json").read_text())
    pair, one = stats.ttest_rel(a, b), stats.ttest_1samp(b, 3.28)
    assert r["status"] == "exploratory" and [c["p"] for c in r["contrasts"]] == pytest.approx([pair.pvalue, one.pvalue])
    assert [c["t"] for c in r["contrasts"]] == pytest.approx([pair.statistic, one.statistic])
    assert "$x$ ends 0.0333 nats above _base" in Path("out/table/t/report.md").read_text()
    assert Path("out/table/t/contrasts.csv").read_text().count("\n") == 3
    assert Path("out/table/t/contrasts.png").read_bytes().startswith(b"\x89PNG")
    analyze.main(["table", "t.csv", "--contrasts=$x$:_base", "--unmatched", "--out=u"])
    r, theirs = json.loads(Path("u/report.json").read_text()), stats.ttest_ind(a, b, equal_var=False)
    assert r["contrasts"][0]["p"] == pytest.approx(theirs.pvalue) and "12 runs" in r["contrasts"][0]["sentence"]
    assert "nothing was paired" in Path("u/report.md").read_text()
    Path("n.csv").write_text("loss,arm\n" + "\n".join(f"{x},A\n{y},B" for x, y in zip(a, b, strict=True)))
    analyze.main(["table", "n.csv", "--contrasts=A:B", "--out=n"])  # no seeds: nothing to pair by
    assert json.loads(Path("n/report.json").read_text())["contrasts"][0]["p"] == pytest.approx(theirs.pvalue)


@pytest.mark.parametrize(
    "rows, contrasts, words",
    [
        ("A,0,1\nA,0,2\nB,0,1", "A:B", "row 3: seed 0 of A is there twice"),
        ("A,0,1\nB,0,lots", "A:B", "row 3: loss is 'lots'"),
        ("A,0,1\nB,1,2", "A:B", "seed 0 is there for one of A and B"),
        ("A,0,1\nB,0,nan", "A:B", "row 3: the loss is not finite"),
        ("A,0,1\nB,0,2", "A:C", "say --contrasts=A:B or A:3.28, .* of the arms A, B"),
        ("A,0,1\nB,0,2", "", "say --contrasts=A:B or A:3.28"),
    ],
)
def test_a_bad_table_is_one_line_with_the_row(tmp_path, rows, contrasts, words):
    path = tmp_path / "t.csv"
    path.write_text("arm,seed,loss\n" + rows + "\n")
    with pytest.raises(UserError, match=words):
        analyze.main(["table", str(path), f"--contrasts={contrasts}", f"--out={tmp_path}/out"])
    assert not (tmp_path / "out").exists()


def test_sentences():
    """One form each, by hand."""
    c = {"a": "A", "b": "B", "n": 8, "mean": 1.3406, "ci95": [1.3283, 1.3529], "ci_equivalence": [1.32, 1.36]}
    c |= {"p": 1e-9, "equivalent": False, "mde80": 0.02, "n_for_margin": 9, "reason": None, "predicted": [0, None]}
    c |= {"as_predicted": True, "ci_predicted": [1.32, 1.36]}

    def said(**changes):
        return analyze.decide([c | changes], 0.05, 0.02)[0]["sentence"]

    assert said() == "A ends 1.341 nats above B (95% interval 1.328 to 1.353, 8 seeds): as predicted."
    small = {"mean": -0.004, "ci95": [-0.005, -0.003], "equivalent": True, "predicted": None}
    assert said(**small, as_predicted=None) == (
        "A ends 0.0040 nats below B (95% interval 0.0030 to 0.0050, 8 seeds), a difference within the margin of 0.02."
    )
    near = {"mean": 0.001, "ci95": [-0.002, 0.004], "ci_equivalence": [-0.0015, 0.0035], "p": 0.4, "predicted": None}
    assert said(**near, equivalent=True, as_predicted=None) == (
        "A and B are equivalent within 0.02 nats (90% interval -0.0015 to +0.0035, 8 seeds)."
    )
    assert said(**near, as_predicted=None, n=3) == (
        "A − B is undecided (p_holm 0.4): +0.0010 nats seen (95% interval -0.0020 to +0.0040, 3 seeds). 3 seeds find a"
        " difference of 0.02 with 80% power, about 9 one as large as the margin of 0.02 (but 3 hardly tell the spread)."
    )
    assert said(p=None, mean=None, reason="B/seed1 is missing") == "A − B is not computed: B/seed1 is missing."


def test_p_values_are_printed_as_far_as_they_mean_something():
    assert [report.p_value(p) for p in (None, 1e-14, 9.9e-5, 1e-4, 0.0312)] == [
        "–",
        "< 0.0001",
        "< 0.0001",
        "0.0001",
        "0.0312",
    ]


def test_figures_with_hard_names_many_contrasts_and_a_diverged_run(tmp_path):
    """S8: names are drawn as they are written."""
    import matplotlib.text

    names = ["$x$", "_hidden", "n" * 60, *(f"arm{i}" for i in range(9)), "base"]
    rng = np.random.default_rng(0)
    losses = {name: rng.normal(2 + 0.1 * i, 0.01, 4).tolist() for i, name in enumerate(names)}
    losses["arm0"][2] = math.inf
    plan, runs = experiment(losses, [[name, "base"] for name in names[:-1]])
    drawn = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "save_figure", lambda fig, path, title: drawn.append(fig))
        report.figure_contrasts(tmp_path / "c.png", decided(plan, runs), 0.02, "t")
    texts = [t.get_text() for t in drawn[0].findobj(matplotlib.text.Text)]
    assert r"\$x\$ − base" in texts and "_hidden − base" in texts and "not computed" in texts
    assert any(text.replace("\n", "").startswith("n" * 60) for text in texts)
    from matplotlib.figure import Figure

    axis = Figure().subplots()
    for name in names[:3]:
        axis.plot([0, 1], gid=name)
    report.legend(axis)
    shown = [t.get_text().replace("\n", "") for t in axis.get_legend().get_texts()]
    assert shown == [r"\$x\$", "_hidden", "n" * 60]
