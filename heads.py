"""
Any model -> how its heads align with their own values, and three checks of that statistic.

The commands are those of analyze.py heads.
"""

import contextlib
import csv
import inspect
import json
import logging
import math
import os
import textwrap
import time
import zipfile
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch
from scipy import stats
from tqdm import tqdm

import prepare
from configurator import UserError, read_json, read_text, whole_file
from model import GPT, GPTConfig, digest, remove_direction

# ---------------------------------------------------------------------------------------------------------------------
# tables, figures and checkpoints


def number(x, spec=".4f"):
    return "–" if x is None else format(x, spec)


def table(head, rows):
    """A Markdown table whose columns line up in a terminal too."""
    cells = [head, *rows]
    widths = [max(len(str(row[i])) for row in cells) for i in range(len(head))]
    lines = ["| " + " | ".join(str(c).ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito
STYLES, MARKERS = ("-", "--", ":", "-."), ("o", "s", "^", "D")


def save_figure(fig, path, title):
    fig.suptitle(title, fontsize=11)
    for axis in fig.axes:
        axis.title.set_size(10)
    with whole_file(path, "wb") as f:
        fig.savefig(f, dpi=150, format="png", metadata={"Software": None})


def write_csv(path, rows):
    with whole_file(path) as f:
        writer = csv.DictWriter(f, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)  # None becomes an empty field


def between(ci, spec="+.2f"):
    return "" if ci is None else f" [{ci[0]:{spec}}, {ci[1]:{spec}}]"


def reliability(summary, k):
    """A split-half correlation in words."""
    return f"{number(summary[k], '.3f')} (Spearman-Brown {number(summary[k + '_spearman_brown'], '.3f')})"


def load_checkpoint(path):
    """A ckpt.pt of train.py; raises UserError for anything else. Nothing in the file is executed."""
    try:
        ckpt = torch.load(path, map_location="cpu", weights_only=True)
        needed = ("model", "config", "arm", "seed", "step", "status", "window_losses", "training_path_loss")
        needed += ("val_history", "data")
        if not isinstance(ckpt, dict) or any(k not in ckpt for k in needed):
            raise ValueError("it holds something else")
        return ckpt
    except FileNotFoundError:
        raise UserError(f"{path} not found") from None
    except Exception as e:  # a damaged file can raise anything in its reader
        why = textwrap.shorten(str(e), 120)
        raise UserError(f"{path} is damaged, or no checkpoint of ours ({why}): delete it and train again") from None


def build(ckpt):
    """A fresh model from the config and weights of a checkpoint, in evaluation mode."""
    try:
        config = GPTConfig(**{f.name: ckpt["config"].get(f.name, f.default) for f in fields(GPTConfig)})
        model = GPT(config, ckpt["seed"])
        model.load_state_dict(ckpt["model"])
    except (RuntimeError, ValueError, TypeError, AttributeError) as e:
        run, why = f"{ckpt['arm']}/seed{ckpt['seed']}", textwrap.shorten(str(e), 120)
        raise UserError(
            f"the weights of {run} do not fit its saved config ({why}): delete it and train again"
        ) from None
    return model.eval()


# ---------------------------------------------------------------------------------------------------------------------
# heads, statistics: arrays in, plain values out


def causal_null(y, v, window=None):
    """
    How far head outputs point along the values of *earlier* positions: the cosine that geometry alone gives.

    y: (..., T, D) head outputs, v: (..., T, D) values, broadcast against each other, T >= 2. window: how many positions
    a query sees, itself included (>= 2; None: all up to itself). Returns (...) float64: the mean over i >= 1 of
    (1/n_i) sum_j cos(y_i, v_j) over the n_i positions j < i that i sees. Exact and linear in T: the mean of cosines
    with y_i is the dot product with the mean of unit values, and a running sum of them gives that. In float64, as a
    window is the difference of two running sums, which would cancel in float32.
    """
    if window is not None and window < 2:
        raise ValueError(f"window={window}: a position that sees itself only has no earlier position")
    y, v = (torch.nn.functional.normalize(x.double(), dim=-1, eps=1e-300) for x in (y, v))  # zero stays zero
    seen = torch.arange(y.shape[-2], device=y.device)  # n_i
    before = v.cumsum(-2).roll(1, -2)  # (..., T, D): the sum over j < i
    before[..., 0, :] = 0
    if window is not None and window < len(seen):
        older = before.roll(window - 1, -2)
        older[..., : window - 1, :] = 0
        before, seen = before - older, seen.clamp(max=window - 1)
    return ((y * before).sum(-1)[..., 1:] / seen[1:]).mean(-1)


def pearson(a, b):
    """Pearson correlation of two (n,) arrays; None where it is not defined: one of them varies by rounding at most."""
    varies = all(len(x) > 1 and np.ptp(x) > 64 * np.finfo(float).eps * np.abs(x).max() for x in (a, b))
    return float(np.corrcoef(a, b)[0, 1]) if varies else None


def spearman(a, b):
    return pearson(stats.rankdata(a), stats.rankdata(b))


def split_half(x):
    """
    Would other text rank the heads alike? The noise floor of a statistic that is averaged over windows.

    x: (windows, heads). Returns r, the Pearson correlation over heads between the means of even and of odd windows, and
    spearman_brown = 2r / (1 + r), what all the windows together would reach (Spearman 1910, Brown 1910; for r >= 0).
    None where not defined, as with one window.
    """
    x = np.asarray(x, np.float64)
    r = pearson(x[0::2].mean(0), x[1::2].mean(0)) if len(x) > 1 else None
    return {"r": r, "spearman_brown": 2 * r / (1 + r) if r is not None and r >= 0 else None}


def predicts(x, d):
    """
    Does a statistic foretell an effect on *other* text? x, d: (windows, heads), of the same windows.

    Returns pearson and spearman over heads between x on one half and d on the other, averaged both ways over even and
    odd windows. None where not defined.
    """
    names = {"pearson": pearson, "spearman": spearman}
    if len(x) < 2:
        return dict.fromkeys(names)
    halves = [(x[0::2].mean(0), d[1::2].mean(0)), (x[1::2].mean(0), d[0::2].mean(0))]
    both = {name: [r(*half) for half in halves] for name, r in names.items()}
    return {name: None if None in values else float(np.mean(values)) for name, values in both.items()}


# ---------------------------------------------------------------------------------------------------------------------
# heads, models: ours, and any of transformers that runs on its attention interface

HARMLESS = ("position_ids", "cache_position", "use_cache", "sliding_window")  # the window comes as the mask too
DTYPES = ("float32", "bfloat16", "float16", "float64")
ROWS = 8192  # tokens that go through a model together
ROUNDING = 1e-6  # nats: a window's loss in float32 is no better, and the order of smaller effects means nothing
LOGITS = 2**25  # logits in memory at a time: 128 MiB of float32


def tapped_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, is_causal=None, **extra):
    """
    Attention for every transformers model: what its own eager function computes, with the model's tap on top.

    query: (B, H, T, D), key, value: (B, H_kv, T, D), attention_mask: (B, 1, T, T) of bool, or None for plain causal.
    Returns (B, T, H, D), None. Raises UserError, naming it, for anything that it would have to leave out.
    """
    name, (model, layer) = type(module).__name__, getattr(module, "tapped", (None, None))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    wrong = [k for k, x in extra.items() if x is not None and x is not False and k not in HARMLESS]
    wrong += ["dropout"] * bool(dropout) + ["attention that is not causal"] * (attention_mask is None and not causal)
    wrong += ["attention outside its layers"] * (model is None)
    if wrong:
        raise UserError(
            f"{name} asks for {', '.join(wrong)}, not implemented: measuring without would give wrong numbers"
        )
    model.calls[layer] += 1
    model.sees[layer] = visible(attention_mask, name)
    y = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attention_mask, scale=scaling, is_causal=attention_mask is None, enable_gqa=True
    )  # (B, H, T, D)
    if model.tap is not None:
        y = model.tap(layer, y, value)
    return y.transpose(1, 2).contiguous(), None


