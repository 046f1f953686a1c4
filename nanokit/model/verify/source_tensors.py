"""Are the weights the source's, as far as their types can keep them?

Of every tensor the relative error |file - source| / |source| is compared with what rounding to its type explains, and
of q and k the cosine of every head, for one wrong head of many hides in a matrix. Where it does not fit, the mistakes
that converters make are tried in turn, so that the report says what the tensor holds instead.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanokit.model.calibrate import Progress
from nanokit.model.config import ModelConfig
from nanokit.model.export import interleaved
from nanokit.model.source import GGUFSource, ModelSource, interleaved_heads, unpermute
from nanokit.model.verify.behaviour import LAYERS, ORDER, ROW_ORDER
from nanokit.model.verify.report import Check, Found, listed
from nanokit.model.weights import LayerWeights, Linear, Matrix, Stored, Weights
from nanokit.quant.policy import ATTENTION, FEED_FORWARD

PART = "source"
TENSORS, HEADS = "weights as in the source", "heads of q and k"
# What rounding explains, relative to the weights: of floats a few units of their last place; of b bits, three times
# what Q4_0 costs normally distributed weights (tests/model/test_verify.py computes it), halved with every bit more.
FLOATS = {"F32": 1e-6, "F16": 1e-3, "BF16": 8e-3}
AT_4_5_BITS = 0.26
ROWS = 1024  # compared together
ROUNDED_SCALE = 2e-3
FITS = 3  # rounds
LIKE = 0.5  # a relative error below it: the same matrix, if badly rounded; unrelated ones have 1.4


def explained(stored: Stored) -> float:
    """The largest relative error that storing a tensor this way explains."""
    if stored.type in FLOATS:
        return FLOATS[stored.type]
    bits = 8 * stored.nbytes / math.prod(stored.shape)
    return min(0.9, AT_4_5_BITS * 2 ** (4.5 - bits))


@dataclass(frozen=True)
class Compared:
    """A tensor of the file beside the source's. error: relative; bound: what their types explain; head: of q and k, the
    lowest cosine of a head and which, else None; holds: what it is instead, "" where that is unknown; folded: that it
    is the source's but for a factor to each row and each column; scale: how many times the source's it is on the whole.
    """

    name: str
    error: float
    bound: float
    head: tuple[float, int] | None = None
    holds: str = ""
    folded: bool = False
    scale: float = 1.0

    @property
    def good(self) -> bool:
        """Rounding leaves the scale of a whole tensor nearly where it was, however rough it is."""
        return self.error <= self.bound and abs(self.scale - 1) <= self.bound**2 + ROUNDED_SCALE

    @property
    def good_heads(self) -> bool:
        """1 - cosine is half the squared error of a head, if small; a head may be rounded worse than its matrix."""
        return self.head is None or 1 - self.head[0] <= self.bound**2


def compare_tensors(
    config: ModelConfig, ours: Weights, theirs: Weights, progress: Progress | None = None
) -> list[Compared]:
    """Every tensor of the file, in the order of the model. Both have the same shapes.

    Raises ModelFileError for weights of the source that are not finite.
    """
    found = [_compared(ours.embedding, theirs.embedding), _compared(ours.final_norm, theirs.final_norm)]
    if ours.head is not None:
        found.append(_compared(ours.head.weight, theirs.embedding if theirs.head is None else theirs.head.weight))
        found += _biases(ours.head, theirs.head or Linear(theirs.embedding, None))
    for index, (layer, other) in enumerate(zip(ours.layers, theirs.layers, strict=True)):
        if progress is not None:
            progress(index, len(ours.layers), "comparing with the source")
        found += _layer(config, layer, other)
    return found


def _layer(config: ModelConfig, ours: LayerWeights, theirs: LayerWeights) -> Iterator[Compared]:
    for name in ("attn_norm", "q_norm", "k_norm", "ffn_norm"):
        a, b = getattr(ours, name), getattr(theirs, name)
        if a is not None and b is not None:
            yield _compared(a, b)
    for role in ATTENTION + FEED_FORWARD:
        a, b = getattr(ours, role), getattr(theirs, role)
        count = {"q": config.num_heads, "k": config.num_kv_heads}.get(role)
        yield _compared(a.weight, b.weight, count, _mistakes(config, role, theirs))
        yield from _biases(a, b)


def _biases(ours: Linear, theirs: Linear) -> Iterator[Compared]:
    if ours.bias is not None and theirs.bias is not None:
        yield _compared(ours.bias, theirs.bias)
    elif ours.bias is not None:
        yield Compared(ours.bias.name, math.inf, 0.0, holds="a bias that the source does not have")
    elif theirs.bias is not None:
        name = ours.weight.name.removesuffix("weight") + "bias"
        yield Compared(name, math.inf, 0.0, holds="nothing: it is missing, and the source has one")


Mistakes = dict[str, Callable[[Tensor], Tensor]]  # what the tensor holds -> that, made of the source's own


def _compared(ours: Matrix, theirs: Matrix, heads: int | None = None, mistakes: Mistakes | None = None) -> Compared:
    if _same_bytes(ours, theirs):
        return Compared(ours.name, 0.0, 0.0, None if heads is None else (1.0, 0))
    a, b = ours.dense(), theirs.dense()
    bound = explained(ours.source.stored[ours.name]) + explained(theirs.source.stored[theirs.name])
    error, holds, folded = _error(a, b), "", False
    if error > bound:
        holds = next((what for what, make in (mistakes or {}).items() if _error(a, make(b)) < max(bound, LIKE)), "")
        if not holds and a.ndim == 2 and a.any():
            b = rescaled(a, b)
            folded = _error(b, a) <= bound
    head = None
    if heads is not None:
        cosines = torch.cosine_similarity(a.reshape(heads, -1).double(), b.reshape(heads, -1).double())
        head = (float(cosines.min()), int(cosines.argmin()))
    scale = float((a * b).sum(dtype=torch.float64) / b.square().sum(dtype=torch.float64).clamp(min=1e-30))
    return Compared(ours.name, error, bound, head, holds, folded, scale if error < math.inf else 1.0)


def _same_bytes(ours: Matrix, theirs: Matrix) -> bool:
    """Whether two GGUF files have the very same tensor, which need not be widened to be compared."""
    a, b = ours.source, theirs.source
    if not isinstance(a, GGUFSource) or not isinstance(b, GGUFSource) or ours.type != theirs.type:
        return False
    same_rows = interleaved_heads(a.config, ours.name) == interleaved_heads(b.config, theirs.name)
    return ours.shape == theirs.shape and same_rows and np.array_equal(a.file.raw(ours.name), b.file.raw(theirs.name))


def _error(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return math.inf
    pieces = zip(a.split(ROWS), b.split(ROWS), strict=True)  # the largest matrix is there twice already
    off = math.sqrt(sum(float((x - y).square().sum(dtype=torch.float64)) for x, y in pieces))
    return off / max(float(b.norm()), 1e-30)


def rescaled(a: Tensor, b: Tensor) -> Tensor:
    """diag(r) b diag(c), with r and c, not below 0, fitted to a in turns by least squares: where scales were folded
    from one tensor into another, that is a."""
    for axis in (0, 1) * FITS:
        overlap = (a * b).sum(axis, keepdim=True) / b.square().sum(axis, keepdim=True).clamp(min=1e-30)
        b = b * overlap.clamp(min=0)
    return b


def _mistakes(config: ModelConfig, role: str, theirs: LayerWeights) -> Mistakes:
    if role in ("gate", "up"):
        other = "up" if role == "gate" else "gate"
        return {f"the source's {other} projection": lambda _: getattr(theirs, other).weight.dense()}
    if role not in ("q", "k"):
        return {}
    heads = config.num_heads if role == "q" else config.num_kv_heads
    rows = heads * config.head_dim

    def mixed(count: int, back: int) -> Callable[[Tensor], Tensor]:
        """Rows interleaved as those of `count` heads, and read as those of `back`; 0: not at all."""

        def make(b: Tensor) -> Tensor:
            stored = torch.from_numpy(interleaved(np.asarray(b), count)) if count else b
            return unpermute(stored, back) if back else stored

        return make

    back = heads if config.architecture == "llama" else 0
    found = {"its rows in the order of the other kind of file": mixed(0 if back else heads, back)}
    for count in range(1, rows // 2 + 1):
        if count != heads and rows % (2 * count) == 0:
            found[f"its rows interleaved as those of {count} heads instead of {heads}"] = mixed(count, back)
    return found


def tensor_checks(found: list[Compared]) -> list[Check]:
    """The verdicts: of all tensors, of the heads of q and k, and of the two mistakes that have names."""
    wrong = [each for each in found if not each.good]
    checks = [Check(PART, TENSORS, *_all(found, wrong)), Check(PART, HEADS, *_heads(found))]
    for name, parts in ((ROW_ORDER, (".attn_q.", ".attn_k.", ".q_proj.", ".k_proj.")), (ORDER, ("ffn_gate", "ffn_up"))):
        mixed = [each for each in wrong if each.holds and any(part in each.name for part in parts)]
        said = listed(f"{each.name} holds {each.holds}" for each in mixed)
        checks.append(Check("behaviour", name, "failed" if mixed else "ok", said or "the source's own"))
    checks.append(Check("behaviour", LAYERS, checks[-1].verdict, checks[-1].said))
    return checks


def _all(found: list[Compared], wrong: list[Compared]) -> Found:
    matrices = [each for each in wrong if each.folded]
    vectors = [each for each in wrong if each.name.endswith((".bias", "norm.weight")) and not each.holds]
    if matrices and len(matrices) + len(vectors) == len(wrong):
        named = listed(each.name for each in matrices)
        what = "have other scales for whole rows or columns, as AWQ and SmoothQuant fold them"
        return "warning", f"{len(matrices)} matrices {what}: {named}"
    if wrong:
        said = (
            f"{each.name} differs by {each.error:.2g} of its size, where its type explains {each.bound:.2g}"
            + (f": it holds {each.holds}" if each.holds else f", and is {each.scale:.3g} times the source's")
            for each in wrong
        )
        return "failed", f"{len(wrong)} of {len(found)}: {listed(said)}"
    worst = max(found, key=lambda each: each.error)
    return "ok", (
        f"{len(found)} tensors; the farthest, {worst.name}, is off by {worst.error:.2g} of its size, where its type "
        f"explains {worst.bound:.2g}"
    )


def _heads(found: list[Compared]) -> Found:
    every = [(each.head, each) for each in found if each.head is not None]
    said = [f"{each.name}, head {at}: cosine {cosine:.3f}" for (cosine, at), each in every if not each.good_heads]
    if said:
        return "failed", f"{len(said)} matrices: {listed(said)}"
    (cosine, at), lowest = min(every, key=lambda pair: pair[0])
    return "ok", f"the lowest cosine with the source's is {cosine:.4f}, head {at} of {lowest.name}"


def noise(found: list[Compared]) -> float:
    """The power of rounding noise beside the weights': mean squared relative error, of each tensor at most what its
    type explains."""
    return sum(min(each.error, each.bound) ** 2 for each in found) / len(found)


def same_model(file: ModelSource, source: ModelSource) -> bool:
    """Whether tensors can be compared at all."""
    a, b = file.config, source.config
    names = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
    return all(getattr(a, name) == getattr(b, name) for name in names)
