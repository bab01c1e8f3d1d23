"""
GPT with parts that can be taken out.

Notable:
- GPT-2 shaped: Pre-LN, learned positions, GELU (tanh form), fused qkv, tied embeddings. Defaults are plain GPT-2.
- Every ablation is a field of GPTConfig, so it is saved with the weights and is the same wherever the model runs.
- Every parameter is drawn from a random stream of its own, so no flag can shift the initial values of another.
- `tap` sees, and may replace, the output of every attention head. None costs nothing.

This file needs torch and nothing else of this project: copy it.
"""

import contextlib
import hashlib
import math
import time
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

REMOVALS = ("none", "self", "fixed", "rotated", "previous", "matched", "shrink")


@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50304  # GPT-2's 50,257 rounded up to a multiple of 64, which matrix units like
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    n_kv_head: int | None = None  # key-value heads, for grouped-query attention; None: as many as n_head
    dropout: float = 0.0
    bias: bool = True  # in linear layers and layer norms, as GPT-2
    # the ablations: x <- residual * x + gain * branch(norm(x))
    attn_residual: bool | str = True  # "value": what the path carries stays, its gradient is cut
    ffn_residual: bool | str = True
    attn_gain: float = 1.0
    ffn_gain: float = 1.0
    removal: str = "none"  # direction removed from each head's output: one of REMOVALS
    routing: bool = True  # False: every position attends to itself only
    # added to each query's attention logit for its own position; or points ((step, bias), ...), linear between them
    self_bias: float | list | tuple = 0.0

    def check(self):
        """Raises ValueError for a model that can't be built, or would not be what its flags say."""
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}")
        if self.n_kv_head is not None and (self.n_kv_head < 1 or self.n_head % self.n_kv_head):
            raise ValueError(f"n_head={self.n_head} is not divisible by n_kv_head={self.n_kv_head}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must lie in [0, 1)")
        for name in ("attn_residual", "ffn_residual"):
            if getattr(self, name) not in (True, False, "value"):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True, False or 'value'")
        points = self.self_bias if isinstance(self.self_bias, list | tuple) else ((0, self.self_bias),)
        pairs = all(isinstance(p, list | tuple) and len(p) == 2 and type(p[0]) is int and p[0] >= 0 for p in points)
        steps = [p[0] for p in points] if pairs else []
        if not steps or steps != sorted(set(steps)):
            raise ValueError(f"self_bias={self.self_bias} must be a number, or points of rising steps and their biases")
        for value in (self.attn_gain, self.ffn_gain, *(bias for _, bias in points)):
            if type(value) not in (int, float) or not abs(value) < 1e9:
                raise ValueError(
                    f"attn_gain, ffn_gain and self_bias must be finite numbers, and {str(value)[:40]} is none"
                )
        if self.removal not in REMOVALS:
            raise ValueError(f"removal={self.removal!r} must be one of {', '.join(REMOVALS)}")
        if not self.routing and self.removal in ("self", "previous", "matched", "shrink"):
            routes = self.removal == "previous"
            why = "it would route across positions again" if routes else "the head output would be zero"
            raise ValueError(f"routing=False with removal={self.removal!r}: {why}")


