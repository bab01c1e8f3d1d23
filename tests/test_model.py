"""model.py against transformers, against slow loops in float64, and against what each flag promises."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from model import GPT, GPTConfig, at_points, join, matched_direction, remove_direction, shrink, stream, window_losses

TINY = {"block_size": 12, "vocab_size": 17, "n_layer": 2, "n_head": 4, "n_embd": 32}
ARMS = {
    "plain": {},
    "attn_only": {"ffn_residual": False},
    "ffn_only": {"attn_residual": False},
    "no_residual": {"attn_residual": False, "ffn_residual": False},
    "gains": {"attn_gain": 0.5, "ffn_gain": 2.0},
    "self": {"removal": "self"},
    "fixed": {"removal": "fixed"},
    "rotated": {"removal": "rotated"},
    "previous": {"removal": "previous"},
    "matched": {"removal": "matched"},
    "shrink": {"removal": "shrink"},
    "value": {"attn_residual": "value"},
    "points": {"self_bias": ((0, 4.0), (10, 0.0))},
    "no_routing": {"routing": False},
    "no_routing_fixed": {"routing": False, "removal": "fixed"},
    "self_bias": {"self_bias": 4.0},
    "dropout": {"dropout": 0.1},
}


def gpt(seed=0, **flags):
    return GPT(GPTConfig(**(TINY | flags)), seed).eval()


def lively(model, scale=8.0):
    """Larger matrices: at 0.02 attention is nearly uniform, and a fault in it would not show."""
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(scale)
    return model


def tokens(batch=3, length=12, vocab=17, seed=0):
    return torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def heads_of(model, idx):
    """{layer: (y before removal, v, head outputs as the projection gets them)}"""
    seen = {}

    def tap(layer, y, v):
        seen[layer] = [y, v]
        return y

    hooks = [
        block.attn.c_proj.register_forward_pre_hook(lambda m, x, i=i: seen[i].append(x[0]))
        for i, block in enumerate(model.h)
    ]
    model.tap = tap
    with torch.no_grad():
        model(idx)
    model.tap = None
    for hook in hooks:
        hook.remove()
    B, T = idx.shape
    return {i: (y, v, z.view(B, T, y.shape[1], -1).transpose(1, 2)) for i, (y, v, z) in seen.items()}


@pytest.mark.parametrize("block_size", [32, 20])
def test_plain_gpt_equals_transformers(tmp_path, block_size):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = {"vocab_size": 101, "n_positions": 32, "n_embd": 48, "n_layer": 3, "n_head": 4}
    theirs = GPT2LMHeadModel(GPT2Config(**shape, initializer_range=0.2)).eval()
    theirs.save_pretrained(tmp_path)
    ours = GPT.from_pretrained(str(tmp_path), block_size=block_size).eval()
    idx = tokens(2, block_size, 101)
    with torch.no_grad():
        expected = theirs(idx, labels=idx)
        logits, loss = ours(idx[:, :-1], idx[:, 1:])
    assert expected.logits.std() > 1  # a live model, where the wrong GELU would show
    torch.testing.assert_close(logits, expected.logits[:, :-1], atol=1e-4, rtol=0)
    assert float(loss) == pytest.approx(float(expected.loss), abs=1e-5)


def test_pretrained_models_that_would_be_wrong_are_refused(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, activation_function="relu")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="activation_function=relu"):
        GPT.from_pretrained(str(tmp_path))
    with pytest.raises(ValueError, match="can't be read"):
        GPT.from_pretrained(str(tmp_path / "nothing"))
    GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    config.write_text(config.read_text().replace('"n_layer": 1', '"n_layer": 2'))
    with pytest.raises(ValueError, match=r"lacks weights \(12, such as transformer.h.1.attn.c_attn.bias\)"):
        GPT.from_pretrained(str(tmp_path))
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match="can't be read"):
        GPT.from_pretrained(str(tmp_path))
    config.write_text(config.read_text().replace('"n_layer": 2', '"n_layer": "two"'))
    with pytest.raises(ValueError, match="can't be read"):
        GPT.pretrained_shape(str(tmp_path))


def slow_attention(q, k, v, self_bias=0.0, routing=True):
    """Loops in float64. q (H, T, D), k, v (H_kv, T, D) -> (H, T, D)"""
    H, T, D = q.shape
    y = torch.zeros(H, T, D, dtype=torch.float64)
    for h in range(H):
        g = h // (H // k.shape[0])
        for i in range(T):
            seen = range(i + 1) if routing else [i]
            scores = [float(q[h, i].double() @ k[g, j].double()) / math.sqrt(D) + self_bias * (i == j) for j in seen]
            weights = [math.exp(s - max(scores)) for s in scores]
            y[h, i] = sum(w / sum(weights) * v[g, j].double() for w, j in zip(weights, seen, strict=True))
    return y


@pytest.mark.parametrize("flags", [{}, {"n_kv_head": 2}, {"n_kv_head": 1}, {"self_bias": 1.5}, {"routing": False}])
def test_attention_against_a_slow_loop(flags):
    model = lively(gpt(**flags))
    idx = tokens(1)
    inputs = {}
    model.h[0].attn.register_forward_pre_hook(lambda m, x: inputs.update(x=x[0]))
    y, v, _ = heads_of(model, idx)[0]
    a = model.h[0].attn
    with torch.no_grad():
        q, k, v2 = a.c_attn(inputs["x"])[0].split(a.widths, -1)  # (T, C) each
    H, D, G = 4, 8, a.n_kv_head
    q, k, v2 = (t.view(12, n, D).transpose(0, 1) for t, n in ((q, H), (k, G), (v2, G)))
    assert torch.equal(v[0], v2)
    slow = slow_attention(q, k, v2, flags.get("self_bias", 0.0), flags.get("routing", True))
    torch.testing.assert_close(y[0].double(), slow, atol=1e-5, rtol=0)


def test_remove_direction():
    g = stream("test")
    y, d = torch.randn(5, 7, 16, generator=g), torch.randn(5, 7, 16, generator=g)
    z = remove_direction(y, d)
    unit = d.double() / d.double().norm(dim=-1, keepdim=True)
    slow = y.double() - (y.double() * unit).sum(-1, keepdim=True) * unit
    torch.testing.assert_close(z.double(), slow, atol=1e-6, rtol=0)
    assert F.cosine_similarity(z, d, dim=-1).abs().max() < 1e-5
    assert torch.equal(remove_direction(y, torch.zeros_like(d)), y)
    y.requires_grad_(), d.requires_grad_()
    remove_direction(y, d * torch.tensor([0.0, 1.0] * 8)).sum().backward()
    remove_direction(y, d * 0).sum().backward()
    assert y.grad.isfinite().all() and d.grad.isfinite().all()
    double = remove_direction(y.double(), d.double())
    assert double.dtype == torch.float64 and F.cosine_similarity(double, d.double(), dim=-1).abs().max() < 1e-14


def test_remove_direction_stays_in_float32_under_autocast():
    g = stream("test")
    y, d = torch.randn(64, 64, generator=g), torch.randn(64, 64, generator=g)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(remove_direction(y, d), remove_direction(y, d.clone()))
        z = remove_direction(y, d)
        low = remove_direction(y.bfloat16(), d.bfloat16())
    assert z.dtype == torch.float32 and F.cosine_similarity(z, d, dim=-1).abs().max() < 1e-5
    # a bfloat16 output is rounded to 8 bits, so a cosine up to 2**-8 is what its storage leaves
    assert low.dtype == torch.bfloat16
    assert F.cosine_similarity(low.double(), d.bfloat16().double(), dim=-1).abs().max() < 2**-8


@pytest.mark.parametrize("attn_residual", [True, False])
@pytest.mark.parametrize("ffn_residual", [True, False])
def test_the_stream_is_float32_under_autocast_in_every_arm(attn_residual, ffn_residual):
    """Or arms would differ in precision as well: a branch is bfloat16, and without a skip path it is all there is."""
    model, seen = gpt(attn_residual=attn_residual, ffn_residual=ffn_residual), []
    for block in model.h:
        block.register_forward_hook(lambda module, args, x: seen.extend([args[0].dtype, x.dtype]))
        block.ln_2.register_forward_hook(lambda module, args, x: seen.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens(1))
    assert len(seen) == 3 * len(model.h) and set(seen) == {torch.float32}


@pytest.mark.parametrize("n_kv_head", [None, 2])
@pytest.mark.parametrize("removal", ["self", "fixed", "rotated", "previous"])
def test_a_removal_leaves_the_output_orthogonal_to_its_direction(removal, n_kv_head):
    model = lively(gpt(removal=removal, n_kv_head=n_kv_head))
    for layer, (y, v, z) in heads_of(model, tokens()).items():
        attn = model.h[layer].attn
        B, H, T, D = y.shape
        d = torch.zeros(B, H, T, D)
        for h in range(H):
            own = v[:, h // (H // v.shape[1])]  # (B, T, D)
            for t in range(T):
                if removal == "self":
                    d[:, h, t] = own[:, t]
                elif removal == "fixed":
                    d[:, h, t] = attn.directions[h]
                elif removal == "rotated":
                    d[:, h, t] = torch.stack([row @ attn.rotations[h] for row in own[:, t]])
                elif t > 0:
                    d[:, h, t] = own[:, t - 1]
        first = 1 if removal in ("self", "previous") else 0  # position 0: own value is all of y, or no previous
        assert F.cosine_similarity(z[:, :, first:], d[:, :, first:], dim=-1).abs().max() < 1e-5
        assert (z - y).abs().max() > 1e-3
        slow = y.double() - (y * d).double().sum(-1, keepdim=True) * d / (d.double() ** 2).sum(-1, keepdim=True)
        torch.testing.assert_close(z[:, :, first:].double(), slow[:, :, first:], atol=1e-5, rtol=0)
        if removal == "previous":
            assert torch.equal(z[:, :, 0], y[:, :, 0])
        if removal == "self":
            assert z[:, :, 0].abs().max() < 1e-6  # y = v there


def test_rotations_are_rotations():
    for block in gpt(removal="rotated").h:
        r = block.attn.rotations.double()
        torch.testing.assert_close(r @ r.mT, torch.eye(8, dtype=torch.float64).expand(4, 8, 8), atol=1e-6, rtol=0)
        torch.testing.assert_close(torch.linalg.det(r), torch.ones(4, dtype=torch.float64), atol=1e-6, rtol=0)


@pytest.mark.parametrize("seed", [0, 1, 1337])
def test_controls_are_unrelated_to_every_initial_tensor(seed):
    """A generator seeded with the seed itself would replay the first tensor's draws as 'arbitrary' directions."""
    shape = TINY | {"n_head": 2, "n_embd": 64}
    controls = [b.attn.directions.flatten() for b in GPT(GPTConfig(**shape, removal="fixed"), seed).h]
    rotated = GPT(GPTConfig(**shape, removal="rotated"), seed)
    controls += [b.attn.rotations.flatten()[:512] for b in rotated.h]
    plain = torch.randn(4096, generator=torch.Generator().manual_seed(seed))
    draws = [p.detach().flatten() for p in rotated.parameters() if p.dim() > 1] + [plain]
    for i, c in enumerate(controls):
        for other in draws + controls[:i]:
            n = min(len(c), len(other))
            r = torch.corrcoef(torch.stack([c[:n], other[:n]]))[0, 1]
            assert abs(r) < 4.5 / math.sqrt(n)  # 4.5 standard errors of a correlation of unrelated numbers


