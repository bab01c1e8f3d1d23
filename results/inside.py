"""
What happens inside the first steps of basin_1m's arms, with help and without: a figure and its numbers.

    python results/inside.py                 after `python prepare.py shakespeare`; about ten minutes

Trains seed 100 of five arms again, as train.py does, for 1,000 steps, and looks every 25 at the same 64 validation
windows. In each layer: how much attention goes to the own position; what share of the energy of the vectors after it is
spread, that is, differs between positions; what share of that spread the own token explains; and how large the gradient
is that reaches the query, key and value weights. Where the log of the run is in results/basin_1m, the last training
loss must be the one that stands there, to 1e-5. Two arms are trained once more with the letter frequencies given, as
fixed logarithms that are added to the logits: no plan has these, and the figure leaves them out. Writes inside.json and
inside.png.
"""

import json
import lzma
import sys
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import prepare  # noqa: E402
import train  # noqa: E402
from configurator import cli  # noqa: E402
from report import COLOURS, save_figure  # noqa: E402

SEED, STEPS, EVERY = 100, 1000, 25
GIVEN = ", frequencies given"
ARMS = ("FullResidual", "FFNOnly", "Help250", "Late250", "Value", "FFNOnly" + GIVEN, "Value" + GIVEN)
LABELS = {  # what look() sees, a row of the figure each
    "own_attention": "attention to the own position",
    "spread": "share of the vectors' energy\nthat differs between positions",
    "own_token": "share of that difference\nthat the own token explains",
    "gradient": "gradient norm of the\nattention weights",
}


def spread(x):
    """Share of the energy of vectors x (N, C) that differs between them: 0 where all N are the same vector."""
    return float((x - x.mean(0)).square().sum() / x.square().sum())


def explained_by_token(x, ids):
    """Share of the variance of vectors x (N, C) that the means of equal tokens ids (N,) explain, summed over C."""
    total = (x - x.mean(0)).square().sum()
    between = sum(len(x[ids == t]) * (x[ids == t].mean(0) - x.mean(0)).square().sum() for t in ids.unique())
    return float(between / total)


def look(model, w):
    """The loss, and each of LABELS as a list over layers."""
    H, own, vectors = model.config.n_head, [], []

    def attention(module, inputs, output):  # output: (B, T, 3 C)
        q, k, _ = (x.unflatten(-1, (H, -1)).transpose(1, 2) for x in output.detach().chunk(3, -1))  # (B, H, T, D)
        T = q.shape[2]
        mask = torch.full((T, T), -torch.inf).triu(1) if model.mask is None else model.mask[:T, :T]
        p = (q @ k.mT / q.shape[-1] ** 0.5 + mask).softmax(-1)  # (B, H, T, T)
        own.append(float(p.diagonal(dim1=-2, dim2=-1)[..., 1:].mean()))

    hooks = [block.attn.c_attn.register_forward_hook(attention) for block in model.h]
    hooks += [
        block.register_forward_hook(lambda m, i, x: vectors.append(x.detach().flatten(0, 1))) for block in model.h
    ]
    loss = model(w[:, :-1], w[:, 1:], reduction="mean")[1]
    loss.backward()
    for hook in hooks:
        hook.remove()
    seen = {
        "loss": float(loss.detach()),
        "own_attention": own,
        "spread": [spread(x) for x in vectors],
        "own_token": [explained_by_token(x, w[:, :-1].flatten()) for x in vectors],
        "gradient": [float(block.attn.c_attn.weight.grad.norm()) for block in model.h],
    }
    model.zero_grad(set_to_none=True)
    return seen


def train_and_look(config, arm, tokens, w):
    """A list of what look() sees at steps 0, EVERY, ... of a run."""
    log = HERE / f"basin_1m/{arm}/seed{SEED}/log.jsonl.xz"
    given, arm = arm.endswith(GIVEN), arm.removesuffix(GIVEN)
    model = train.first_model(config, arm, SEED).train()
    if given:
        counts = np.bincount(tokens, minlength=config.vocab_size) + 1
        frequencies = torch.as_tensor(np.log(counts / counts.sum()), dtype=torch.float32)  # (V,)
        plain = model.logits
        model.logits = lambda x: plain(x) + frequencies
    config = train.arm_config(config, arm)
    optimizer, seen = train.make_optimizer(model, config), []
    for step in range(STEPS + 1):
        model.at_step(step)
        if step % EVERY == 0:
            seen.append({"step": step, **look(model, w)})
        for group in optimizer.param_groups:
            group["lr"] = train.learning_rate(config, step)
        rows = train.batch(tokens, SEED, step, config.batch_size, config.block_size)
        loss, _ = train.take_step(model, optimizer, rows, config.batch_size, train.autocast(config), config.grad_clip)
    if log.exists():
        rows = [json.loads(line) for line in lzma.decompress(log.read_bytes()).splitlines()]
        logged = next(row["loss"] for row in rows if row["iter"] == STEPS)
        assert abs(float(loss) - logged) < 1e-5, (arm, float(loss), logged)
    return seen


def draw(seen, path):
    arms = [arm for arm in ARMS if not arm.endswith(GIVEN)]
    fig = Figure(figsize=(14, 11), layout="constrained")
    axes = fig.subplots(len(LABELS), len(arms), sharex=True, sharey="row")
    for column, arm in zip(axes.T, arms, strict=True):
        steps = [s["step"] for s in seen[arm]]
        for axis, name in zip(column, LABELS, strict=True):
            for layer, said in enumerate(("first layer (0)", "layer 1", "layer 2", "last layer (3)")):
                values = [s[name][layer] for s in seen[arm]]
                axis.plot(steps, values, color=COLOURS[layer], lw=1.6, label=said)
            if arm in ("Help250", "Late250"):
                start = 500 if arm == "Late250" else 0
                axis.axvspan(start, start + 250, color="0.92", zorder=0)
            axis.spines[["top", "right"]].set_visible(False)
        column[0].set_title(arm)
        column[-1].set_xlabel("training step")
    for row, (name, label) in zip(axes, LABELS.items(), strict=True):
        row[0].set_ylabel(label)
        if name in ("spread", "gradient"):
            row[0].set_yscale("log")
    axes[0, 0].legend(frameon=False, fontsize=8)
    save_figure(fig, path, f"Inside basin_1m, seed {SEED}, first {STEPS:,} steps; grey: help, self_bias 4 to 0")


def main(argv):
    torch.set_num_threads(1)
    config = train.read_config(str(HERE.parent / "config/basin_1m.py"), {})
    config.device = "cpu"
    tokens, val, meta = prepare.load(Path("data") / config.dataset)
    config.vocab_size = meta["vocab_size"]
    w = torch.as_tensor(np.array(prepare.windows(val, config.block_size)[:64], np.int64))  # (64, T + 1)
    seen = {arm: train_and_look(config, arm, tokens, w) for arm in ARMS}
    out = HERE / "basin_1m"
    (out / "inside.json").write_text(json.dumps(seen))
    draw(seen, out / "inside.png")


if __name__ == "__main__":
    cli(main)