def hash_seed(*key):
    """A seed for torch.Generator from any key, such as (seed, "init", name): streams of unlike keys are unrelated."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "little") >> 1


def stream(*key):
    """A CPU torch.Generator of its own for each key."""
    return torch.Generator().manual_seed(hash_seed(*key))


def digest(value, sha=None):
    """sha256 of nested dicts, lists, tensors and plain values: what a file says, whatever it looks like on disk."""
    top = sha is None
    sha = hashlib.sha256() if top else sha
    if isinstance(value, dict):
        for k in sorted(value, key=repr):
            sha.update(repr(k).encode())
            digest(value[k], sha)
    elif isinstance(value, list | tuple):
        sha.update(b"[%d" % len(value))
        for v in value:
            digest(v, sha)
    elif torch.is_tensor(value):
        sha.update(repr((value.dtype, tuple(value.shape))).encode())
        sha.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    else:
        sha.update(repr(value).encode())
    return sha.hexdigest() if top else None


def remove_direction(y, d):
    """
    y minus its projection on d: y - (y.d) d / |d|^2 along the last dimension.

    y, d: (..., D), broadcast against each other. Where d is zero, y comes back as it is. Computed in float32 or wider
    and returned in y's dtype: under autocast einsum or a matrix product would drop to bfloat16, this product does not.
    """
    wide = torch.promote_types(y.dtype, torch.float32)
    a, d = y.to(wide), d.to(wide)
    along = (a * d).sum(-1, keepdim=True) / (d * d).sum(-1, keepdim=True).clamp_min(torch.finfo(wide).tiny)
    return (a - along * d).to(y.dtype)


def matched_direction(y, v, other):
    """
    A direction along which y has as much as along v, in the plane of y and `other`: c y^ + sqrt(1 - c^2) u^.

    y, v, other: (..., D), broadcast. c = cos(y, v); u is `other` made orthogonal to y. Unit length, float32 or wider;
    removing it leaves y as long as removing v does, in another direction. Finite for zero vectors and for y along v.
    """
    y, v, other = (F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1) for x in (y, v, other))
    c = (y * v).sum(-1, keepdim=True)
    u = F.normalize(other - (other * y).sum(-1, keepdim=True) * y, dim=-1)
    return c * y + (y - c * v).norm(dim=-1, keepdim=True) * u  # sqrt(1 - c^2), without its rounding near c = 1


def shrink(y, v):
    """y as long as it would be without its component along v, in its own direction: y sqrt(1 - cos(y, v)^2)."""
    wide = torch.promote_types(y.dtype, torch.float32)
    a, b = F.normalize(y.to(wide), dim=-1), F.normalize(v.to(wide), dim=-1)
    return (y.to(wide) * (a - (a * b).sum(-1, keepdim=True) * b).norm(dim=-1, keepdim=True)).to(y.dtype)


def join(x, branch, residual, gain):
    """
    The residual: x + gain * branch, or gain * branch alone where it is removed.

    "value" has the output of True and the gradients of False. Under autocast a branch is bfloat16: without a skip path,
    too, the stream stays float32, as in the other arms.
    """
    if residual is False:
        return gain * branch.to(x.dtype)
    return torch.add(x.detach() if residual == "value" else x, branch, alpha=gain)


def at_points(value, step):
    """A number as it is; points ((step, value), ...) by step: linear between them, constant outside."""
    if not isinstance(value, list | tuple):
        return value
    for (a, low), (b, high) in zip(value, value[1:], strict=False):
        if step <= b:
            return low + (high - low) * max(0, step - a) / (b - a)
    return value[-1][1] if step >= value[-1][0] else value[0][1]


def linear(n_in, n_out, config):
    """A linear layer whose bias starts at zero, as GPT-2's; GPT draws the weights."""
    layer = nn.Linear(n_in, n_out, bias=config.bias)
    if config.bias:
        nn.init.zeros_(layer.bias)
    return layer


def norm(config):
    """The one place that says what a norm is: two in each block, and one before the logits."""
    return nn.LayerNorm(config.n_embd, bias=config.bias)