def test_all_arms_start_from_the_same_bits():
    plain = gpt(seed=3).state_dict()
    assert not torch.equal(gpt(seed=4).wte.weight, plain["wte.weight"])
    for flags in ARMS.values():
        other = gpt(seed=3, **flags).state_dict()
        extra = {"directions", "rotations"}
        assert {k for k in other if k.split(".")[-1] not in extra} == set(plain)
        assert all(torch.equal(other[k], plain[k]) for k in plain)


def test_initial_values_have_the_scale_of_gpt2():
    model = GPT(GPTConfig(block_size=64, vocab_size=256, n_layer=8, n_head=4, n_embd=128), 0)
    for name, p in model.named_parameters():
        if p.dim() < 2:
            assert torch.equal(p, torch.zeros_like(p) if name.endswith("bias") else torch.ones_like(p))
        else:
            expected = 0.02 / 4 if name.endswith("c_proj.weight") else 0.02  # sqrt(2 * 8) = 4
            assert float(p.detach().std()) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("arm", ARMS)
def test_causality(arm):
    model = lively(gpt(**ARMS[arm]), 4.0)
    idx = tokens(1)
    changed = idx.clone()
    changed[0, 7] = (idx[0, 7] + 1) % 17
    with torch.no_grad():
        a, b = model(idx)[0], model(changed)[0]
    assert torch.equal(a[0, :7], b[0, :7])
    assert not torch.equal(a[0, 7:], b[0, 7:])
    later = [not torch.equal(a[0, t], b[0, t]) for t in range(8, 12)]
    assert any(later) == ARMS[arm].get("routing", True)  # with routing off nothing crosses positions


