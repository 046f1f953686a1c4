"""The reference backend: every operation of the forward in plain torch, fp32.

This file is the contract. Other backends are tested against these functions, one by one and as a whole; none of
them may be cleverer about what a row means. Written for reading: attention gathers the pages of each sequence into
one piece and calls torch's scaled dot product, which copies what a real kernel would walk.

Shapes: n rows (tokens of all sequences of the step, flattened), Hq query heads, Hk key/value heads, d per head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

if TYPE_CHECKING:
    from nanokit.model.batch import Batch
    from nanokit.model.config import ModelConfig
    from nanokit.model.weights import LayerWeights, Linear, Weights

LANES = 16


class Pages(Protocol):
    """Where keys and values lie: `layer(i)` gives the two page tensors drawn in nanokit/kv/pages.py."""

    block_size: int

    def layer(self, index: int) -> tuple[Tensor, Tensor]: ...


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich 2019)."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [n, heads, d], pairs (i, i + d/2); cos, sin [n, d/2]."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def write_kv(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Store k, v [n, Hk, d] in the pages; slots [n] = block id * block size + offset in the block."""
    block_size = keys.shape[2] * LANES
    block, group, lane = slots // block_size, slots % block_size // LANES, slots % LANES
    keys[block, :, group, :, lane] = k.to(keys.dtype)
    values[block, :, group, lane, :] = v.to(values.dtype)


def read_kv(keys: Tensor, values: Tensor, blocks: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
    """The first kv_len tokens of a sequence, gathered to [Hk, kv_len, d] in fp32."""
    k = keys[blocks].permute(1, 0, 2, 4, 3).flatten(1, 3)[:, :kv_len]
    v = values[blocks].permute(1, 0, 2, 3, 4).flatten(1, 3)[:, :kv_len]
    return k.float(), v.float()


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


@dataclass(frozen=True)
class Span:
    """One sequence of a step: its rows, the blocks that hold its context, and what each row may see."""

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
    sequences: Sequence[Span]
    pages: Pages


class Resident:
    """weight and bias of a linear layer in memory, fp32."""

    def __init__(self, layer: "Linear") -> None:
        self._pair = layer.weight.dense(), None if layer.bias is None else layer.bias.dense()

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, *self._pair)


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


class Bound:
    """A model bound to this backend, nothing packed: weights in fp32, in memory or (the layers) in their file."""

    def __init__(self, config: "ModelConfig", weights: "Weights", resident: bool) -> None:
        self._config = config
        self._embedding, self._final_norm = weights.embedding.dense(), weights.final_norm.dense()
        self._layers = [Layer(layer, Resident if resident else Mapped) for layer in weights.layers]
        self._inverse_frequencies = config.rope.inverse_frequencies(config.head_dim)
        head = weights.head
        bias = None if head is None or head.bias is None else head.bias.dense()
        self.head_weight = (self._embedding if head is None else head.weight.dense(), bias)

    def plan(self, batch: "Batch", pages: Pages) -> Plan:
        """Resolve positions, slots and pages of a step. Sequences without new tokens take no part in it."""
        positions: list[int] = []
        slots: list[int] = []
        sequences = []
        size = pages.block_size
        for query_len, kv_len, table in zip(batch.query_lens, batch.kv_lens, batch.block_tables, strict=True):
            if query_len == 0:
                continue
            new = range(kv_len - query_len, kv_len)
            rows = slice(len(positions), len(positions) + query_len)
            positions.extend(new)
            slots.extend(table[p // size] * size + p % size for p in new)
            blocks = torch.tensor(table[: -(-kv_len // size)])
            sequences.append(Span(rows, kv_len, blocks, torch.arange(new.start + 1, kv_len + 1)))
        angles = torch.tensor(positions, dtype=torch.float32)[:, None] * self._inverse_frequencies
        return Plan(
            torch.tensor(batch.token_ids, dtype=torch.int64),
            angles.cos(),
            angles.sin(),
            torch.tensor(slots, dtype=torch.int64),
            sequences,
            pages,
        )

    def run(self, plan: Plan) -> Tensor:
        """Hidden states after the final norm, fp32 [rows, hidden_size]; writes the step's keys and values."""
        eps = self._config.rms_eps
        hidden = self._embedding[plan.token_ids]
        for index, layer in enumerate(self._layers):
            hidden = hidden + self._attend(layer, index, rms_norm(hidden, layer.attn_norm, eps), plan)
            x = rms_norm(hidden, layer.ffn_norm, eps)
            hidden = hidden + layer.down(silu_gate(layer.gate(x), layer.up(x)))
        return rms_norm(hidden, self._final_norm, eps)

    def _attend(self, layer: Layer, index: int, x: Tensor, plan: Plan) -> Tensor:
        config = self._config
        q = layer.q(x).unflatten(-1, (config.num_heads, config.head_dim))
        k = layer.k(x).unflatten(-1, (config.num_kv_heads, config.head_dim))
        v = layer.v(x).unflatten(-1, (config.num_kv_heads, config.head_dim))
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = rms_norm(q, layer.q_norm, config.rms_eps), rms_norm(k, layer.k_norm, config.rms_eps)
        q, k = rotate(q, plan.cos, plan.sin), rotate(k, plan.cos, plan.sin)
        keys, values = plan.pages.layer(index)
        write_kv(keys, values, plan.slots, k, v)
        out = torch.empty_like(q)
        for sequence in plan.sequences:
            past = read_kv(keys, values, sequence.blocks, sequence.kv_len)
            out[sequence.rows] = attention(q[sequence.rows], *past, sequence.visible)
        return layer.o(out.flatten(1))


def bind(config: "ModelConfig", weights: "Weights", resident: bool = True) -> Bound:
    """Read and bind a model's weights; every type is accepted, since this backend widens all of them to fp32.

    resident: False leaves the layers in their file, to be read and widened again in every step.
    """
    return Bound(config, weights, resident)