def visible(mask, name):
    """How many positions a query sees under a mask (B, 1, T, T) of bool, itself included; None: all up to itself."""
    if mask is None:
        return None
    i = torch.arange(mask.shape[-1], device=mask.device)
    window = int(mask[0, 0, -1].sum())
    band = (i <= i[:, None]) & (i > i[:, None] - window)  # (T, T)
    if mask.dtype != torch.bool or mask.shape[-2] != len(i) or not bool((mask == band).all()):
        raise UserError(f"{name} has an attention mask that is neither causal nor a sliding window: not implemented")
    return window if window < len(i) else None


def checkpoint_path(name):
    """The ckpt.pt of a run folder; any other name as a path."""
    path = Path(name)
    return path / "ckpt.pt" if (path / "ckpt.pt").is_file() else path


def open_model(name, dtype="float32"):
    """
    A run folder, a ckpt.pt, or a transformers model -> (model in evaluation mode, what is known about it).

    Both kinds then have `tap`, `stack` (their layers) and `sees` (how many positions a query sees in each, None: all).
    Raises UserError where there is no such model.
    """
    path, device = checkpoint_path(name), "cuda" if torch.cuda.is_available() else "cpu"
    if not name or not path.exists() and (name.count("/") > 1 or path.suffix == ".pt"):  # on the hub it is OWNER/NAME
        raise UserError(f"model {name!r} is no run folder or file here")
    if path.suffix == ".pt":
        ckpt = load_checkpoint(path)
        model, c = build(ckpt), ckpt["config"]
        model.stack, model.sees = list(model.h), [None] * len(model.h)
        known = {k: c[k] for k in ("removal", "routing", "dataset", "vocab_size")} | {"positions": c["block_size"]}
        known |= {"eval_tokens": c.get("eval_tokens"), "val_loss": float(ckpt["window_losses"].mean())}
        known |= {"label": f"{ckpt['arm']}/seed{ckpt['seed']}", "out": path.parent / "heads", "data": ckpt["data"]}
        return model.to(device, getattr(torch, dtype)), known | {"tokenizer": None, "bos": None}
    if path.is_dir() and not (path / "config.json").is_file():
        raise UserError(f"{name} holds neither ckpt.pt nor config.json: name a run folder or a transformers model")
    import transformers
    from transformers.masking_utils import sdpa_mask

    for library in ("transformers", "huggingface_hub"):
        logging.getLogger(library).setLevel("CRITICAL")  # what fails is said in one line, below
    transformers.logging.disable_progress_bar()
    transformers.AttentionInterface.register("tapped", tapped_attention)
    transformers.AttentionMaskInterface.register("tapped", sdpa_mask)  # sliding-window layers keep their mask
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            name, dtype=getattr(torch, dtype), attn_implementation="tapped", output_loading_info=True
        )
    except Exception as e:  # whatever a hub, a config or a damaged file can raise
        if isinstance(e, KeyError) and e.args == ("tapped",):  # the model looks its attention up in a list of its own
            raise UserError(f"model {name!r} does not run on transformers' attention interface: not measured") from None
        why = textwrap.shorten(str(e).partition(". ")[0], 200) or type(e).__name__
        raise UserError(
            f"model {name!r} can't be loaded ({why}): name a run folder, a ckpt.pt, the folder of a transformers model,"
            " or one on the hub (without a network: one that was downloaded before)"
        ) from None
    if lost := sorted([*info["missing_keys"], *map(str, info["mismatched_keys"])]):
        raise UserError(f"model {name!r} lacks weights ({len(lost)}, such as {lost[0]}): it is no whole checkpoint")
    config = model.config.get_text_config()
    lists = ((n, m) for n, m in model.named_modules() if isinstance(m, torch.nn.ModuleList))
    where, stack = next(((n, m) for n, m in lists if len(m) == config.num_hidden_layers), (None, ()))
    model.stack, model.sees, model.calls, model.tap = list(stack), [None] * len(stack), [0] * len(stack), None
    model.names = [f"{where}.{i} ({type(layer).__name__})" for i, layer in enumerate(stack)]
    for i, layer in enumerate(stack):
        for module in layer.modules():
            module.tapped = (model, i)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        if not tokenizer("a b", add_special_tokens=False)["input_ids"]:
            tokenizer = None  # without its files, some come up with an empty vocabulary
    except Exception:  # there is none: --data may still do
        tokenizer = None
    label = path.resolve().name if path.is_dir() else name
    known = {"removal": "none", "routing": True, "dataset": None, "eval_tokens": None, "val_loss": None, "label": label}
    known |= {"vocab_size": config.vocab_size, "positions": getattr(config, "max_position_embeddings", None)}
    known |= {"out": Path("out/heads") / Path(label).name}
    bos = config.bos_token_id if tokenizer is None or tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return model.to(device).eval(), known | {"type": config.model_type, "tokenizer": tokenizer, "bos": bos}


