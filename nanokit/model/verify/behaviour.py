"""What a model's behaviour on a short text says about its file when no source is at hand.

Three things are looked at. Does it predict prose at all, better than by chance? Would it predict better if q and k had
their rows in another order, or gate and up each other's place (verify/variants.py)? And does each layer's gate behave
like a gate?

The last question has an answer because silu is no odd function. A feed-forward computes down (silu(gate x) * up x).
Turn the sign of a row of up, and of the same column of down, and nothing has changed: what up gives has no side that it
prefers. What gate gives has one, for silu lets one side through. Over the neurons of a layer, with m the mean over
tokens, s the deviation and g the skewness,

    asymmetry = |mean over neurons of m / s| + |mean over neurons of g|

is near 0 for up and not for gate, in a trained model; random weights have neither. A layer whose two matrices have
changed places shows it the other way round, though it costs too little for any bound on perplexity.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from nanokit.model.export import interleaved
from nanokit.model.source import GGUFSource, ModelSource, unpermute
from nanokit.model.tokenizer import Tokenizer
from nanokit.model.verify.meaning import HEAD
from nanokit.model.verify.report import NEEDS_SOURCE, Check, Found, listed
from nanokit.model.verify.variants import (
    AS_IS,
    Gain,
    Head,
    Progress,
    See,
    Variant,
    final_states,
    gain,
    reordered,
    swapped,
)
from nanokit.model.weights import Weights
from nanokit.paths import data_dir

PART = "behaviour"
TEXT = "texts/lighthouse.txt"
TOKENS = 96
LEAST = 32  # tokens that anything can be said of
MARGIN = 2.0  # nats a token below chance (the logarithm of the vocabulary) from which on a model predicts
CLEAR = 3.0  # times as asymmetric as the other one has to be to be told from it
LEAST_ASYMMETRY = 0.15
EVERYWHERE = "gate and up swapped"
ROW_ORDER, ORDER, LAYERS, PREDICTS = "q and k row order", "gate and up", "gate and up, by layer", "predicts a text"


@dataclass
class Asymmetry:
    """Of gate and up in each layer, collected while a text runs."""

    gate: dict[int, float] = field(default_factory=dict)
    up: dict[int, float] = field(default_factory=dict)

    def see(self, layer: int, gate: Tensor, up: Tensor) -> None:
        self.gate[layer], self.up[layer] = asymmetry(gate), asymmetry(up)

    def reversed_layers(self) -> list[int]:
        """Where what is stored as gate behaves like an up, and what is stored as up like a gate."""
        return [at for at in self.gate if _is_gate(self.up[at], self.gate[at])]

    def clear_layers(self) -> list[int]:
        """Where both behave as they are stored."""
        return [at for at in self.gate if _is_gate(self.gate[at], self.up[at])]


def _is_gate(this: float, other: float) -> bool:
    return this > LEAST_ASYMMETRY and this > CLEAR * other


def asymmetry(values: Tensor) -> float:
    """See the module. values: fp32 [tokens, neurons]; the first token, which is unlike all others, is left out."""
    values = values[1:]
    mean, deviation = values.mean(0), values.std(0, correction=0).clamp(min=1e-12)
    skewness = (((values - mean) / deviation) ** 3).mean(0)
    return float((mean / deviation).mean().abs() + skewness.mean().abs())


def text_ids(tokenizer: Tokenizer, text: str, tokens: int) -> list[int]:
    """The first tokens of a text of the kit's own."""
    return tokenizer.encode((data_dir() / text).read_text("utf-8"))[:tokens]


