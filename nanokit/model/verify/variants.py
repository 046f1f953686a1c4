"""A model as its file has it, and as it would be if a suspected fault were undone, on one text, side by side.

A fault that leaves every shape right leaves no trace in the header. But undoing it makes the text likelier: a file with
rows of q and k in the wrong order predicts far better with the rows put back. So each suspicion is a *variant*, the
same weights with one thing changed, and the question is a paired one, token by token: is the variant's loss lower than
the file's by more than chance? No reference is needed, and the difficulty of the text cancels.

All variants walk the layers together, so that a layer is read and widened once however many there are.

Rejected: bounds on the perplexity itself. What is bad depends on the model and the text, and a mistake that costs less
than honest rounding stays below any bound.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from nanokit.kernels.reference import Layer, Resident, rms_norm
from nanokit.model.calibrate import Progress
from nanokit.model.config import ModelConfig
from nanokit.model.rope import Rope
from nanokit.model.weights import Weights
from nanokit.model.windows import read_layer, run_layer, windows_of

AS_IS = "as it is"
ROWS = 64  # whose logits are computed together
# Standard errors that a gain has to reach. Several variants are tried and neighbouring tokens are not independent, so
# the usual two would accuse sound files.
CERTAIN = 4.0

See = Callable[[int, Tensor, Tensor], None]  # of the file as it is: layer, what gate gives, what up gives


@dataclass(frozen=True)
class Variant:
    """rope: in place of the file's own; change: makes another layer of one that was read (and leaves that one)."""

    rope: Rope | None = None
    change: Callable[[int, Layer], Layer] | None = None


@dataclass(frozen=True)
class Gain:
    """How much likelier a variant makes the text: nats a token, with its standard error, paired by token."""

    mean: float
    error: float

    @property
    def certain(self) -> bool:
        """That the variant is better."""
        return self.mean > CERTAIN * self.error

    @property
    def certainly_worse(self) -> bool:
        return -self.mean > CERTAIN * self.error


@torch.inference_mode()
def final_states(
    config: ModelConfig,
    weights: Weights,
    ids: Sequence[int],
    variants: Mapping[str, Variant] | None = None,
    *,
    see: See | None = None,
    progress: Progress | None = None,
) -> dict[str, Tensor]:
    """What the head is given for every token of one text, fp32 [len(ids), hidden_size]: of the file as it is, and of
    each variant.

    Raises ParameterError for ids that the model does not have or too many of them, ModelFileError for weights that are
    not finite.
    """
    every = {AS_IS: Variant(), **(variants or {})}
    turned = {
        name: windows_of(replace(config, rope=each.rope or config.rope), [list(ids)]) for name, each in every.items()
    }
    hidden = dict.fromkeys(every, weights.embedding.dense()[torch.tensor(ids)])
    for index in range(config.num_layers):
        if progress is not None:
            progress(index, config.num_layers, "running the layers")
        layer = read_layer(weights, index)
        for name, each in every.items():
            used = layer if each.change is None else each.change(index, layer)
            watch = partial(see, index) if see is not None and name == AS_IS else None
            hidden[name] = run_layer(used, hidden[name], turned[name], watch)
    norm = weights.final_norm.dense()
    return {name: rms_norm(each, norm, config.rms_eps) for name, each in hidden.items()}


class Head:
    """The head of a model, asked for log probabilities a few rows at a time."""

    def __init__(self, weights: Weights) -> None:
        head = weights.head
        self._weight = (weights.embedding if head is None else head.weight).dense()
        self._bias = None if head is None or head.bias is None else head.bias.dense()

    @torch.inference_mode()
    def log_probabilities(self, states: Tensor) -> Iterator[Tensor]:
        """fp64 [at most ROWS, vocab_size] for the rows of `states`, in pieces."""
        for logits in self._logits(states):
            yield logits.double().log_softmax(-1)

    @torch.inference_mode()
    def losses(self, states: Tensor, ids: Sequence[int]) -> Tensor:
        """-log P of every token but the first, nats, fp64 [len(ids) - 1]; NaN where numbers overflowed."""
        targets = torch.tensor(ids[1:]).split(ROWS)
        pieces = zip(self._logits(states[:-1]), targets, strict=True)
        found = [each.logsumexp(-1) - each.gather(1, wanted[:, None])[:, 0] for each, wanted in pieces]
        return torch.cat(found).double()

    def _logits(self, states: Tensor) -> Iterator[Tensor]:
        for rows in states.split(ROWS):
            yield linear(rows, self._weight, self._bias)


def gain(as_is: Tensor, variant: Tensor) -> Gain:
    """Of a variant over the file as it is, from the losses of both. Not a number where they are not."""
    difference = as_is - variant
    return Gain(float(difference.mean()), float(difference.std() / math.sqrt(len(difference))))


def swapped(layers: Sequence[int] | None = None) -> Variant:
    """gate and up in each other's place, in these layers, or (None) in all."""

    def change(index: int, layer: Layer) -> Layer:
        if layers is not None and index not in layers:
            return layer
        other = copy(layer)
        other.gate, other.up = layer.up, layer.gate
        return other

    return Variant(change=change)


def reordered(parts: Sequence[str], order: Callable[[Tensor, str], Tensor]) -> Variant:
    """q, k or both with their rows in another order. order: from rows [heads * head_dim, …] and the part's name to
    those rows in the order that is tried."""

    def change(_: int, layer: Layer) -> Layer:
        other = copy(layer)
        for part in parts:
            product: Resident = copy(getattr(layer, part))
            product.weight = order(product.weight, part)
            if product.bias is not None:
                product.bias = order(product.bias, part)
            setattr(other, part, product)
        return other

    return Variant(change=change)