class Attention(nn.Module):
    def __init__(self, config, layer, seed):
        super().__init__()
        self.config, self.layer, self.n_head = config, layer, config.n_head
        self.n_kv_head = config.n_kv_head or config.n_head
        H, D = self.n_head, config.n_embd // config.n_head
        self.widths = (H * D, self.n_kv_head * D, self.n_kv_head * D)
        self.c_attn = linear(config.n_embd, sum(self.widths), config)
        self.c_proj = linear(config.n_embd, config.n_embd, config)
        # the controls: drawn in float64 from streams of their own, saved with the weights
        if config.removal == "fixed":
            d = torch.randn(H, D, dtype=torch.float64, generator=stream(seed, "fixed", layer))
            self.register_buffer("directions", F.normalize(d, dim=-1).float())  # (H, D)
        if config.removal in ("rotated", "matched"):
            q, r = torch.linalg.qr(torch.randn(H, D, D, dtype=torch.float64, generator=stream(seed, "rotated", layer)))
            q = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]  # uniform over orthogonal matrices (Mezzadri 2007)
            q[:, :, 0] *= torch.linalg.det(q).sign()[:, None]  # and without reflection
            self.register_buffer("rotations", q.float())  # (H, D, D)

    def remove(self, y, v):
        """What removal says, from each head's output. y: (B, H, T, D), v: (B, H_kv, T, D) -> (B, H, T, D)."""
        kind = self.config.removal
        if kind == "fixed":
            return remove_direction(y, self.directions[:, None, :])  # (H, 1, D)
        own = v.repeat_interleave(self.n_head // self.n_kv_head, dim=1)  # (B, H, T, D), the group's own value
        if kind == "shrink":
            return shrink(y, own)
        if kind == "previous":  # position 0 has no previous: zero, so nothing is removed
            return remove_direction(y, F.pad(own[:, :, :-1], (0, 0, 1, 0)))
        if kind == "rotated":
            return remove_direction(y, own @ self.rotations)
        return remove_direction(y, matched_direction(y, own, own @ self.rotations) if kind == "matched" else own)

    def forward(self, x, mask, tap):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(self.widths, dim=-1)
        q = q.view(B, T, self.n_head, -1).transpose(1, 2)  # (B, H, T, D)
        k = k.view(B, T, self.n_kv_head, -1).transpose(1, 2)  # (B, H_kv, T, D)
        v = v.view(B, T, self.n_kv_head, -1).transpose(1, 2)  # (B, H_kv, T, D)
        if x.device.type == "mps":  # attention over transposed views has given wrong numbers there
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if mask is None else mask.to(q.dtype),
            dropout_p=self.config.dropout if self.training else 0.0,
            is_causal=mask is None,
            enable_gqa=self.n_kv_head != self.n_head,
        )  # (B, H, T, D)
        if tap is not None:
            y = tap(self.layer, y, v)
        if self.config.removal != "none":
            y = self.remove(y, v)
        y = y.transpose(1, 2).reshape(B, T, C)  # heads side by side
        return F.dropout(self.c_proj(y), self.config.dropout, self.training)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.c_fc = linear(config.n_embd, 4 * config.n_embd, config)
        self.c_proj = linear(4 * config.n_embd, config.n_embd, config)

    def forward(self, x):
        return F.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate="tanh")), self.config.dropout, self.training)


class Block(nn.Module):
    def __init__(self, config, layer, seed):
        super().__init__()
        self.config = config
        self.ln_1 = norm(config)
        self.attn = Attention(config, layer, seed)
        self.ln_2 = norm(config)
        self.mlp = MLP(config)

    def forward(self, x, mask, tap):  # (B, T, C) -> (B, T, C)
        c = self.config
        x = join(x, self.attn(self.ln_1(x), mask, tap), c.attn_residual, c.attn_gain)
        return join(x, self.mlp(self.ln_2(x)), c.ffn_residual, c.ffn_gain)


def unreadable(name, error):
    """The ValueError in place of whatever transformers raised: a damaged file can raise anything in its reader."""
    why = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ValueError(f"pretrained model {name!r} can't be read: {why}")


