"""The reference backend: every operation of the forward in plain torch, fp32.

This file is the contract. Other backends are tested against these functions, one by one and as a whole; none of
them may be cleverer about what a row means. Written for reading: attention gathers the pages of each sequence into
one piece and calls torch's scaled dot product, which copies what a real kernel would walk.

Activation modes (kernels/activations.py): the input of every linear layer and of the head is quantized, widened again
and multiplied by the widened weights in fp32. That equals the integer products of other backends to float rounding.
Embedding, norms, rope, attention and the gate stay in fp32.

Shapes: n rows (tokens of all sequences of the step, flattened), Hq query heads, Hk key/value heads, d per head.
"""

import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from nanokit.kernels import kivi, selection
from nanokit.kernels.activations import (
    check_columns,
    check_mode,
    checked_peaks,
    columns_of,
    not_calibrated,
    note_peak,
    quantize,
)  # fmt: skip
from nanokit.kernels.paged import Pages, read_kv, write_kv

if TYPE_CHECKING:
    from nanokit.model.batch import Batch
    from nanokit.model.config import ModelConfig
    from nanokit.model.weights import LayerWeights, Linear, Weights


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich 2019)."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [n, heads, d], pairs (i, i + d/2); cos, sin [n, d/2]."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Row i of q [n, Hq, d] attends to the first visible[i] tokens of k, v [Hk, kv_len, d].

    Query head h reads key/value head h * Hk // Hq. A row that sees nothing (visible 0) gives zeros, not NaN.
    Returns [n, Hq, d].
    """
    if visible.numel() == 1 and int(visible) == k.shape[1]:
        mask = None
    else:
        mask = torch.arange(k.shape[1], device=q.device) < visible[:, None]
    repeat = q.shape[1] // k.shape[0]
    out = scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.repeat_interleave(repeat, dim=0)[None],
        v.repeat_interleave(repeat, dim=0)[None],
        attn_mask=mask,
    )[0].transpose(0, 1)
    return torch.where(visible[:, None, None] > 0, out, 0.0)


def silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020, SwiGLU)."""
    return silu(gate) * up


Observer = Callable[[int, Tensor], None]


@dataclass(frozen=True)
class Span:
    """Rows of one sequence of a step, the blocks that hold their context, and what each row may see. All rows of a
    sequence, or, where a row sees its own page otherwise than earlier ones (kivi4), those of one page."""

    rows: slice
    kv_len: int
    blocks: Tensor
    visible: Tensor


@dataclass(frozen=True)
class Plan:
    """One step, resolved once and used by every layer."""

    token_ids: Tensor
    cos: Tensor
    sin: Tensor
    slots: Tensor
    spans: Sequence[Span]
    pages: Pages
    full: list[int]  # blocks to seal


class Resident:
    """weight and bias of a linear layer in memory, fp32."""

    def __init__(self, layer: "Linear") -> None:
        self.weight = layer.weight.dense()
        self.bias = None if layer.bias is None else layer.bias.dense()

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Mapped:
    """A linear layer that stays in its file: read, widened and dropped in every step. Slow, and small."""

    def __init__(self, layer: "Linear") -> None:
        Resident(layer)  # refuses now what would otherwise fail in the middle of an answer
        self._layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        return Resident(self._layer)(x)


class Layer:
    """One layer's weights, ready to use."""

    def __init__(self, weights: "LayerWeights", keep: type[Resident] | type[Mapped]) -> None:
        self.attn_norm, self.ffn_norm = weights.attn_norm.dense(), weights.ffn_norm.dense()
        self.q_norm = weights.q_norm.dense() if weights.q_norm else None
        self.k_norm = weights.k_norm.dense() if weights.k_norm else None
        self.q, self.k, self.v, self.o = keep(weights.q), keep(weights.k), keep(weights.v), keep(weights.o)
        self.gate, self.up, self.down = keep(weights.gate), keep(weights.up), keep(weights.down)
        self.linears = (self.q, self.k, self.v, self.o, self.gate, self.up, self.down)


