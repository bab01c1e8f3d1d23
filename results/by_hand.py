"""
One run of residual_1m, routing_1m, or of arm self of self_value_1m, without a line of the project: own tokens, layers,
attention, AdamW and validation.

    python results/by_hand.py input.txt FullResidual 0 500     text, arm, seed, steps of the 2,000 to take

Prints the validation loss every 250 steps, to be compared with val_loss in the run's log.jsonl.xz, and how large the
gradient is in each layer at the end.
Only the recipe of the random streams is the same: a generator seeded by a hash of (seed, purpose, name).
"""

import hashlib
import math
import sys
from pathlib import Path

import torch

L, H, C, T, V, B, STEPS = 4, 4, 128, 64, 65, 12, 2000
D = C // H
path, arm, seed, last = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
text = Path(path).read_text(encoding="utf-8")
ids = {c: i for i, c in enumerate(sorted(set(text)))}
tokens = torch.tensor([ids[c] for c in text])
train, val = tokens[: int(0.9 * len(tokens))], tokens[int(0.9 * len(tokens)) :]


def stream(*key):
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def drawn(name, *shape, std=0.02):
    return torch.empty(*shape).normal_(0, std, generator=stream(seed, "init", name)).requires_grad_()


P = {"wte": drawn("wte.weight", V, C), "wpe": drawn("wpe.weight", T, C), "ln_f": torch.ones(C, requires_grad=True)}
for i in range(L):
    P[i, "qkv"] = drawn(f"h.{i}.attn.c_attn.weight", 3 * C, C)
    P[i, "out"] = drawn(f"h.{i}.attn.c_proj.weight", C, C, std=0.02 / math.sqrt(2 * L))
    P[i, "up"] = drawn(f"h.{i}.mlp.c_fc.weight", 4 * C, C)
    P[i, "down"] = drawn(f"h.{i}.mlp.c_proj.weight", C, 4 * C, std=0.02 / math.sqrt(2 * L))
    P[i, "ln_1"], P[i, "ln_2"] = torch.ones(C, requires_grad=True), torch.ones(C, requires_grad=True)
bias = torch.full((T, T), -math.inf).triu(1)  # added to the attention logits
if arm.endswith("+NoRouting"):
    bias = torch.full((T, T), -math.inf).fill_diagonal_(0)
if arm.endswith("+SelfBias"):
    bias = bias + 4 * torch.eye(T)
keep_attention = arm.startswith(("FullResidual", "AttnOnly", "self"))
keep_ffn = arm.startswith(("FullResidual", "FFNOnly", "self"))


def norm(x, gain):
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-5) * gain


def losses(x, y):  # (B, T), (B, T) -> (B, T)
    h = P["wte"][x] + P["wpe"]
    for i in range(L):
        q, k, v = (norm(h, P[i, "ln_1"]) @ P[i, "qkv"].T).view(len(x), T, 3, H, D).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(2, 3) / math.sqrt(D) + bias, -1)  # (B, H, T, T)
        a = weights @ v  # (B, H, T, D)
        if arm == "self":  # without the part along the position's own value
            a = a - (a * v).sum(-1, keepdim=True) / (v * v).sum(-1, keepdim=True) * v
        a = a.transpose(1, 2).reshape(len(x), T, C) @ P[i, "out"].T
        h = h + a if keep_attention else a
        u = norm(h, P[i, "ln_2"]) @ P[i, "up"].T
        u = 0.5 * u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))
        h = h + u @ P[i, "down"].T if keep_ffn else u @ P[i, "down"].T
    logits = norm(h, P["ln_f"]) @ P["wte"].T  # (B, T, V)
    return torch.logsumexp(logits, -1) - logits.gather(-1, y[..., None])[..., 0]


n = (len(val) - 1) // T
inputs, targets = val[: n * T].view(n, T), val[1 : n * T + 1].view(n, T)
first, second = ({k: torch.zeros_like(p) for k, p in P.items()} for _ in range(2))
for step in range(last + 1):
    if step % 250 == 0 or step == last:
        with torch.no_grad():
            each = [losses(inputs[i : i + 128], targets[i : i + 128]).double().mean(1) for i in range(0, n, 128)]
        print(arm, f"seed{seed}", step, float(torch.cat(each).mean()), flush=True)
    starts = torch.randint(len(train) - T, (B,), generator=stream(seed, "batch", step)).tolist()
    x, y = (torch.stack([train[i + d : i + d + T] for i in starts]) for d in (0, 1))
    grads = torch.autograd.grad(losses(x, y).mean(), list(P.values()))
    if step == last:
        norms = [float(g.norm()) for k, g in zip(P, grads, strict=True) if k[1] == "qkv"]
        print("norm of the gradient of each layer's attention weights:", *(f"{x:.1e}" for x in norms))
        break
    size = math.sqrt(sum(float((g.double() ** 2).sum()) for g in grads))
    lr = 1e-3 * (step + 1) / 101
    if step >= 100:
        lr = 1e-4 + 0.5 * (1 + math.cos(math.pi * (step - 100) / (STEPS - 100))) * 9e-4
    with torch.no_grad():
        for (k, p), g in zip(P.items(), grads, strict=True):
            g = g * min(1.0, 1 / (size + 1e-6))
            first[k].mul_(0.9).add_(0.1 * g)
            second[k].mul_(0.99).add_(0.01 * g * g)
            if p.dim() > 1:
                p.mul_(1 - lr * 0.1)
            m, s = first[k] / (1 - 0.9 ** (step + 1)), second[k] / (1 - 0.99 ** (step + 1))
            p -= lr * m / (torch.sqrt(s) + 1e-8)
