"""
Any model -> how its heads align with their own values, and three checks of that statistic.

    python analyze.py heads MODEL... [--data=NAME | --text=FILE] [--windows=64] [--interventions] ...

Of each head, window by window, without the first position, where a head can give nothing but its own value:
- own: mean cosine of the head's output with the value of the same position.
- null: the same with the values of the earlier positions that it sees.
- across, across_null: own and null with the values of the other key-value groups; only with grouped queries.
- delta: nats per token lost when the own value is removed from this head alone; delta_all: from all heads at once;
  delta_zero: when the whole output of the head is set to zero.
Over heads, three checks: would other text rank them alike (r_stat, r_delta)? How much of own is shared with earlier
positions (explained)? Does own foretell on other text where removal costs most (r_stat_delta)?

Default text: what a run was validated on; of its windows (at most 1,024 tokens long) 64, evenly spaced. Writes
heads.json, heads.csv, heads.md and figures; heads.pt beside them holds what is measured, so interrupted work resumes.
"""

import contextlib
import inspect
import itertools
import json
import logging
import math
import re
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch  # sets an attribute and puts the old one back, whatever happens

import numpy as np
import torch
from scipy import stats
from tqdm import tqdm

import prepare
from configurator import UserError, read_json, read_text, whole_file
from model import GPT, digest, remove_direction
from report import figures_heads, markdown_heads, number, table, write_csv

# ---------------------------------------------------------------------------------------------------------------------
# statistics: arrays in, plain values out


def causal_null(y, v, window=None):
    """
    How far head outputs point along the values of *earlier* positions: what own shares with them.

    y: (..., T, D) head outputs, v: (..., T, D) values, broadcast against each other, T >= 2. window: how many positions
    a query sees, itself included (>= 2; None: all up to itself). Returns (...) float64: the mean over i >= 1 of
    (1/n_i) sum_j cos(y_i, v_j) over the n_i positions j < i that i sees. Exact and linear in T: the mean of cosines
    with y_i is the dot product with the mean of unit values, and a running sum of them gives that. In float64, as a
    window is the difference of two running sums, which would cancel in float32.
    """
    if window is not None and window < 2:
        raise ValueError(f"window={window}: a position that sees itself only has no earlier position")
    return over_earlier(*(torch.nn.functional.normalize(x.double(), dim=-1, eps=1e-300) for x in (y, v)), window)


def over_earlier(y, v, window):
    """The mean over i >= 1 of (1/n_i) sum_j y_i.v_j: what causal_null takes of unit vectors, and linear in v."""
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
    """Spearman correlation of two (n,) arrays: Pearson's of their ranks, None where that is."""
    return pearson(stats.rankdata(a), stats.rankdata(b))


def split_half(x):
    """
    Would other text rank the heads alike? The noise floor of a statistic that is averaged over windows.

    x: (windows, heads). Returns r, the Pearson correlation over heads between the means of even and of odd windows, and
    spearman_brown = 2r / (1 + r), what all the windows together would reach (Spearman 1910, Brown 1910; for r >= 0).
    None where not defined, as with one window.
    """
    r = pearson(x[0::2].mean(0), x[1::2].mean(0)) if len(x) > 1 else None
    return {"r": r, "spearman_brown": 2 * r / (1 + r) if r is not None and r >= 0 else None}


def predicts(x, d, correlation=pearson):
    """
    Does a statistic foretell an effect on *other* text? x, d: (windows, heads), of the same windows.

    Returns the correlation over heads between x on one half and d on the other, averaged both ways over even and odd
    windows. None where not defined, as with one window.
    """
    both = [correlation(x[i::2].mean(0), d[1 - i :: 2].mean(0)) for i in (0, 1)] if len(x) > 1 else [None]
    return None if None in both else float(np.mean(both))


# ---------------------------------------------------------------------------------------------------------------------
# models: ours, and any of transformers that runs on its attention interface

HARMLESS = ("position_ids", "cache_position", "use_cache", "sliding_window")  # the window comes as the mask too