def test_without_routing_no_other_token_matters():
    model = lively(gpt(routing=False), 4.0)
    idx = tokens(1)
    for t in range(12):
        others = tokens(1, seed=1)
        others[0, t] = idx[0, t]
        with torch.no_grad():
            assert torch.equal(model(idx)[0][0, t], model(others)[0][0, t])


@pytest.mark.parametrize("attn_residual", [True, False])
@pytest.mark.parametrize("ffn_residual", [True, False])
def test_residuals_and_gains(attn_residual, ffn_residual):
    model = lively(gpt(attn_residual=attn_residual, ffn_residual=ffn_residual, attn_gain=0.3, ffn_gain=1.7))
    block = model.h[0]
    x = torch.randn(2, 12, 32, generator=stream("x"))
    with torch.no_grad():
        middle = attn_residual * x + 0.3 * block.attn(block.ln_1(x), None, None)
        expected = ffn_residual * middle + 1.7 * block.mlp(block.ln_2(middle))
        torch.testing.assert_close(block(x, None, None), expected, atol=1e-5, rtol=0)


def test_tap():
    model = lively(gpt())
    idx = tokens()
    with torch.no_grad():
        plain = model(idx)[0]
        layers = []
        model.tap = lambda layer, y, v: (layers.append(layer), y)[1]
        assert torch.equal(model(idx)[0], plain) and layers == [0, 1]
        model.tap = lambda layer, y, v: y * 0 if layer == 1 else y
        assert not torch.equal(model(idx)[0], plain)
        # what the tap returns goes through the model's own removal
        model = lively(gpt(removal="self"))
        plain = model(idx)[0]
        model.tap = lambda layer, y, v: y + 5 * v
        torch.testing.assert_close(model(idx)[0], plain, atol=1e-3, rtol=1e-4)