def read_windows(known, data=None, text=None, windows=64, length=None, bos=False):
    """
    The text to measure on -> (tokens (n, T + 1), or (n, T + 2) with bos in front, and what the text is called).

    Raises UserError where the tokens are not the model's own, or too few.
    """
    label, folder = known["label"], Path("data") / (data or known["dataset"] or "")
    if text is not None:
        tokens = np.array(encode(read_text(text), known), np.int64)
        if tokens.max(initial=0) >= known["vocab_size"]:
            raise UserError(
                f"the tokenizer of {label} gives id {tokens.max()}, its vocabulary has {known['vocab_size']}"
            )
    elif data is None and known["dataset"] is None:
        raise UserError(f"say on which text to measure {label}: --data=NAME or --text=FILE")
    else:
        _, tokens, meta = prepare.load(folder, known["vocab_size"])
        fits(known, folder, meta)
    most = math.inf if known["positions"] is None else known["positions"] - bos
    T = min(most, 1024) if length is None else length
    if not 2 <= T <= most:
        raise UserError(f"{label} has {known['positions']} positions, so --window_length={T} can't be measured")
    if len(tokens) <= T:
        rest = len(tokens) - 1  # a window needs the token after it
        hint = f"set --window_length={rest} or less" if rest > 1 else "give more text"
        raise UserError(f"{text or folder} has {len(tokens)} tokens, too few for one window of {T}: {hint}")
    w = prepare.windows(tokens, T, known["eval_tokens"] if text is None and data is None else None)
    w = np.array(w[np.arange(min(windows, len(w))) * len(w) // min(windows, len(w))], np.int64)  # spread over the text
    if bos and known["bos"] is None:
        raise UserError(f"{label} has no beginning-of-text token: leave out --bos")
    w = np.concatenate([np.full((len(w), 1), known["bos"]), w], 1) if bos else w
    return w, Path(text).name if text else folder.name


def encode(text, known):
    """Token ids of text under the model's own tokenizer."""
    if known["tokenizer"] is not None:
        return known["tokenizer"](text, add_special_tokens=False, verbose=False)["input_ids"]
    if known["dataset"] is None:
        raise UserError(f"{known['label']} comes without a tokenizer, so --text can't be read: use --data=NAME")
    meta = own_meta(known)
    if meta["tokenizer"] == "gpt2":
        return prepare.gpt2().encode_ordinary(text)
    if "characters" not in meta:
        raise UserError(f"data/{known['dataset']}/meta.json does not say what its tokens are: use --data=NAME")
    ids = {c: i for i, c in enumerate(meta["characters"])}
    if strange := sorted(set(text) - set(ids)):
        raise UserError(f"the text holds {strange[0]!r}, which is no character of data/{known['dataset']}: take it out")
    return [ids[c] for c in text]


def own_meta(known):
    """meta.json of the text that a run was trained on."""
    folder = Path("data") / known["dataset"]
    meta = read_json(folder / "meta.json", "sha256", "tokenizer")
    if meta["sha256"].get("val") != known["data"].get("val_sha256"):
        raise UserError(f"{folder} is not the text that {known['label']} was trained on: prepare it as it was then")
    return meta


def fits(known, folder, meta):
    """Raises UserError if the tokens of a prepared folder mean something else to the model."""
    bad = f"the tokens of {folder} are not those of {known['label']}"
    if known["dataset"] is not None:  # ours: the text it was trained on, or at least the same vocabulary
        if meta["sha256"]["val"] != known["data"].get("val_sha256"):
            own = own_meta(known)
            if any(own.get(k) != meta.get(k) for k in ("tokenizer", "characters")):
                raise UserError(f"{bad}, which has the vocabulary of data/{known['dataset']}: prepare it with that")
    elif meta["tokenizer"] not in ("gpt2", None):  # None: a folder of nanoGPT, which does not say
        raise UserError(f"{bad} (tokenizer {meta['tokenizer']}): use --text=FILE")
    elif known["tokenizer"] is None and known["type"] != "gpt2":
        raise UserError(f"{bad}, as far as one can tell without a tokenizer beside the model")
    elif known["tokenizer"] is not None and encode("Hello world, information", known) != [15496, 995, 11, 1321]:
        raise UserError(f"{bad}, whose tokenizer is not GPT-2's: use --text=FILE")


# ---------------------------------------------------------------------------------------------------------------------
# heads, measuring


@contextlib.contextmanager
def returning(layers, outputs):
    """Inside, each layer returns the given output in place of computing it."""
    before = [layer.__dict__.get("forward") for layer in layers]
    for layer, output in zip(layers, outputs, strict=True):
        layer.forward = lambda *args, output=output, **kwargs: output
    try:
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward


def repeat(output, n):
    """The output of a layer for a batch that is repeated n times."""
    if isinstance(output, tuple):
        return tuple(repeat(x, n) for x in output)
    return output.repeat(n, *[1] * (output.dim() - 1)) if torch.is_tensor(output) else output


@torch.no_grad()
def token_losses(model, w, keep=-1):
    """
    Cross-entropy of each token in nats (B, T), float32 or wider, and the outputs of the layers from `keep` on.

    w: (B, T + 1) token ids. The logits of a transformers model are never in memory at once: it is asked for a few
    positions at a time, and its layers, which have run once, then return what they gave.
    """
    ids, targets, outputs = w[:, :-1], w[:, 1:], []
    hooks = [layer.register_forward_hook(lambda _m, _a, x: outputs.append(x)) for layer in model.stack[keep:]]
    try:
        if isinstance(model, GPT):
            return model(ids, targets, reduction="none")[1], outputs
        rows = max(1, LOGITS // (len(w) * model.config.get_text_config().vocab_size))
        sliced = "logits_to_keep" in inspect.signature(model.forward).parameters
        losses = []
        for t in torch.arange(ids.shape[1], device=w.device).split(rows if sliced else ids.shape[1]):
            again = returning(model.stack, outputs[-1:] * len(model.stack)) if losses else contextlib.nullcontext()
            with again:
                logits = model(ids, use_cache=False, **({"logits_to_keep": t} if sliced else {})).logits  # (B, t, V)
            while hooks:
                hooks.pop().remove()
            for a, b in zip(logits.split(rows, 1), targets[:, t].split(rows, 1), strict=True):
                a = a.to(torch.promote_types(a.dtype, torch.float32)).flatten(0, 1)
                losses.append(torch.nn.functional.cross_entropy(a, b.flatten(), reduction="none").view(b.shape))
        return torch.cat(losses, 1), outputs
    finally:
        for hook in hooks:
            hook.remove()


def measuring(found, sees):
    """A tap that leaves y as it is and keeps own, null, across (3, B, H) of each layer, and H_kv, in found[layer]."""

    def tap(layer, y, v):  # (B, H, T, D), (B, H_kv, T, D)
        H, K = y.shape[1], v.shape[1]
        a, b = (torch.nn.functional.normalize(x.double(), dim=-1, eps=1e-300) for x in (y, v))
        a = a.unflatten(1, (K, H // K))  # (B, H_kv, H / H_kv, T, D): head h reads group h // (H / H_kv)
        b = b.unsqueeze(2)  # (B, H_kv, 1, T, D)
        own = (a * b).sum(-1)[..., 1:].mean(-1).flatten(1)  # position 0 is left out: there y = v
        across = torch.full_like(own, torch.nan)
        if 1 < K < H:
            across = (a * (b.sum(1, keepdim=True) - b)).sum(-1)[..., 1:].mean(-1).flatten(1) / (K - 1)
        found[layer] = torch.stack([own, causal_null(a, b, sees[layer]).flatten(1), across]).cpu().numpy(), K
        return y

    return tap


def removing(plan, first=1):
    """
    A tap that removes own values: plan = {layer: [heads of the first replica of the batch, of the second, ...]}.

    From position `first` on, as own is measured; every other head and layer stays as it is, to the bit.
    """

    def tap(layer, y, v):  # (n B, H, T, D), (n B, H_kv, T, D)
        if layer not in plan:
            return y
        y, n, group = y.clone(), len(plan[layer]), y.shape[1] // v.shape[1]
        for heads, part, own in zip(plan[layer], y.chunk(n), v.chunk(n), strict=True):
            if heads:
                own = own[:, [h // group for h in heads], first:]
                part[:, heads, first:] = remove_direction(part[:, heads, first:], own)
        return y

    return tap


def first_look(model, w):
    """
    Heads and key-value groups of the layers, from one window.

    Raises UserError for a transformers model that would get wrong numbers: a layer does not call our attention just
    once, the loss is not the one through the model's own attention, or a layer needs more than what the one below gave.
    """
    found, L = {}, len(model.stack)
    model.tap = measuring(found, model.sees)
    if isinstance(model, GPT):
        token_losses(model, w[:, :3])
    else:
        window = getattr(model.config.get_text_config(), "sliding_window", None) or 0
        w = w[:, : max(64, 2 * window) + 1]  # enough for every mask to matter
        kind, tolerance = model.config.model_type, 1e-4 if model.dtype in (torch.float32, torch.float64) else 0.05
        model.calls = [0] * L
        try:
            tapped, outputs = token_losses(model, w, keep=-2)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as e:
            if isinstance(e, UserError):
                raise
            raise UserError(f"{kind}: this architecture does not run on our attention ({str(e)[:120]})") from None
        for name, n in zip(model.names, model.calls, strict=True):
            if n != 1:
                times = f"layer {name} called the attention interface {n} times in a forward pass, not once"
                raise UserError(f"{kind}: {times}: this architecture can't be measured")
        with returning(model.stack[:-1], outputs[:1] * (L - 1)):
            shared = float((token_losses(model, w)[0] - tapped).abs().max())
        if not shared <= tolerance:
            raise UserError(f"{kind}: its layers pass on more than their output: this architecture can't be measured")
        model.set_attn_implementation("eager")
        eager = float(token_losses(model, w)[0].mean())
        model.set_attn_implementation("tapped")
        if not abs(eager - float(tapped.mean())) <= tolerance:
            losses = f"through our attention its loss is {float(tapped.mean()):.5f}, through its own {eager:.5f}"
            raise UserError(f"{kind}: {losses}: it does something that is not implemented")
    shapes = {(x.shape[-1], K) for x, K in found.values()}
    if len(shapes) != 1:
        raise UserError(f"the layers have unlike numbers of heads and groups ({shapes or 'none'}): not implemented")
    return shapes.pop()


def measure(model, w, bos=False, interventions=False, path=None, layers=None):
    """
    Every measure of every head, window by window.

    w: (n, T + 1) token ids. layers: those in which to remove (default all). path: a file that keeps what is measured,
    for a resume. Returns ({"loss": (n,), "delta_all": (n,), "own", "null", "across", "delta": (n, layers, heads)},
    H_kv), float64 with NaN where nothing was measured. Memory beyond these does not grow with n.
    """

    def mean(losses):  # (B, T) -> (B,), without the position that only a token in front makes
        return losses[:, int(bos) :].double().mean(1).cpu().numpy()

    def save(after=-1):
        nonlocal saved
        if path is not None and time.monotonic() - saved > after and np.isfinite(x["loss"]).any():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path, "wb") as f:
                np.savez(f, key=np.array([key, contents(x)]), **x)
            saved = time.monotonic()

    ids, T = torch.as_tensor(w[:1]).to(next(model.parameters()).device), w.shape[1] - 1
    (H, K), L, n = first_look(model, ids), len(model.stack), len(w)
    shape = {"loss": (n,), "delta_all": (n,)} | dict.fromkeys(("own", "null", "across", "delta"), (n, L, H))
    key = measurement_key(model, w, bos)
    x = resumed(path, key, shape) or {name: np.full(s, np.nan) for name, s in shape.items()}
    layers = [] if not interventions else range(L) if layers is None else layers
    most = ROWS if ids.is_cuda else min(ROWS, 2048)  # a CPU is faster while what it works on stays in its cache
    batch = max(1, most // (T * H if layers else T))  # so that the heads of a layer go together, if they fit
    together = max(1, most // (T * batch))
    found, saved = {}, time.monotonic()
    passes = 1 + (1 + H * len(layers) if layers else 0)
    bar = tqdm(total=n * passes, unit="window", leave=False, disable=None)
    try:
        for start in range(0, n, batch):
            rows = slice(start, start + batch)
            size = len(x["loss"][rows])
            todo = [layer for layer in layers if np.isnan(x["delta"][rows, layer]).any()]
            everywhere = bool(layers) and np.isnan(x["delta_all"][rows]).any()
            if todo or everywhere or np.isnan(x["loss"][rows]).any():
                ids = torch.as_tensor(w[rows]).to(ids.device)
                model.tap = measuring(found, model.sees)
                losses, outputs = token_losses(model, ids, keep=0 if todo else -1)
                loss = mean(losses)
                if not np.isfinite(loss).all():
                    raise UserError("the loss is not finite: the weights of this model have diverged")
                for layer, (values, _) in found.items():
                    x["own"][rows, layer], x["null"][rows, layer], x["across"][rows, layer] = values
                x["loss"][rows] = loss  # the last: where it is, the cosines are
            if everywhere:
                model.tap = removing({layer: [list(range(H))] for layer in range(L)})
                x["delta_all"][rows] = mean(token_losses(model, ids)[0]) - loss
            bar.update(size * (passes - H * len(todo)))
            for layer in todo:
                for h in range(0, H, together):
                    heads = list(range(h, min(h + together, H)))
                    model.tap = removing({layer: [[head] for head in heads]})
                    # below the layer nothing changes: all that the rest needs is what the last one of those gave
                    below = [repeat(outputs[layer - 1], len(heads))] * layer if layer else []
                    with returning(model.stack[:layer], below):
                        removed = mean(token_losses(model, ids.repeat(len(heads), 1))[0])
                    x["delta"][rows, layer, heads] = (removed.reshape(len(heads), size) - loss).T
                    bar.update(size * len(heads))
                save(after=10)  # seconds since the last time
            save(after=10)
    finally:
        bar.close()
        model.tap = None
        save()
    return x, K


def measurement_key(model, w, bos):
    """A hash of all that the numbers depend on: weights, config, windows, and the code that measures."""
    config = vars(model.config) if isinstance(model, GPT) else model.config.to_json_string()
    where = (torch.__version__, next(model.parameters()).device.type)
    code = [Path(__file__).with_name(name).read_bytes() for name in ("heads.py", "model.py")]
    return digest([config, bos, where, torch.as_tensor(w), code, dict(model.state_dict())])


def contents(x):
    """A hash of what was measured, so that a file that was altered is measured again."""
    return digest({name: torch.as_tensor(a) for name, a in x.items()})


def resumed(path, key, shape):
    """What an earlier call has measured under the same key, or None."""
    try:
        with np.load(path) as f:
            x = {name: f[name] for name in shape}
            return x if f["key"].tolist() == [key, contents(x)] else None
    except (TypeError, OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):  # not there, or damaged
        return None


# ---------------------------------------------------------------------------------------------------------------------
# heads, from the measures to a report

PREDICTORS = {"stat": "own", "null": "null", "own_minus_null": "own − null"}


def value(x):
    return float(x) if np.isfinite(x) else None


def summarize(x, n_kv_head):
    """What measure() found -> the parts of heads.json that follow from it."""
    n, L, H = x["own"].shape
    flat = {k: x[k].reshape(n, L * H) for k in ("own", "null", "across", "delta")}
    se = flat["delta"].std(0, ddof=1) / math.sqrt(n) if n > 1 else np.full(L * H, np.nan)
    columns = {k: a.mean(0) for k, a in flat.items()} | {"delta_se": se}
    heads = [{"layer": i // H, "head": i % H} | {k: value(a[i]) for k, a in columns.items()} for i in range(L * H)]
    own, null = flat["own"].mean(), flat["null"].mean()
    s = {"own": value(own), "null": value(null), "own_minus_null": value(own - null)}
    d = (flat["own"] - flat["null"]).mean(1)  # by window, for a t interval
    low_high = d.mean() + stats.t.ppf((0.025, 0.975), n - 1) * d.std(ddof=1) / math.sqrt(n) if n > 1 else ()
    s["own_minus_null_ci95"] = [float(c) for c in low_high] or None
    s["explained"] = value(null / own) if abs(own) >= 0.01 else None
    s["across"] = value(flat["across"].mean())
    effects = np.abs(flat["delta"]).max() > ROUNDING  # False where NaN: not measured
    nothing = np.empty((0, L * H))  # no window, so nothing to correlate
    delta = flat["delta"] if effects else nothing
    for name, a in (("r_stat", flat["own"]), ("r_delta", delta)):
        halves = split_half(a)
        s |= {name: halves["r"], f"{name}_spearman_brown": halves["spearman_brown"]}
    r = [s["r_stat"], s["r_delta"]]
    s["r_stat_delta_ceiling"] = math.sqrt(r[0] * r[1]) if None not in r and min(r) > 0 else None
    rivals = {"stat": flat["own"], "null": flat["null"], "own_minus_null": flat["own"] - flat["null"]}
    for name, a in rivals.items():
        r = predicts(a if effects else nothing, delta)
        s |= {f"r_{name}_delta": r["pearson"], f"r_{name}_delta_spearman": r["spearman"]}
    sizes = {k: abs(s[f"r_{k}_delta"]) for k in rivals if s[f"r_{k}_delta"] is not None}
    s["best_predictor"] = PREDICTORS[max(sizes, key=sizes.get)] if sizes else None
    shape = {"n_layer": L, "n_head": H, "n_kv_head": n_kv_head, "windows": n}
    return shape | {k: value(x[k].mean()) for k in ("loss", "delta_all")} | {"heads": heads, "summary": s}


def markdown_heads(r):
    """heads.json -> heads.md: the numbers, and what each says."""
    s = r["summary"]
    gap = f"{number(s['own_minus_null'], '+.3f')}{between(s['own_minus_null_ci95'], '+.3f')}"
    rows = [
        ["own", number(s["own"], "+.3f"), "cosine of a head's output with its own value"],
        ["null", number(s["null"], "+.3f"), "cosine with the values of earlier positions: what they share with own"],
        ["own − null", gap, "what is left for the own value, with 95% over windows"],
        ["explained", number(s["explained"], ".1%"), "null / own (– where own is near 0; above 100% null is larger)"],
        ["across", number(s["across"], "+.3f"), "cosine with the values of the other groups"],
        ["delta_all", number(r["delta_all"], "+.4f"), "nats lost by removing the own value in all heads at once"],
        ["r_stat", reliability(s, "r_stat"), "would other text rank the heads alike by own?"],
        ["r_delta", reliability(s, "r_delta"), "and by delta, what removal in one head loses?"],
    ]
    effects = r["delta_all"] is not None
    left_out = ["across"] * (s["across"] is None) + ["delta_all", "r_delta"] * (not effects)
    rows = [row for row in rows if row[0] not in left_out]
    for k, name in PREDICTORS.items() if effects else ():
        rho = number(s[f"r_{k}_delta_spearman"], ".3f")
        ceiling = f", ceiling {number(s['r_stat_delta_ceiling'], '.3f')}" * (k == "stat")
        meaning = f"does {name} foretell delta on other text? Spearman {rho}{ceiling}"
        rows.append([f"r_{k}_delta", number(s[f"r_{k}_delta"], ".3f"), meaning])
    groups = f" in {r['n_kv_head']} key-value groups" * (r["n_kv_head"] != r["n_head"])
    lines = [
        f"# {r['model']}: heads",
        f"{r['n_layer']} layers × {r['n_head']} heads{groups}, {r['parameters']:,} parameters, {r['dtype']};"
        f" {r['windows']:,} windows of {r['window_length']:,} tokens of {r['text']},"
        f" {'with' if r['bos'] else 'without'} a beginning-of-text token in front. Loss of the untouched model:"
        f" {number(r['loss'])} nats per token.",
        table(["measure", "value", "meaning"], rows),
        f"Each r is over {r['n_layer'] * r['n_head']} heads, from {r['windows']:,} windows, {r['tokens']:,} tokens: it"
        " grows with the text. r is between even and odd windows. All of it is about other text, and not about other"
        " heads or models.",
    ]
    if not effects:
        lines.append("What removal does to the loss was not measured: --interventions.")
    if s["best_predictor"]:
        lines.append(f"Of own, null and own − null, {s['best_predictor']} predicts delta best, by the size of r.")
    if r["removal"] != "none":
        zero = ": every delta is zero by construction" * (r["removal"] == "self")
        lines.append(f"The model itself removes a direction ({r['removal']}) after the place of measurement{zero}.")
    if not r["routing"]:
        lines.append("Its positions see themselves only; null is over all earlier positions, though none is seen.")
    return "\n\n".join(lines) + "\n"


def figure_map(path, r, own, null):
    """Layer x head maps of own, null and own - null (L, H) on one colour scale."""
    from matplotlib.figure import Figure

    L, H = own.shape
    fig = Figure(figsize=(5 + min(9, 1.5 + H / 4), 2 + min(6.5, 0.7 + L / 6)), layout="constrained")
    axes = fig.subplots(1, 3, sharey=True)
    limit = max(np.abs(a).max() for a in (own, null, own - null)) or 1.0
    for axis, (name, a) in zip(axes, {"own": own, "null": null, "own − null": own - null}.items(), strict=True):
        image = axis.imshow(a, cmap="PuOr_r", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
        axis.set(title=f"{name}, mean {a.mean():+.3f}", xlabel="head")
        axis.set_xticks(range(0, H, math.ceil(H / 12)))
        axis.set_yticks(range(0, L, math.ceil(L / 12)))
    axes[0].set_ylabel("layer")
    fig.colorbar(image, ax=axes, label="cosine", fraction=0.05)
    save_figure(fig, path, r["model"])


def figure_scatter(path, r, panels):
    """Heads as points, coloured by layer. panels: [(x, y, title, x label, y label, standard error of y or None)]."""
    from matplotlib.figure import Figure

    L, H = r["n_layer"], r["n_head"]
    fig = Figure(figsize=(1.2 + 4.6 * len(panels), 4.6), layout="constrained")
    axes = fig.subplots(1, len(panels), squeeze=False)[0]
    for axis, (x, y, title, xlabel, ylabel, se) in zip(axes, panels, strict=True):
        size = 22 if L * H < 400 else 8
        marks = axis.scatter(x, y, size, np.repeat(np.arange(L), H), cmap="cividis", linewidths=0, zorder=2)
        if se is None:
            axis.set(xlim=axis.get_xlim(), ylim=axis.get_ylim())  # the line where both are equal may lie outside
            axis.axline((0, 0), slope=1, color="0.6", lw=1, zorder=1)
        else:
            axis.errorbar(x, y, se, fmt="none", ecolor="0.75", elinewidth=0.8, zorder=1)
            axis.axhline(0, color="0.6", lw=1, zorder=0)
        axis.set(title=title, xlabel=xlabel, ylabel=ylabel)
        axis.spines[["top", "right"]].set_visible(False)
    fig.colorbar(marks, ax=axes, label="layer", ticks=range(0, L, math.ceil(L / 12)))
    save_figure(fig, path, f"{r['model']}: {r['windows']:,} windows, {r['tokens']:,} tokens")


def figures_heads(out, r, x):
    """heads_map.png, heads_null.png, heads_halves.png (two windows or more), heads_delta.png (with interventions)."""
    for old in out.glob("heads_*.png"):  # of an earlier measurement, which may have had more
        old.unlink()
    s, means = r["summary"], {k: x[k].mean(0) for k in ("own", "null", "across", "delta")}  # (L, H)
    figure_map(out / "heads_map.png", r, means["own"], means["null"])
    own, null, across, delta = (a.ravel() for a in means.values())
    title = "own against null; on the line both are equal"
    panels = [(null, own, title, "null (cosine, earlier values)", "own (cosine)", None)]
    if s["across"] is not None:
        title = "own group against the others"
        panels.append((across, own, title, "across (cosine, other groups)", "own (cosine)", None))
    figure_scatter(out / "heads_null.png", r, panels)
    effects = np.isfinite(delta).all()
    if effects:
        se = np.array([h["delta_se"] or 0.0 for h in r["heads"]])
        title = f"removing the own value; r across halves {number(s['r_stat_delta'], '.2f')}"
        panel = (own, delta, title, "own (cosine)", "delta, loss added (nats per token, ± se)", se)
        figure_scatter(out / "heads_delta.png", r, [panel])
    if r["windows"] > 1:
        panels = []
        for k, r_k, name in (("own", "r_stat", "own (cosine)"), ("delta", "r_delta", "delta (nats)"))[: 1 + effects]:
            even, odd = (x[k][i::2].mean(0).ravel() for i in (0, 1))
            title = f"{r_k} {reliability(s, r_k)}"
            panels.append((even, odd, title, f"{name}, even windows", f"{name}, odd windows", None))
        figure_scatter(out / "heads_halves.png", r, panels)


def figure_models(path, reports):
    """Explained and own of several models against their size."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    fig = Figure(figsize=(11, 4.6), layout="constrained")
    for axis, k in zip(fig.subplots(1, 2), ("explained", "own"), strict=True):
        for i, r in enumerate(reports):
            style = {"color": COLOURS[i % 7], "marker": MARKERS[i // 7 % 4], "label": r["model"]}
            axis.scatter(r["parameters"], r["summary"][k] if r["summary"][k] is not None else math.nan, 40, **style)
        axis.set(xscale="log", xlabel="parameters", ylabel=f"{k}, mean over heads", title=f"{k} against model size")
        sizes = [r["parameters"] for r in reports]
        axis.set_xlim(min(sizes) / 2, max(sizes) * 2)
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.spines[["top", "right"]].set_visible(False)
    fig.legend(*axis.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    save_figure(fig, path, "heads of several models")


def heads_of(name, out, flags):
    """Measure one model and write its folder (default: the one known for it) -> the contents of its heads.json."""
    dtype, bos = flags.get("dtype", "float32"), flags.get("bos", False)
    model, known = open_model(name, dtype)
    chosen = {k: flags[k] for k in ("data", "text", "windows") if k in flags} | {"length": flags.get("window_length")}
    w, text = read_windows(known, **chosen, bos=bos)
    out = known["out"] if out is None else out
    x, n_kv_head = measure(model, w, bos, flags.get("interventions", False), out / "heads.npz")
    T = w.shape[1] - 1 - bos
    r = {"model": known["label"], "parameters": sum(p.numel() for p in model.parameters()), "dtype": dtype}
    r |= {"text": text, "bos": bos} | {k: known[k] for k in ("removal", "routing", "val_loss")}
    r |= {"window_length": T, "tokens": len(w) * T} | summarize(x, n_kv_head)
    figures_heads(out, r, x)
    write_csv(out / "heads.csv", [h | {"own_minus_null": h["own"] - h["null"]} for h in r["heads"]])
    with whole_file(out / "heads.md") as f:
        f.write(markdown_heads(r))
    with whole_file(out / "heads.json") as f:
        json.dump(r, f, indent=1, allow_nan=False)
    print(markdown_heads(r))
    print(f"written: {out}/heads.json, heads.csv, heads.md, heads_*.png")
    return r


HEADS_FLAGS = {"data": str, "text": str, "windows": int, "window_length": int, "interventions": bool, "bos": bool}
HEADS_FLAGS |= {"dtype": str, "out": str, "help": bool}


def heads_command(names, flags):
    if not names:
        raise UserError("name a MODEL or more: python analyze.py heads RUN_FOLDER | ckpt.pt | TRANSFORMERS_MODEL ...")
    if empty := [name for name in ("data", "text", "out") if flags.get(name) == ""]:
        raise UserError(f"--{empty[0]} is empty: write --{empty[0]}=VALUE or leave it out")
    if "data" in flags and "text" in flags:
        raise UserError("--data and --text both say on which text to measure: give one of them")
    if flags.get("windows", 1) < 1:
        raise UserError(f"--windows={flags['windows']} must be at least 1")
    if flags.get("dtype", "float32") not in DTYPES:
        raise UserError(f"unknown --dtype={flags['dtype']}: {', '.join(DTYPES)}")
    if len(names) == 1:
        heads_of(names[0], Path(flags["out"]) if "out" in flags else None, flags)
        return
    out = Path(flags.get("out", "out/heads"))
    folders = ["-".join(p for p in Path(os.path.normpath(name)).parts if p not in ("/", "..")) for name in names]
    if len({checkpoint_path(name).resolve() for name in names}) < len(names):
        raise UserError("one of the models is named twice")
    if len(set(folders)) < len(names):
        raise UserError(f"two of the models would write to one folder of {out}: name each of them once")
    reports = [heads_of(name, out / folder, flags) for name, folder in zip(names, folders, strict=True)]
    shape = ("model", "parameters", "n_layer", "n_head", "n_kv_head", "windows", "window_length", "loss", "delta_all")
    summaries = ({k: json.dumps(v) if isinstance(v, list) else v for k, v in r["summary"].items()} for r in reports)
    write_csv(out / "models.csv", [{k: r[k] for k in shape} | s for r, s in zip(reports, summaries, strict=True)])
    figure_models(out / "models.png", reports)
    keys = ("own", "null", "explained", "r_stat", "r_delta", "r_stat_delta")
    rows = [[r["model"], f"{r['parameters']:,}", *(number(r["summary"][k], ".3f") for k in keys)] for r in reports]
    print(table(["model", "parameters", *keys], rows))
    print(f"written: {out}/models.csv, models.png")