@dataclass
class Subject:
    """What is known about a model that is measured, beside its weights."""

    label: str
    out: Path  # where its report goes, if nothing else is said
    vocab_size: int
    positions: int | None  # the longest input; None: not known
    removal: str = "none"
    routing: bool = True
    dataset: str | None = None  # the folder of data/ that it was trained on
    val_sha256: str | None = None  # of the validation tokens there, as they were then
    eval_tokens: int | None = None
    val_loss: float | None = None
    model_type: str | None = None
    tokenizer: object = None
    bos: int | None = None  # the beginning-of-text token
    weights: str | None = None  # in what form a GGUF file held them


def load_run(path):
    """A ckpt.pt of train.py -> (its contents, the model); raises UserError for anything else."""
    try:
        ckpt = torch.load(path, map_location="cpu", weights_only=True)
        needed = {"arm", "status", "data", "val_history", "window_losses", "training_path_batch", "training_path_loss"}
        if not isinstance(ckpt, dict) or needed - set(ckpt):
            raise ValueError("it holds something else")
        return ckpt, GPT.from_checkpoint(ckpt)
    except FileNotFoundError:
        raise UserError(f"{path} not found") from None
    except Exception as e:  # a damaged file can raise anything in its reader
        why = textwrap.shorten(str(e), 120)
        raise UserError(f"{path} is damaged, or no checkpoint of ours ({why}): delete it and train again") from None


def visible(mask):
    """How many positions a query sees under a mask (B, 1, T, T) of bool, itself included; None: all up to itself."""
    i = torch.arange(mask.shape[-1], device=mask.device)
    window = int(mask[0, 0, -1].sum())
    band = (i <= i[:, None]) & (i > i[:, None] - window)  # (T, T)
    if mask.dtype != torch.bool or mask.shape[-2] != len(i) or not bool((mask == band).all()):
        raise ValueError("its attention mask is neither causal nor a sliding window")
    return window if window < len(i) else None


def tapped_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, is_causal=None, **extra):
    """
    Attention for every transformers model: what its own eager function computes, with the model's tap on top.

    query: (B, H, T, D), key, value: (B, H_kv, T, D), attention_mask: (B, 1, T, T) of bool, or None for plain causal.
    Returns (B, T, H, D), None. Raises ValueError for anything that it would have to leave out.
    """
    model, layer = module.tapped
    if unknown := [k for k, x in extra.items() if x is not None and x is not False and k not in HARMLESS]:
        raise ValueError(f"its {type(module).__name__} asks for {', '.join(unknown)}")
    model.calls[layer] += 1
    model.sees[layer] = None if attention_mask is None else visible(attention_mask)
    y = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attention_mask, scale=scaling, is_causal=attention_mask is None, enable_gqa=True
    )  # (B, H, T, D)
    if model.tap is not None:
        y = model.tap(layer, y, value)
    return y.transpose(1, 2).contiguous(), None


def open_run(path):
    """The ckpt.pt of a run of ours -> (model, Subject)."""
    ckpt, model = load_run(path)
    config = ckpt["config"]
    model.stack, model.sees = list(model.h), [None] * len(model.h)
    same = {k: config.get(k) for k in ("vocab_size", "removal", "routing", "dataset", "eval_tokens")}
    return model, Subject(
        label=f"{ckpt['arm']}/seed{ckpt['seed']}",
        out=path.parent / "heads",
        positions=config["block_size"],
        val_sha256=ckpt["data"].get("val_sha256"),
        val_loss=None if ckpt["window_losses"] is None else float(ckpt["window_losses"].mean()),
        **same,
    )