def test_losses():
    model = lively(gpt(), 4.0)
    idx = tokens(5, 13)
    with torch.no_grad():
        logits, loss = model(idx[:, :-1], idx[:, 1:])
        none, each = model(idx[:, :-1], idx[:, 1:], reduction="none")
    assert none is None and each.shape == (5, 12)
    p = logits.double().softmax(-1)
    slow = [[-math.log(float(p[b, t, idx[b, t + 1]])) for t in range(12)] for b in range(5)]
    torch.testing.assert_close(each.double(), torch.tensor(slow, dtype=torch.float64), atol=1e-5, rtol=0)
    assert float(loss) == pytest.approx(sum(map(sum, slow)) / 60, abs=1e-5)
    whole = window_losses(model, idx)
    torch.testing.assert_close(whole, torch.tensor(slow, dtype=torch.float64).mean(1), atol=1e-6, rtol=0)


def test_window_losses_do_not_depend_on_ranks_mode_or_autocast():
    model = lively(gpt(dropout=0.5), 4.0).train()
    windows = tokens(3000, 13, seed=5)  # several batches
    whole = window_losses(model, windows)
    assert model.training
    parts = [window_losses(model, windows, rank, 3) for rank in range(3)]
    assert torch.equal(sum(parts), whole) and all((p == 0).any() for p in parts)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(window_losses(model, windows.numpy().astype("uint16")), whole)