class GPT(nn.Module):
    """
    GPT(config, seed=0): the seed fixes the initial weights and the control directions.

    model(idx) -> (logits, None); model(idx, targets) -> (logits, mean loss in nats per token).
    `tap(layer, y, v) -> y`, when set on the model, gets each layer's head outputs y (B, H, T, D) and values
    v (B, H_kv, T, D) before the model's own removal and the output projection; what it returns takes the place of y.
    """

    tap = None

    def __init__(self, config, seed=0):
        super().__init__()
        config.check()
        self.config = config
        with torch.random.fork_rng(devices=[]):  # what a module draws besides is the same in every arm, too
            torch.manual_seed(hash_seed(seed, "init"))
            self.wte = nn.Embedding(config.vocab_size, config.n_embd)
            self.wpe = nn.Embedding(config.block_size, config.n_embd)
            self.h = nn.ModuleList([Block(config, layer, seed) for layer in range(config.n_layer)])
            self.ln_f = norm(config)
            self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight  # tied
        mask = None  # plain causal attention, without a mask tensor
        if not config.routing or config.self_bias:
            T = config.block_size
            allowed = torch.eye(T, dtype=torch.bool) if not config.routing else torch.ones(T, T).tril().bool()
            mask = torch.zeros(T, T).masked_fill(~allowed, -math.inf)
        self.register_buffer("mask", mask, persistent=False)  # (T, T), added to the attention logits
        self.at_step(0)
        for name, module in self.named_modules():
            # weights of linear and embedding layers are drawn; every other parameter keeps the value that it was given
            if isinstance(module, nn.Linear | nn.Embedding) and module is not self.lm_head:
                # GPT-2: 0.02, and output projections less, as 2 * n_layer of them add up in the residual stream
                std = 0.02 / math.sqrt(2 * config.n_layer) if name.endswith("c_proj") else 0.02
                nn.init.normal_(module.weight, std=std, generator=stream(seed, "init", f"{name}.weight"))

    def at_step(self, step):
        """Set what changes during training, a function of the number of updates done: the bias of self_bias."""
        if self.mask is not None:  # in place, so that nothing is compiled again
            self.mask.diagonal().fill_(at_points(self.config.self_bias, step))

    def logits(self, x):
        """The one place where logits arise: (..., C), after the last norm -> (..., V)."""
        return self.lm_head(x)

    def loss(self, x, targets, reduction):
        """
        Cross-entropy in float32 without the whole matrix of logits where that would be large.

        x: (N, C), targets: (N,) -> "mean": a scalar; "none": (N,), in chunks of rows.
        """
        V = self.config.vocab_size
        if reduction == "none":
            rows = max(1, 2**25 // V)  # 128 MiB of logits at a time
            pairs = zip(x.split(rows), targets.split(rows), strict=True)
            return torch.cat([F.cross_entropy(self.logits(a).float(), b, reduction="none") for a, b in pairs])
        fused = V > 8192 and hasattr(F, "linear_cross_entropy") and torch.is_grad_enabled()
        fused = fused and not torch.is_autocast_enabled(x.device.type) and not torch.compiler.is_compiling()
        # torch's fused loss makes the logits itself: one row tells whether ours are that plain product, so a hack of
        # logits() turns it off. A float32 step at 124M, 4 x 1,024, then peaks at 0.65 of the memory (bench.py
        # --only=memory) and is no slower on a CPU. Float32 only, as the loss comes in the dtype of its inputs
        if fused and torch.equal(self.logits(x[:1]), F.linear(x[:1], self.lm_head.weight)):
            options = nn.LinearCrossEntropyOptions(batch_chunk_size=1024)
            return F.linear_cross_entropy(x, self.lm_head.weight, targets, options=options)
        return F.cross_entropy(self.logits(x).float(), targets)

    def forward(self, idx, targets=None, reduction=None):
        """
        idx, targets: (B, T) integers, T <= block_size -> (logits, loss in nats).

        Without targets (B, T, V) and None; with them (B, T, V) and the mean loss. With a reduction the logits of a
        batch need not be in memory at once, so None and the loss: "mean", for training, or "none", each token's (B, T).
        """
        T = idx.shape[1]
        if self.config.block_size < T:
            raise ValueError(f"{T} tokens are more than block_size={self.config.block_size}")
        mask = None if self.mask is None else self.mask[:T, :T]
        x = self.wte(idx) + self.wpe.weight[:T]  # (B, T, C)
        x = F.dropout(x, self.config.dropout, self.training)
        for block in self.h:
            x = block(x, mask, self.tap)
        x = self.ln_f(x)  # (B, T, C)
        if targets is None:
            return self.logits(x), None
        if reduction is None:
            logits = self.logits(x)
            return logits, F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss = self.loss(x.flatten(0, 1), targets.flatten(), reduction)
        return None, loss.view(targets.shape) if reduction == "none" else loss

    @classmethod
    def from_checkpoint(cls, source):
        """
        The model of a run, in evaluation mode, from its folder, its ckpt.pt, or what torch.load has read from that.

        Fields of GPTConfig that a checkpoint does not name take their defaults. Nothing in the file is executed.
        """
        if not isinstance(source, dict):
            path = Path(source)
            path = path / "ckpt.pt" if path.is_dir() else path
            source = torch.load(path, map_location="cpu", weights_only=True)
        saved = source["config"]
        model = cls(GPTConfig(**{f.name: saved.get(f.name, f.default) for f in fields(GPTConfig)}), source["seed"])
        model.load_state_dict(source["model"])
        model.at_step(source["step"])
        return model.eval()

    @staticmethod
    def pretrained_shape(name):
        """
        The fields of GPTConfig that the weights of a GPT-2 fix, and its block_size, which may be cropped.

        Raises ValueError where the model can't be had, or is no GPT-2 that this file can reproduce.
        """
        from transformers import AutoConfig

        try:
            c = AutoConfig.from_pretrained(name)
        except Exception as e:
            raise unreadable(name, e) from None
        if c.model_type != "gpt2":
            raise ValueError(f"pretrained model {name!r} is a {c.model_type}, not a gpt2")
        # what moves logits too little to be seen in from_pretrained's comparison, and what changes a shape
        needed = {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "n_inner": 4 * c.n_embd}
        for key, value in needed.items():
            if getattr(c, key) not in (value, None):
                raise ValueError(f"pretrained model {name!r} has {key}={getattr(c, key)}; only {value} is supported")
        shape = {k: getattr(c, k) for k in ("vocab_size", "n_layer", "n_head", "n_embd")}
        return {"block_size": c.n_positions, **shape, "bias": True}

    @classmethod
    def from_pretrained(cls, name, seed=0, verify=True, **overrides):
        """
        GPT-2 weights through transformers: "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl" or a local folder.

        overrides: fields of GPTConfig, such as removal="self"; a smaller block_size crops the positions. The seed fixes
        the control directions. verify: compare the plain model's logits with transformers' own, so that no setting and
        no weight of the folder is lost.
        Raises ValueError where the model can't be had, is no GPT-2 that this file can reproduce, or has another shape.
        """
        from transformers import GPT2LMHeadModel, logging

        logging.disable_progress_bar()  # one for each run would hide that of the training
        shape = cls.pretrained_shape(name)
        config = GPTConfig(**(shape | overrides))
        for key, value in shape.items():
            if key == "block_size" and config.block_size > value:
                raise ValueError(f"block_size={config.block_size} is more than the {value} positions of {name!r}")
            if key != "block_size" and getattr(config, key) != value:
                raise ValueError(f"{key}={getattr(config, key)}, but pretrained model {name!r} has {key}={value}")
        if config.n_kv_head not in (None, config.n_head):
            raise ValueError(f"n_kv_head={config.n_kv_head}, but pretrained model {name!r} has no grouped queries")
        try:
            source, info = GPT2LMHeadModel.from_pretrained(name, dtype=torch.float32, output_loading_info=True)
        except Exception as e:
            raise unreadable(name, e) from None
        if lost := sorted(info["missing_keys"]):  # transformers would leave random values there
            raise ValueError(f"pretrained model {name!r} lacks weights ({len(lost)}, such as {lost[0]})")
        weights = source.state_dict()
        plain = cls(GPTConfig(**shape), seed).eval()
        with torch.no_grad():
            for key, p in plain.named_parameters():
                w = weights.get("transformer." + key)
                if w is None:  # a parameter that GPT-2 does not have keeps its initial value
                    continue
                # GPT-2 keeps (in, out), nn.Linear (out, in)
                p.copy_(w.t() if key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) else w)
            if verify:
                idx = torch.randint(shape["vocab_size"], (2, min(64, shape["block_size"])), generator=stream("verify"))
                off = float((plain(idx)[0] - source.eval()(idx).logits).abs().max())
                if not off <= 1e-4:
                    raise ValueError(
                        f"pretrained model {name!r} has a setting or a weight that is lost here: {off:.2g}"
                    )
        if config == plain.config:
            return plain
        del source, weights  # so that the weights are in memory twice at most
        kept = plain.state_dict()
        kept["wpe.weight"] = kept["wpe.weight"][: config.block_size]
        model = cls(config, seed)
        model.load_state_dict(kept, strict=False)  # the controls' directions are the model's own
        return model.eval()

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, generator=None):
        """Sample max_new_tokens after idx (B, T), from the last block_size tokens at each step -> (B, T + new)."""
        for _ in range(max_new_tokens):
            logits, _ = self(idx[:, -self.config.block_size :])
            logits = logits[:, -1] / temperature  # (B, V)
            if top_k is not None:
                kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                logits = logits.masked_fill(logits < kth, -math.inf)
            idx = torch.cat([idx, torch.multinomial(logits.softmax(-1), 1, generator=generator)], dim=1)
        return idx