def path_name(name):
    """A name of its own for a model: as on the hub, or a folder's path from here or from the root."""
    if not Path(name).is_dir():
        return name
    here, path = Path.cwd().resolve(), Path(name).resolve()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def open_tokenizer(name):
    """The tokenizer of a transformers model, or None where it has none; raises UserError where it is damaged."""
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        # without its files, some come up with an empty vocabulary
        return tokenizer if tokenizer("a b", add_special_tokens=False)["input_ids"] else None
    except Exception as e:  # a damaged file can raise anything in its reader
        files = [p.name for p in Path(name).glob("*") if re.search("token|vocab|merges|spiece", p.name)]
        if files:
            why = textwrap.shorten(f"{type(e).__name__}: {e}", 160)
            raise UserError(f"the tokenizer of {name} can't be read ({why}): restore {files[0]}") from None
        return None


def open_transformers(name, dtype):
    """A folder or a name on the hub -> (model whose attention is tapped_attention, Subject)."""
    import transformers
    from transformers.masking_utils import sdpa_mask

    for library in ("transformers", "huggingface_hub"):
        logging.getLogger(library).setLevel("CRITICAL")  # what fails is said in one line, below
    transformers.logging.disable_progress_bar()
    transformers.AttentionInterface.register("tapped", tapped_attention)
    transformers.AttentionMaskInterface.register("tapped", sdpa_mask)  # sliding-window layers keep their mask
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, attn_implementation="tapped", output_loading_info=True
        )
    except Exception as e:  # whatever a hub, a config or a damaged file can raise
        if isinstance(e, KeyError) and e.args == ("tapped",):  # the model looks its attention up in a list of its own
            raise UserError(f"model {name!r} does not run on transformers' attention interface: not measured") from None
        why = textwrap.shorten(str(e).partition(". ")[0], 200) or type(e).__name__
        what = "a run folder, a ckpt.pt, or a transformers model: its folder, or its name on the hub"
        raise UserError(f"model {name!r} can't be loaded ({why}): name {what}") from None
    if lost := sorted([*info["missing_keys"], *map(str, info["mismatched_keys"])]):
        raise UserError(f"model {name!r} lacks weights ({len(lost)}, such as {lost[0]}): it is no whole checkpoint")
    config = model.config.get_text_config()
    lists = (m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    stack = next((m for m in lists if len(m) == config.num_hidden_layers), ())
    model.stack, model.sees, model.calls, model.tap = list(stack), [None] * len(stack), [0] * len(stack), None
    for i, layer in enumerate(stack):
        for module in layer.modules():
            module.tapped = (model, i)
    tokenizer = open_tokenizer(name)
    return model, Subject(
        label=path_name(name),
        out=Path("out/heads") / path_name(name).strip("/").replace("/", "-"),
        vocab_size=config.vocab_size,
        positions=getattr(config, "max_position_embeddings", None),
        model_type=config.model_type,
        tokenizer=tokenizer,
        bos=config.bos_token_id if tokenizer is None or tokenizer.bos_token_id is None else tokenizer.bos_token_id,
        weights=getattr(config, "weights", None),
    )


def open_model(name, dtype="float32"):
    """
    A run folder, a ckpt.pt, or a transformers model -> (model in evaluation mode, Subject).

    Both kinds then have `tap`, `stack` (their layers) and `sees` (how many positions a query sees in each, None: all).
    Raises UserError where there is no such model.
    """
    path, dtype = Path(name), getattr(torch, dtype)
    if runs := sorted(path.glob("seed*/ckpt.pt")) + sorted(path.glob("*/seed*/ckpt.pt")):
        raise UserError(f"{name} holds several runs: name one, such as {runs[0].parent}")
    if (path / "ckpt.pt").is_file():
        path = path / "ckpt.pt"
    model, subject = open_run(path) if path.suffix == ".pt" else open_transformers(name, dtype)
    return model.to("cuda" if torch.cuda.is_available() else "cpu", dtype).eval(), subject


# ---------------------------------------------------------------------------------------------------------------------
# the text to measure on, in the tokens of the model


def own_meta(subject):
    """meta.json of the text that a run was trained on."""
    folder = Path("data") / subject.dataset
    meta = read_json(folder / "meta.json", "sha256", "tokenizer")
    if meta["sha256"].get("val") != subject.val_sha256:
        raise UserError(f"{folder} is not the text that {subject.label} was trained on: prepare it as it was then")
    return meta


def encode(text, subject):
    """Token ids of text under the model's own tokenizer."""
    if subject.tokenizer is not None:
        # text is text: characters that read like a special token are none
        return subject.tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
    if subject.dataset is None:
        raise UserError(f"{subject.label} comes without a tokenizer, so --text can't be read: use --data=NAME")
    meta = own_meta(subject)
    if meta["tokenizer"] == "gpt2":
        return prepare.gpt2().encode_ordinary(text)
    ids = {c: i for i, c in enumerate(meta["characters"])}
    if strange := sorted(set(text) - set(ids)):
        raise UserError(f"the text holds {strange[0]!r}, which is no character of data/{subject.dataset}: take it out")
    return [ids[c] for c in text]


def check_tokens(subject, folder, meta):
    """Raises UserError if the tokens of a prepared folder mean something else to the model."""
    if subject.dataset is not None:  # ours: the text it was trained on, or at least the same vocabulary
        same = meta["sha256"]["val"] == subject.val_sha256
        same = same or all(own_meta(subject).get(k) == meta.get(k) for k in ("tokenizer", "characters"))
    elif subject.tokenizer is None:
        same = subject.model_type == "gpt2"
    else:
        same = encode("Hello world, information", subject) == [15496, 995, 11, 1321]  # as GPT-2's does
    if not same or subject.dataset is None and meta["tokenizer"] not in ("gpt2", None):  # None: nanoGPT's folder
        raise UserError(f"the tokens of {folder} are not those of {subject.label}, another vocabulary: use --text=FILE")


def read_windows(subject, data=None, text=None, windows=64, window_length=None, bos=False):
    """
    The text to measure on -> (tokens (n, T + 1), or (n, T + 2) with bos in front, and what the text is called).

    Raises UserError where the tokens are not the model's own, or too few.
    """
    label, folder = subject.label, Path("data") / (data or subject.dataset or "")
    if text is not None:
        tokens = np.array(encode(read_text(text), subject), np.int64)
        if tokens.max(initial=0) >= subject.vocab_size:
            raise UserError(f"the tokenizer of {label} gives id {tokens.max()}: it has only {subject.vocab_size}")
    elif data is None and subject.dataset is None:
        raise UserError(f"say on which text to measure {label}: --data=NAME or --text=FILE")
    else:
        _, tokens, meta = prepare.load(folder, subject.vocab_size)
        if meta["tokenizer"] == "char" and subject.tokenizer is not None:  # the same text, in the model's own tokens
            tokens = np.array(encode(prepare.decode(tokens.tolist(), meta), subject), np.int64)
        else:
            check_tokens(subject, folder, meta)
    most = math.inf if subject.positions is None else subject.positions - bos
    T = min(most, 1024) if window_length is None else window_length
    if not 2 <= T <= most:
        raise UserError(f"{label} has {subject.positions} positions, so --window_length={T} can't be measured")
    if bos and subject.bos is None:
        raise UserError(f"{label} has no beginning-of-text token: leave out --bos")
    w = prepare.windows(tokens, T, subject.eval_tokens if text is None and data is None else None)
    n = min(windows, len(w))
    w = np.array(w[np.arange(n) * len(w) // n], np.int64)  # spread over the text
    if bos:
        w = np.concatenate([np.full((n, 1), subject.bos), w], 1)
    return w, Path(text).name if text else folder.name


# ---------------------------------------------------------------------------------------------------------------------
# measuring

ROWS = 8192  # tokens that go through a model together
LOGITS = 2**25  # logits in memory at a time: 128 MiB of float32


@contextlib.contextmanager
def returning(layers, outputs):
    """Inside, each layer returns the given output in place of computing it."""
    with contextlib.ExitStack() as patches:
        for layer, output in zip(layers, outputs, strict=True):
            forward = lambda *args, output=output, **kwargs: output  # noqa: E731
            patches.enter_context(patch.object(layer, "forward", forward))
        yield


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


def measuring(kept, sees):
    """A tap that leaves y as it is and keeps in kept[layer] the COSINES (4, B, H) of each layer, and H_kv."""

    def tap(layer, y, v):  # (B, H, T, D), (B, H_kv, T, D)
        H, K = y.shape[1], v.shape[1]
        a, b = (torch.nn.functional.normalize(x.double(), dim=-1, eps=1e-300) for x in (y, v))
        a = a.unflatten(1, (K, H // K))  # (B, H_kv, H / H_kv, T, D): head h reads group h // (H / H_kv)
        b = b.unsqueeze(2)  # (B, H_kv, 1, T, D)
        own = (a * b).sum(-1)[..., 1:].mean(-1).flatten(1)  # position 0 is left out: there y = v
        across, across_null = torch.full_like(own, torch.nan), torch.full_like(own, torch.nan)
        if 1 < K < H:
            others = (b.sum(1, keepdim=True) - b) / (K - 1)  # (B, H_kv, 1, T, D): the mean over the other groups
            across = (a * others).sum(-1)[..., 1:].mean(-1).flatten(1)
            across_null = over_earlier(a, others, sees[layer]).flatten(1)
        null = over_earlier(a, b, sees[layer]).flatten(1)
        kept[layer] = torch.stack([own, null, across, across_null]).cpu().numpy(), K
        return y

    return tap


def removing(plan, first=1, mode="own"):
    """
    A tap that removes own values, or with mode="zero" whole outputs.

    plan = {layer: [heads of the first replica of the batch, of the second, ...]}.
    From position `first` on, as own is measured; every other head and layer stays as it is, to the bit.
    """

    def tap(layer, y, v):  # (n B, H, T, D), (n B, H_kv, T, D)
        if layer not in plan:
            return y
        y, n, group = y.clone(), len(plan[layer]), y.shape[1] // v.shape[1]
        for heads, part, own in zip(plan[layer], y.chunk(n), v.chunk(n), strict=True):
            if heads and mode == "zero":
                part[:, heads, first:] = 0
            elif heads:
                own = own[:, [h // group for h in heads], first:]
                part[:, heads, first:] = remove_direction(part[:, heads, first:], own)
        return y

    return tap


def compare_attention(model, w, kept):
    """Raises an error unless the losses of a transformers model through our attention are those through its own."""
    L, tolerance = len(model.stack), 1e-4 if model.dtype in (torch.float32, torch.float64) else 0.05
    model.calls = [0] * L
    with patch.object(model, "tap", measuring(kept, model.sees)):
        tapped, outputs = token_losses(model, w, keep=-2)
    if strange := [i for i, n in enumerate(model.calls) if n != 1]:
        name = f"{strange[0]} ({type(model.stack[strange[0]]).__name__})"
        raise ValueError(f"layer {name} called the attention interface {model.calls[strange[0]]} times")
    with returning(model.stack[:-1], outputs[:1] * (L - 1)):
        if not float((token_losses(model, w)[0] - tapped).abs().max()) <= tolerance:
            raise ValueError("its layers pass on more than their output")
    try:
        model.set_attn_implementation("eager")
        own = float(token_losses(model, w)[0].mean())
    finally:
        model.set_attn_implementation("tapped")
    if not abs(own - float(tapped.mean())) <= tolerance:
        raise ValueError(f"through our attention its loss is {float(tapped.mean()):.5f}, through its own {own:.5f}")


def first_look(model, w):
    """
    Heads and key-value groups of the layers, from one window.

    Raises UserError, by its name, for a transformers model that would get wrong numbers, whatever its own code raises.
    """
    kept = {}
    if isinstance(model, GPT):
        with patch.object(model, "tap", measuring(kept, model.sees)):
            token_losses(model, w[:, :3])
    else:
        window = getattr(model.config.get_text_config(), "sliding_window", None) or 0
        try:
            compare_attention(model, w[:, : max(64, 2 * window) + 1], kept)  # enough for every mask to matter
        except Exception as e:
            why = textwrap.shorten(f"{type(e).__name__}: {e}" if type(e) is not ValueError else str(e), 200)
            raise UserError(f"{model.config.model_type} can't be measured, this is not implemented: {why}") from None
    shapes = {(x.shape[-1], K) for x, K in kept.values()}
    if len(shapes) != 1:
        raise UserError(f"the layers have unlike numbers of heads and groups ({shapes or 'none'}): not implemented")
    return shapes.pop()


def measurement_key(model, w, bos):
    """A hash of all that the numbers depend on: weights, config, windows, and the code that measures."""
    config = model.config if isinstance(model, GPT) else model.config.to_json_string()
    code = [Path(__file__).with_name(name).read_bytes() for name in ("heads.py", "model.py")]
    where = next(model.parameters()).device.type
    return digest([model.state_dict(), config, torch.as_tensor(w), bos, torch.__version__, where, code])


def save(path, key, measures):
    """What is measured so far, for resumed()."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for old in path.parent.glob(f"{path.name}.*.tmp"):  # of a process that was killed in a write
        old.unlink()
    with whole_file(path, "wb") as f:
        torch.save(measures | {"key": [key, digest(measures)]}, f)


def resumed(path, key):
    """What an earlier call has measured under the same key, or None: nothing, a damaged file, or an altered one."""
    try:
        measures = torch.load(path, weights_only=True)
        return measures if measures.pop("key") == [key, digest(measures)] else None
    except Exception:  # a damaged file can raise anything in its reader
        return None


COSINES = ("own", "null", "across", "across_null")
DELTAS = {"own": "delta", "zero": "delta_zero"}  # what is done to a head -> what it costs


def measure(model, w, bos=False, interventions=(), path=None):
    """
    Every measure of every head, window by window.

    w: (n, T + 1) token ids. interventions: keys of DELTAS.
    path: keeps what is measured, so that interrupted work resumes at the batch where it was.
    Returns ({"loss", "delta_all": (n,), those of COSINES and DELTAS: (n, layers, heads)}, H_kv), float64 with NaN
    where nothing was measured. Memory beyond these does not grow with n. Raises UserError for a model that would be
    measured wrong, or whose loss is not finite.
    """

    def mean(losses):  # (B, T) -> (B,), without the position that only a token in front makes
        return losses[:, int(bos) :].double().mean(1).cpu().numpy()

    ids, T = torch.as_tensor(w[:1]).to(next(model.parameters()).device), w.shape[1] - 1
    (H, K), L, n = first_look(model, ids), len(model.stack), len(w)
    shapes = {"loss": (n,), "delta_all": (n,)} | dict.fromkeys((*COSINES, *DELTAS.values()), (n, L, H))
    key = path and measurement_key(model, w, bos)
    kept = (path and resumed(path, key)) or {
        name: torch.full(s, math.nan, dtype=torch.float64) for name, s in shapes.items()
    }
    measures = {name: t.numpy() for name, t in kept.items()}  # the same memory
    wanted = ["loss", *(DELTAS[mode] for mode in interventions), *["delta_all"] * ("own" in interventions)]
    most = ROWS if ids.is_cuda else min(ROWS, 2048)  # a CPU is faster while what it works on stays in its cache
    batch = max(1, most // (T * H if interventions else T))  # so that the heads of a layer go together, if they fit
    together = max(1, most // (T * batch))
    cosines, saved = {}, time.monotonic()
    try:
        for start in tqdm(range(0, n, batch), unit="batch", leave=False, disable=None):
            rows = slice(start, start + batch)
            if all(np.isfinite(measures[k][rows]).all() for k in wanted):
                continue
            ids = torch.as_tensor(w[rows]).to(ids.device)
            with patch.object(model, "tap", measuring(cosines, model.sees)):
                losses, outputs = token_losses(model, ids, keep=0 if interventions else -1)
            loss = mean(losses)
            if not np.isfinite(loss).all():
                raise UserError("the loss is not finite: the weights of this model have diverged")
            for layer, (of_layer, _) in cosines.items():
                for name, a in zip(COSINES, of_layer, strict=True):
                    measures[name][rows, layer] = a
            measures["loss"][rows] = loss  # after the cosines: where it is there, they are
            if "own" in interventions:
                with patch.object(model, "tap", removing({layer: [list(range(H))] for layer in range(L)})):
                    measures["delta_all"][rows] = mean(token_losses(model, ids)[0]) - loss
            for mode in interventions:
                if np.isfinite(measures[DELTAS[mode]][rows]).all():
                    continue
                for layer, h in itertools.product(range(L), range(0, H, together)):
                    heads = list(range(h, min(h + together, H)))
                    alone = removing({layer: [[head] for head in heads]}, mode=mode)
                    # below the layer nothing changes: all that the rest needs is what the last one of those gave
                    below = [repeat(outputs[layer - 1], len(heads))] * layer if layer else []
                    with patch.object(model, "tap", alone), returning(model.stack[:layer], below):
                        removed = mean(token_losses(model, ids.repeat(len(heads), 1))[0])
                    measures[DELTAS[mode]][rows, layer, heads] = (removed.reshape(len(heads), -1) - loss).T
            if path and time.monotonic() > saved + 10:  # seconds
                save(path, key, kept)
                saved = time.monotonic()
    finally:
        if path and np.isfinite(measures["loss"]).any():
            save(path, key, kept)
    return measures, K


# ---------------------------------------------------------------------------------------------------------------------
# from the measures to a report

ROUNDING = 1e-6  # nats: a window's loss in float32 is no better, and the order of smaller effects means nothing


def value(x):
    return float(x) if np.isfinite(x) else None


def summarize(measures, n_kv_head):
    """
    What measure() returns -> the parts of the report that follow from it.

    Every r with delta is None where effects were not measured, or are no larger than rounding.
    """
    n, L, H = measures["own"].shape
    flat = {k: measures[k].reshape(n, L * H) for k in (*COSINES, *DELTAS.values())}
    se = flat["delta"].std(0, ddof=1) / math.sqrt(n) if n > 1 else np.full(L * H, np.nan)
    columns = {k: a.mean(0) for k, a in flat.items()} | {"delta_se": se}
    heads = [{"layer": i // H, "head": i % H} | {k: value(a[i]) for k, a in columns.items()} for i in range(L * H)]
    own, null, delta = flat["own"], flat["null"], flat["delta"]
    gap = (own - null).mean(1)  # by window, for a t interval
    ci95 = gap.mean() + stats.t.ppf((0.025, 0.975), n - 1) * gap.std(ddof=1) / math.sqrt(n) if n > 1 else ()
    summary = {
        "own": value(own.mean()),
        "null": value(null.mean()),
        "own_minus_null": value(own.mean() - null.mean()),
        "own_minus_null_ci95": [float(c) for c in ci95] or None,
        "explained": value(null.mean() / own.mean()) if abs(own.mean()) >= 0.01 else None,
        "across": value(flat["across"].mean()),
        "across_null": value(flat["across_null"].mean()),
        "delta": value(delta.mean()),
        "delta_zero": value(flat["delta_zero"].mean()),
    }
    effects = bool(np.abs(delta).max() > ROUNDING)  # False where NaN: not measured
    for name, x, known in (("stat", own, True), ("delta", delta, effects)):
        halves = split_half(x) if known else {"r": None, "spearman_brown": None}
        summary |= {f"r_{name}": halves["r"], f"r_{name}_spearman_brown": halves["spearman_brown"]}
    r_stat, r_delta = summary["r_stat"] or 0.0, summary["r_delta"] or 0.0
    summary["r_stat_delta_ceiling"] = math.sqrt(r_stat * r_delta) if min(r_stat, r_delta) > 0 else None
    for name, x in (("stat", own), ("null", null), ("own_minus_null", own - null)):
        summary[f"r_{name}_delta"] = predicts(x, delta) if effects else None
        summary[f"r_{name}_delta_spearman"] = predicts(x, delta, spearman) if effects else None
    means = {k: value(measures[k].mean()) for k in ("loss", "delta_all")}
    shape = {"n_layer": L, "n_head": H, "n_kv_head": n_kv_head, "windows": n}
    return shape | means | {"heads": heads, "summary": summary}


# ---------------------------------------------------------------------------------------------------------------------
# the command

HEADS_FLAGS = {"data": str, "text": str, "windows": int, "window_length": int, "interventions": bool | str, "bos": bool}
HEADS_FLAGS |= {"dtype": str, "out": str, "help": bool}


def heads_of(name, out, flags):
    """Measure one model and write its folder (default: the one of its Subject) -> the contents of its heads.json."""
    dtype, bos = flags.get("dtype", "float32"), flags.get("bos", False)
    model, subject = open_model(name, dtype)
    chosen = {k: flags[k] for k in ("data", "text", "windows", "window_length", "bos") if k in flags}
    w, text = read_windows(subject, **chosen)
    out = subject.out if out is None else out
    asked = flags.get("interventions", False)
    modes = asked.split(",") if isinstance(asked, str) else ["own"] * asked
    measures, n_kv_head = measure(model, w, bos, modes, out / "heads.pt")
    T = w.shape[1] - 1 - bos
    report = {"model": subject.label, "parameters": sum(p.numel() for p in model.parameters()), "dtype": dtype}
    report |= {"text": text, "bos": bos} | {
        k: getattr(subject, k) for k in ("removal", "routing", "val_loss", "weights")
    }
    report |= {"window_length": T, "tokens": len(w) * T} | summarize(measures, n_kv_head)
    markdown = markdown_heads(report)
    figures_heads(out, report, measures)
    write_csv(out / "heads.csv", [h | {"own_minus_null": h["own"] - h["null"]} for h in report["heads"]])
    with whole_file(out / "heads.md") as f:
        f.write(markdown)
    with whole_file(out / "heads.json") as f:
        json.dump(report, f, indent=1, allow_nan=False)
    print(markdown)
    print(f"written: {out}/heads.json, heads.csv, heads.md, heads_*.png")
    return report


def compare_models(out, reports):
    """models.csv of several models, and a table on the screen."""
    lines = [{k: v for k, v in r.items() if k not in ("heads", "summary")} | r["summary"] for r in reports]
    write_csv(out / "models.csv", lines)
    keys = ("own", "null", "explained", "r_stat", "r_delta", "r_stat_delta")
    rows = [[x["model"], f"{x['parameters']:,}", *(number(x[k], ".3f") for k in keys)] for x in lines]
    print(table(["model", "parameters", *keys], rows))
    print(f"written: {out}/models.csv")


def heads_command(names, flags):
    """python analyze.py heads: names of models, and values of HEADS_FLAGS. Raises UserError for what can't be done."""
    if not names:
        raise UserError("name a MODEL or more: python analyze.py heads RUN_FOLDER | ckpt.pt | TRANSFORMERS_MODEL ...")
    if "data" in flags and "text" in flags:
        raise UserError("--data and --text both say on which text to measure: give one of them")
    if isinstance(asked := flags.get("interventions"), str) and set(asked.split(",")) - set(DELTAS):
        raise UserError(f"--interventions={asked}: own, zero, or own,zero")
    if flags.get("windows", 1) < 1:
        raise UserError(f"--windows={flags['windows']} must be at least 1")
    if flags.get("dtype", "float32") not in ("float32", "bfloat16", "float16", "float64"):
        raise UserError(f"unknown --dtype={flags['dtype']}: float32, bfloat16, float16 or float64")
    if len(names) == 1:
        heads_of(names[0], Path(flags["out"]) if "out" in flags else None, flags)
        return
    out = Path(flags.get("out", "out/heads"))
    folders = {name: path_name(name).strip("/").replace("/", "-") for name in names}
    if len(set(folders.values())) < len(names):
        raise UserError(f"two of the models would write to one folder of {out}: name each of them once")
    compare_models(out, [heads_of(name, out / folder, flags) for name, folder in folders.items()])