def test_generate():
    model = lively(gpt(), 4.0)
    idx = tokens(2, 3)
    greedy = model.generate(idx, 15, top_k=1)
    expected = idx
    for _ in range(15):  # longer than block_size, so the window slides
        with torch.no_grad():
            expected = torch.cat([expected, model(expected[:, -12:])[0][:, -1:].argmax(-1)], 1)
    assert torch.equal(greedy, expected)
    sample = [model.generate(idx, 5, generator=torch.Generator().manual_seed(0)) for _ in range(2)]
    assert torch.equal(*sample)


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"n_embd": 30}, "n_embd=30 is not divisible by n_head=4"),
        ({"n_kv_head": 3}, "n_head=4 is not divisible by n_kv_head=3"),
        ({"removal": "selff"}, "must be one of none, self, fixed, rotated, previous"),
        ({"removal": "self", "routing": False}, "would be zero"),
        ({"removal": "previous", "routing": False}, "route across positions again"),
        ({"attn_gain": math.nan}, "must be finite"),
        ({"n_layer": 0}, "at least 1"),
        ({"dropout": 1.0}, "must lie in"),
    ],
)
def test_impossible_configs(flags, message):
    with pytest.raises(ValueError, match=message):
        GPT(GPTConfig(**(TINY | flags)))


def test_defaults_are_gpt2_and_the_config_is_plain_data():
    assert dataclasses.asdict(GPTConfig()) == {
        "block_size": 1024, "vocab_size": 50304, "n_layer": 12, "n_head": 12, "n_embd": 768, "n_kv_head": None,
        "dropout": 0.0, "bias": True, "attn_residual": True, "ffn_residual": True, "attn_gain": 1.0, "ffn_gain": 1.0,
        "removal": "none", "routing": True, "self_bias": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize("dtype, bound", [(None, 1e-5), (torch.bfloat16, 1e-3)])
def test_the_training_loss_of_a_large_vocabulary(dtype, bound):
    """Whatever path spares the logits: the loss and every gradient are those of plain cross-entropy in float32."""
    model = gpt(vocab_size=9001).train()
    idx = tokens(3, 13, 9001)
    expected, grads = model(idx[:, :-1], idx[:, 1:])[1], {}
    expected.backward()
    for name, p in model.named_parameters():
        grads[name], p.grad = p.grad, None
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        none, loss = model(idx[:, :-1], idx[:, 1:], reduction="mean")
    loss.backward()
    assert none is None and loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=bound)
    for name, p in model.named_parameters():
        assert (p.grad - grads[name]).norm() <= 100 * bound * grads[name].norm() + 1e-7, name


def test_the_residual_as_a_value_has_trues_output_and_falses_gradients():
    g = torch.Generator().manual_seed(0)
    x, branch, upstream = (torch.randn(3, 5, 8, generator=g) for _ in range(3))
    seen = {}
    for residual in (True, False, "value"):
        a, b = x.clone().requires_grad_(), branch.clone().requires_grad_()
        out = join(a, b, residual, 0.7)
        out.backward(upstream)
        seen[residual] = out.detach(), a.grad, b.grad
    assert torch.equal(seen["value"][0], seen[True][0]) and torch.equal(seen["value"][2], seen[False][2])
    assert seen["value"][1] is None and seen[False][1] is None and torch.equal(seen[True][1], upstream)
    assert torch.equal(seen[True][0], torch.add(x, branch, alpha=0.7)) and torch.equal(seen[False][0], 0.7 * branch)


def test_points_by_hand():
    points = ((10, 4.0), (30, 0.0), (40, 1.0))
    assert [at_points(points, s) for s in (0, 10, 15, 20, 30, 35, 40, 99)] == [4, 4, 3, 2, 0, 0.5, 1, 1]
    assert at_points(((5, 2.0),), 0) == at_points(((5, 2.0),), 9) == 2.0 and at_points(1.5, 7) == 1.5