# ---------------------------------------------------------------------------------------------------------------------
# a step of training, and a measurement


def batch(tokens, seed, step, batch_size, block_size):
    """
    The batch at a step: a pure function of (seed, step), the same for all arms, processes and resumes.

    tokens: (n,) -> (batch_size, block_size + 1) int64; row r is the text from a random start on, inputs and targets.
    """
    starts = torch.randint(len(tokens) - block_size, (batch_size,), generator=stream(seed, "batch", step))
    rows = [tokens[i : i + block_size + 1].astype("int64") for i in starts.tolist()]
    return torch.stack([torch.from_numpy(row) for row in rows])


def learning_rate(config, step):
    """Linear warm-up, then cosine from learning_rate to min_lr at lr_decay_iters."""
    if not config.decay_lr:
        return config.learning_rate
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / (config.warmup_iters + 1)
    done = min(1.0, (step - config.warmup_iters) / max(1, config.lr_decay_iters - config.warmup_iters))
    return config.min_lr + 0.5 * (1 + math.cos(math.pi * done)) * (config.learning_rate - config.min_lr)


def make_optimizer(model, config):
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    betas = (config.beta1, config.beta2)
    groups = [g for g in groups if g["params"]]
    return torch.optim.AdamW(groups, config.learning_rate, betas, fused=config.device != "mps")