def behaviour(source: GGUFSource, weights: Weights, progress: Progress | None = None) -> list[Check]:
    """The checks. Weights have to be finite."""
    ids = text_ids(source.tokenizer, TEXT, min(TOKENS, source.config.max_context))
    if len(ids) < LEAST:
        return unasked(f"{len(ids)} tokens of text, too few to tell anything")
    orders = row_orders(source)
    seen = Asymmetry()
    losses = _losses(source, weights, ids, {**orders, EVERYWHERE: swapped()}, progress, seen.see)
    sense = math.log(source.config.vocab_size) - MARGIN
    gains = _gains(losses, sense)
    everywhere = gains.pop(EVERYWHERE, None)
    if not _told(gains, everywhere, bool(losses[AS_IS].mean() < sense)):
        more = _losses(source, weights, ids[: len(ids) // 2], other_heads(source), progress)  # they are many
        gains |= _gains(more, sense)
    predicts, tied = _predicts(losses[AS_IS], source, sense)
    checks = [Check(PART, PREDICTS, *predicts)]
    if tied is not None:
        checks.append(Check("meaning", HEAD, *tied))
    checks.append(Check(PART, ROW_ORDER, *_row_order(gains, everywhere)))
    checks.append(Check(PART, ORDER, *_everywhere(gains, everywhere)))
    if checks[-1].verdict == "failed":
        return checks
    return [*checks, Check(PART, LAYERS, *_by_layer(seen, source, weights, progress))]


def unasked(why: str) -> list[Check]:
    """The checks where no text can be run."""
    return [Check(PART, name, "not checked", why) for name in (PREDICTS, ROW_ORDER, ORDER, LAYERS)]


def _gains(losses: Mapping[str, Tensor], sense: float) -> dict[str, Gain]:
    """Of every variant that means something: of two models that both predict nothing, one may do so less badly. sense:
    the loss, nats a token, below which one of them has to be."""
    own = losses[AS_IS]
    return {
        name: gain(own, loss)
        for name, loss in losses.items()
        if name != AS_IS and (own.mean() < sense or loss.mean() < sense)
    }


def _losses(
    source: ModelSource,
    weights: Weights,
    ids: Sequence[int],
    tried: Mapping[str, Variant],
    progress: Progress | None,
    see: See | None = None,
) -> dict[str, Tensor]:
    states = final_states(source.config, weights, ids, tried, see=see, progress=progress)
    head = Head(weights)
    return {name: head.losses(each, ids) for name, each in states.items()}


def _told(gains: Mapping[str, Gain], everywhere: Gain | None, predicts: bool) -> bool:
    """Whether the text has told these orders from the file's own, for better or worse, or from something worse.
    predicts: whether the file predicts it as it is."""
    if any(each.certain for each in (*gains.values(), *([everywhere] if everywhere else []))):
        return True
    return predicts and all(each.certainly_worse for each in gains.values())


def row_orders(source: GGUFSource) -> dict[str, Variant]:
    """The orders in which rows of q and k may stand by mistake, undone: those of the other kind of file, and k as if
    it had as many heads as q has, or one."""
    config = source.config
    heads = {"q": config.num_heads, "k": config.num_kv_heads}
    if config.architecture != "llama":
        undo = reordered(("q", "k"), lambda rows, part: unpermute(rows, heads[part]))
        return {"rows of q and k put out of interleaved order": undo}

    def stored(rows: Tensor, part: str) -> Tensor:
        return torch.from_numpy(interleaved(np.asarray(rows), heads[part]))

    found = {"rows of q and k taken as they are stored": reordered(("q", "k"), stored)}
    return found | _k_as_of(source, {config.num_heads, 1})


def other_heads(source: GGUFSource) -> dict[str, Variant]:
    """k as if it had any other number of heads that its rows divide into. Nothing for files that do not interleave."""
    if source.config.architecture != "llama":
        return {}
    rows = source.config.num_kv_heads * source.config.head_dim
    return _k_as_of(source, set(range(2, rows // 2 + 1)) - {source.config.num_heads})


def _k_as_of(source: GGUFSource, counts: set[int]) -> dict[str, Variant]:
    """Rows of k as if they were interleaved as those of so many heads."""
    own, rows = source.config.num_kv_heads, source.config.num_kv_heads * source.config.head_dim
    found = {}
    for count in sorted(counts - {own}):
        if rows % (2 * count) == 0:

            def regrouped(values: Tensor, _: str, count: int = count) -> Tensor:
                return unpermute(torch.from_numpy(interleaved(np.asarray(values), own)), count)

            found[f"rows of k taken as those of {count} heads"] = reordered(("k",), regrouped)
    return found


def _predicts(loss: Tensor, source: GGUFSource, sense: float) -> tuple[Found, Found | None]:
    """Of the text, and what that says of a tied head."""
    mean = float(loss.mean())
    if not math.isfinite(mean):
        said = f"the probabilities of {int((~loss.isfinite()).sum())} of {len(loss)} tokens are no numbers"
        return ("failed", said), None
    said = f"perplexity {math.exp(min(mean, 700)):.4g} over {len(loss)} tokens of prose"
    if mean >= sense:
        chance = f"with {source.config.vocab_size:,} tokens hardly better than chance, or worse"
        worse = f"{chance}: weights that are random, or damaged"
        tied = "; a head of its own that was dropped does this too" if source.config.tied_head else ""
        return ("warning", f"{said}, {worse}{tied}"), None
    tied_head: Found = ("ok", "tied: the embedding is the head, and predicts a text with it")
    return ("ok", said), tied_head if source.config.tied_head else None


def _row_order(gains: Mapping[str, Gain], everywhere: Gain | None) -> Found:
    if not gains:
        return "not checked", f"a text cannot tell it from other orders: {NEEDS_SOURCE}"
    best = max(gains, key=lambda name: gains[name].mean)
    if everywhere is not None and everywhere.certain and everywhere.mean > gains[best].mean:
        return "not checked", "gate and up come first"
    if gains[best].certain:
        which = "blk.*.attn_k.weight" if best.startswith("rows of k") else "blk.*.attn_q.weight and blk.*.attn_k.weight"
        return "failed", f"{which}: with the {best}, a text gets likelier by {_nats(gains[best])}"
    if all(each.certainly_worse for each in gains.values()):
        return "ok", f"every other order makes a text less likely, by {-gains[best].mean:.3g} nats a token and more"
    return "not checked", f"a text cannot tell it from other orders: {NEEDS_SOURCE}"


def _everywhere(gains: Mapping[str, Gain], found: Gain | None) -> Found:
    if found is not None and found.certain and all(found.mean > each.mean for each in gains.values()):
        said = "with gate and up of every layer in each other's place, a text gets likelier by"
        return "failed", f"blk.*.ffn_gate.weight and blk.*.ffn_up.weight: {said} {_nats(found)}"
    if found is not None and found.certainly_worse:
        return "ok", f"in each other's place they make a text less likely, by {-found.mean:.3g} nats a token"
    return "not checked", f"a text cannot tell them apart: {NEEDS_SOURCE}"


def _by_layer(seen: Asymmetry, source: GGUFSource, weights: Weights, progress: Progress | None) -> Found:
    suspects = seen.reversed_layers()
    if not suspects:
        clear = len(seen.clear_layers())
        return "not checked", (
            f"none looks swapped, {clear} of {len(seen.gate)} have the asymmetry of a gate where they should; "
            f"a swap that leaves none {NEEDS_SOURCE}"
        )
    names = listed(f"blk.{at}.ffn_gate.weight and blk.{at}.ffn_up.weight" for at in suspects)
    found = undone(source, weights, suspects, progress)
    look = "gate behaves like an up, and up like a gate"
    if found.certain:
        return "failed", f"{names}: {look}, and in each other's place a text gets likelier by {_nats(found)}"
    return "warning", f"{names}: {look}; a text cannot confirm it ({_nats(found)}): {NEEDS_SOURCE}"


def undone(source: ModelSource, weights: Weights, layers: Sequence[int], progress: Progress | None = None) -> Gain:
    """What the text gains, all of it that there is, with gate and up of these layers in each other's place."""
    ids = text_ids(source.tokenizer, TEXT, source.config.max_context)
    losses = _losses(source, weights, ids, {EVERYWHERE: swapped(layers)}, progress)
    return gain(losses[AS_IS], losses[EVERYWHERE])


def _nats(found: Gain) -> str:
    return f"{found.mean:.3g} ± {found.error:.2g} nats a token"