def test_the_bias_of_a_step_is_that_constant_bias():
    idx, model = tokens(), lively(gpt(self_bias=((0, 4.0), (10, 0.0))))
    for step, bias in ((0, 4.0), (4, 2.4), (10, 0.0), (50, 0.0)):
        model.at_step(step)
        plain = gpt(self_bias=bias)
        plain.load_state_dict(model.state_dict())
        with torch.no_grad():
            assert torch.allclose(model(idx)[0], plain(idx)[0], atol=1e-5)


def test_matched_and_shrink_against_a_slow_loop():
    """cos(y, d) = cos(y, v), and what is left is as long as after `self`; also for zeros and for y along v."""
    g = torch.Generator().manual_seed(1)
    y, v, other = (torch.randn(40, 8, generator=g) for _ in range(3))
    y[0], v[1], other[2], v[3], other[4] = 0, 0, 0, -2 * y[3], y[4]
    leaf = y.clone().requires_grad_()
    (remove_direction(leaf, matched_direction(leaf, v, other)) + shrink(leaf, v)).sum().backward()
    assert leaf.grad.isfinite().all()
    d = matched_direction(y, v, other)
    out, less = remove_direction(y, d), shrink(y, v)
    assert d.isfinite().all()
    for i in range(40):
        a, b = y[i].detach().double(), v[i].double()
        c = float(a @ b / (a.norm() * b.norm())) if a.norm() * b.norm() > 0 else 0.0
        left = float(remove_direction(y[i], v[i]).double().norm())
        if i not in (0, 2, 4):  # without another direction there is none to choose
            assert float(a @ d[i].detach().double() / a.norm()) == pytest.approx(c, abs=1e-5)
            assert float(out[i].detach().norm()) == pytest.approx(left, abs=2e-5)
        assert float(less[i].detach().norm()) == pytest.approx(left, abs=2e-5)
        if i > 4:
            assert abs(float(F.cosine_similarity(out[i], v[i], dim=0))) > 1e-3  # another direction than v
            assert float(F.cosine_similarity(less[i], y[i], dim=0)) == pytest.approx(1, abs=1e-5)


def test_a_parameter_of_ones_own_keeps_its_value(monkeypatch):
    """S11: a ReZero gate of zeros starts as zeros, and so the block is the identity."""
    import model as module

    class Gated(module.Block):
        def __init__(self, config, layer, seed):
            super().__init__(config, layer, seed)
            self.gate = torch.nn.Parameter(torch.zeros(2))
            self.heads = torch.nn.Parameter(torch.full((4, 1, 1), 3.0))

        def forward(self, x, mask, tap):
            x = x + self.gate[0] * self.attn(self.ln_1(x), mask, tap)
            return x + self.gate[1] * self.mlp(self.ln_2(x))

    plain = gpt()
    monkeypatch.setattr(module, "Block", Gated)
    gated = gpt()
    assert all(not block.gate.any() and (block.heads == 3).all() for block in gated.h)
    assert all(torch.equal(p, gated.state_dict()[k]) for k, p in plain.state_dict().items())
    idx = tokens()
    with torch.no_grad():
        x = gated.wte(idx) + gated.wpe.weight[:12]
        assert torch.allclose(gated(idx)[0], gated.logits(gated.ln_f(x)), atol=1e-6)
        assert not torch.allclose(gated(idx)[0], plain(idx)[0], atol=1e-3)


def test_a_head_of_its_own_is_not_lost(tmp_path):
    """S6: the config says tied, the weights file holds another output head."""
    import safetensors.torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_positions=16, n_embd=32, n_layer=2, n_head=4, vocab_size=50, initializer_range=0.3)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    weights["lm_head.weight"] = torch.randn(50, 32)
    safetensors.torch.save_file(weights, path, {"format": "pt"})
    with torch.no_grad():
        idx = tokens(2, 16, 50)
        theirs = GPT2LMHeadModel.from_pretrained(tmp_path).eval()(idx).logits
        try:
            ours = GPT.from_pretrained(str(tmp_path))(idx)[0]
        except ValueError as e:
            assert "is lost here" in str(e)
        else:
            assert torch.allclose(ours, theirs, atol=1e-4)