def take_step(model, optimizer, rows, micro, autocast, grad_clip, key=None):
    """
    Forward, backward, clip, update: one optimizer step of this process.

    rows: (n, T + 1) tokens, taken micro at a time -> (mean loss of all of them, gradient norm before clipping), two
    tensors. key: where there is dropout, the key of its random stream; each micro-batch has its own.
    """
    total = 0.0
    for i in range(0, len(rows), micro):
        part = rows[i : i + micro]
        if key is not None:
            torch.manual_seed(hash_seed(*key, i // micro))
        # gradients travel between processes with the last micro-batch only; the switch must span forward and backward
        waits = hasattr(model, "no_sync") and i + micro < len(rows)
        with model.no_sync() if waits else contextlib.nullcontext():
            with autocast:
                _, loss = model(part[:, :-1], part[:, 1:], reduction="mean")
            (loss * (micro / len(rows))).backward()
        total += loss.detach() * (micro / len(rows))
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total, norm


@torch.no_grad()
def window_losses(model, windows, rank=0, world=1):
    """
    Mean loss of each window in nats per token, float64 (n,), on the CPU.

    windows: (n, T + 1) integer array or tensor; tokens 0..T-1 of a row predict tokens 1..T. Float32 without autocast,
    dropout off. With world > 1 only every world-th batch, from rank on, is measured and the rest is 0, so the sum over
    ranks is the whole: every window is in the same batch whatever the number of ranks, so its loss has the same bits.
    """
    n, T = windows.shape[0], windows.shape[1] - 1
    batch = max(1, 8192 // T)
    losses = torch.zeros(n, dtype=torch.float64)
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    with torch.autocast(device.type, enabled=False):
        for i in range(rank * batch, n, world * batch):
            w = torch.as_tensor(windows[i : i + batch] + 0)  # a copy, as a view of a file is read-only
            w = w.long().to(device)  # (batch, T + 1)
            _, loss = model(w[:, :-1], w[:, 1:], reduction="none")
            losses[i : i + batch] = loss.cpu().double().mean(1)  # Apple GPUs have no float64
    model.train(training)
    return losses


# ---------------------------------------------------------------------------------------------------------------------
# this machine


def bfloat16_gain():
    """How many times as fast as float32 a product (2048, 384) @ (384, 1536) in bfloat16 is here, best of five."""
    best = {}
    for _ in range(5):
        for dtype in (torch.float32, torch.bfloat16):
            a, b = torch.ones(2048, 384, dtype=dtype), torch.ones(384, 1536, dtype=dtype)
            start = time.perf_counter()
            a @ b
            best[dtype] = min(time.perf_counter() - start, best.get(dtype, math.inf))
    return best[torch.float32] / best[torch.bfloat16]


def compiles():
    """Whether torch.compile works here; a line says why not."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8))
        return True
    except Exception as e:  # a compiler that is absent or broken, in whatever way
        print(f"torch.compile does not work here: {' '.join(str(e).split())[:200]}")
        return False