def heads(layer: Layer, config: "ModelConfig", x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys (both rotated) and values of the rows x [n, hidden_size]: [n, heads, d] each."""
    q = layer.q(x).unflatten(-1, (config.num_heads, config.head_dim))
    k = layer.k(x).unflatten(-1, (config.num_kv_heads, config.head_dim))
    v = layer.v(x).unflatten(-1, (config.num_kv_heads, config.head_dim))
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = rms_norm(q, layer.q_norm, config.rms_eps), rms_norm(k, layer.k_norm, config.rms_eps)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


class Bound:
    """A model bound to this backend, nothing packed: weights in fp32, in memory or (the layers) in their file.

    peaks: of static activations, fp32 [4 * layers + 1] (`activations.place_name` says of what); None before
    `calibrate`, and in the other modes.
    """

    variant = "torch"
    selection = selection  # the questions about logits that `FullHead` asks

    def __init__(self, config: "ModelConfig", weights: "Weights", resident: bool, activations: str) -> None:
        self._config, self._mode, self._columns = config, activations, columns_of(weights)
        self._check_columns()
        self._embedding, self._final_norm = weights.embedding.dense(), weights.final_norm.dense()
        self._layers = [Layer(layer, Resident if resident else Mapped) for layer in weights.layers]
        self._inverse_frequencies = config.rope.inverse_frequencies(config.head_dim)
        head = weights.head
        bias = None if head is None or head.bias is None else head.bias.dense()
        self._head_weight = (self._embedding if head is None else head.weight.dense(), bias)
        self.peaks: Tensor | None = None

    def calibrate(self, peaks: Tensor) -> None:
        """Set the peaks of static activations, as `run` and `logits` noted them on a text. Raises ParameterError for
        peaks that are not this model's, and in another mode."""
        self.peaks = checked_peaks(peaks, len(self._layers), self._mode)

    def in_mode(self, mode: str) -> "Bound":
        """The same weights in another activation mode; static has no peaks yet. Raises ParameterError for an unknown
        one, and for columns that its groups do not divide."""
        check_mode(mode)
        other = copy(self)
        other._mode, other.peaks = mode, None
        other._check_columns()
        return other

    def plan(self, batch: "Batch", pages: Pages) -> Plan:
        """Resolve positions, slots and pages of a step. Sequences without new tokens take no part in it."""
        positions: list[int] = []
        slots: list[int] = []
        spans = []
        size = pages.block_size
        full = pages.begin_step(batch)
        for query_len, kv_len, table in zip(batch.query_lens, batch.kv_lens, batch.block_tables, strict=True):
            if query_len == 0:
                continue
            new = range(kv_len - query_len, kv_len)
            borders = range((new.start // size + 1) * size, kv_len, size) if pages.kv_format == "kivi4" else ()
            for first, end in pairwise([new.start, *borders, kv_len]):
                rows = slice(len(positions), len(positions) + end - first)
                positions.extend(range(first, end))
                blocks = torch.tensor(table[: -(-end // size)])
                spans.append(Span(rows, end, blocks, torch.arange(first + 1, end + 1)))
            slots.extend(table[p // size] * size + p % size for p in new)
        angles = torch.tensor(positions, dtype=torch.float32)[:, None] * self._inverse_frequencies
        return Plan(
            torch.tensor(batch.token_ids, dtype=torch.int64),
            angles.cos(),
            angles.sin(),
            torch.tensor(slots, dtype=torch.int64),
            spans,
            pages,
            full,
        )

    @torch.inference_mode()
    def run(self, plan: Plan, peaks: Tensor | None = None, observe: Observer | None = None) -> Tensor:
        """Hidden states after the final norm, fp32 [rows, hidden_size]; writes the step's keys and values.

        peaks: noted there instead (`activations.no_peaks`), the activations of this step staying in fp32. observe:
        called with each place and the input of its products, fp32 [rows, columns], before it is quantized; the head's
        input is what this returns. Raises ParameterError for static activations without peaks.
        """
        eps = self._config.rms_eps
        hidden = self._embedding[plan.token_ids]
        for index, layer in enumerate(self._layers):
            x = self._seen(rms_norm(hidden, layer.attn_norm, eps), 4 * index, peaks, observe)
            attended = self._seen(self._attend(layer, index, x, plan), 4 * index + 1, peaks, observe)
            hidden = hidden + layer.o(attended)
            x = self._seen(rms_norm(hidden, layer.ffn_norm, eps), 4 * index + 2, peaks, observe)
            gated = self._seen(silu_gate(layer.gate(x), layer.up(x)), 4 * index + 3, peaks, observe)
            hidden = hidden + layer.down(gated)
        return rms_norm(hidden, self._final_norm, eps)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        """Logits of all ids [rows, vocab_size], or of the given ids [rows, len(ids)], fp32. hidden: as `run` gives
        it."""
        weight, bias = self._head_weight
        if ids is not None:
            weight, bias = weight[ids], None if bias is None else bias[ids]
        return linear(self._seen(hidden.float(), 4 * len(self._layers)), weight, bias)

    def argmax(self, hidden: Tensor) -> Tensor:
        """The id of the largest logit, int64 [rows]; among equals the lowest id; -1 where one is not finite."""
        return torch.tensor([selection.argmax(row) for row in self.logits(hidden)], dtype=torch.int64)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of weights in memory that one decoded token reads, in fp32 (layers left in their file are not)."""
        return sum(weight.nbytes for weight in self._streamed())

    def stream(self) -> float:
        """Seconds to read those weights once and only add them up, by torch's threads."""
        started = time.perf_counter()
        for weight in self._streamed():
            weight.sum()
        return time.perf_counter() - started

    def _check_columns(self) -> None:
        for name, columns in self._columns:
            check_columns(name, columns, self._mode)

    def _streamed(self) -> list[Tensor]:
        layers = [x.weight for layer in self._layers for x in layer.linears if isinstance(x, Resident)]
        return [*layers, self._head_weight[0]]

    def _seen(self, x: Tensor, place: int, peaks: Tensor | None = None, observe: Observer | None = None) -> Tensor:
        """What the next product sees of its input x [rows, cols]."""
        if observe is not None:
            observe(place, x)
        if peaks is not None:
            note_peak(peaks, place, x)
            return x
        if self._mode == "fp32":
            return x
        if self._mode != "static":
            return quantize(x, self._mode).dequantize()
        if self.peaks is None:
            raise not_calibrated()
        return quantize(x, "static", self.peaks[place]).dequantize()

    def _attend(self, layer: Layer, index: int, x: Tensor, plan: Plan) -> Tensor:
        """Attention's output before `o`, [rows, heads * head_dim]; x is the quantized input that q, k and v share."""
        q, k, v = heads(layer, self._config, x, plan.cos, plan.sin)
        pages = plan.pages.layer(index)
        write_kv(pages, plan.slots, k, v, plan.pages.peaks(index))
        sealed = plan.pages.sealed(index)
        if sealed is not None and plan.full:
            kivi.seal(pages, sealed, plan.full)
        out = torch.empty_like(q)
        for span in plan.spans:
            seen = span.blocks, span.kv_len
            k, v = read_kv(pages, *seen) if sealed is None else kivi.read_kv(pages, sealed, *seen)
            out[span.rows] = attention(q[span.rows], k, v, span.visible)
        return out.flatten(1)


def bind(config: "ModelConfig", weights: "Weights", resident: bool = True, *, activations: str = "fp32") -> Bound:
    """Read and bind a model's weights; every type is accepted, since this backend widens all of them to fp32.

    resident: False leaves the layers in their file, to be read and widened again in every step. activations: a mode of
    `activations.MODES`. Raises ParameterError for an unknown one, and for columns that its groups do not divide.
    """
    check_mode(activations)
    return Bound(config, weights, resident, activations)
