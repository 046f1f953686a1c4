"""A model run over whole windows of tokens, one layer at a time, its weights in fp32 and open to change.

Calibration and sensitivity need what the engine hides: the input of every product, a layer run twice with other
weights, and never more than one layer widened. So this walks layers instead of steps, with the operations of the
reference (kernels/reference.py) on windows that stand alone: all tokens of all windows are rows, attention is causal
inside each, no KV pages.

    hidden  -> attn_norm -> [q k v]     place 0, attention input
            -> attention -> [o]         place 1, attention output         hidden += o
            -> ffn_norm  -> [gate up]   place 2, feed-forward input
            -> silu gate -> [down]      place 3, feed-forward middle      hidden += down
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanokit.errors import ParameterError
from nanokit.kernels.reference import Layer, Resident, attention, heads, rms_norm, silu_gate
from nanokit.model.config import ModelConfig
from nanokit.model.weights import Weights


@dataclass(frozen=True)
class Windows:
    """token_ids: int64 [rows], windows one after another; lengths: tokens of each; cos, sin: fp32 [rows, head_dim / 2],
    positions starting at 0 in each window."""

    config: ModelConfig
    token_ids: Tensor
    lengths: tuple[int, ...]
    cos: Tensor
    sin: Tensor

    def parts(self) -> list[slice]:
        """The rows of each window."""
        ends = torch.tensor(self.lengths).cumsum(0).tolist()
        return [slice(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]

    def repeated(self, times: int) -> "Windows":
        """The same windows several times, one set after another."""
        ids, cos, sin = (part.repeat(times, *[1] * (part.ndim - 1)) for part in (self.token_ids, self.cos, self.sin))
        return replace(self, token_ids=ids, lengths=self.lengths * times, cos=cos, sin=sin)


def windows_of(config: ModelConfig, token_ids: list[list[int]]) -> Windows:
    """Windows of a model's tokens. Raises ParameterError for none, an empty or too long one, and ids beyond the
    vocabulary."""
    lengths = tuple(len(window) for window in token_ids)
    if not lengths or not all(0 < length <= config.max_context for length in lengths):
        raise ParameterError(
            "these windows of tokens cannot be run",
            found=f"{len(lengths)} windows, of {min(lengths, default=0)} to {max(lengths, default=0)} tokens",
            needed=f"one or more of 1 to {config.max_context} tokens",
        )
    ids = torch.tensor([token for window in token_ids for token in window], dtype=torch.int64)
    if not 0 <= int(ids.min()) <= int(ids.max()) < config.vocab_size:
        raise ParameterError(
            "these tokens are not the model's",
            found=f"ids from {int(ids.min())} to {int(ids.max())}",
            needed=f"0 to {config.vocab_size - 1}",
            do="encode the text with this model's own tokenizer",
        )
    positions = torch.cat([torch.arange(length) for length in lengths]).float()
    angles = positions[:, None] * config.rope.inverse_frequencies(config.head_dim)
    return Windows(config, ids, lengths, angles.cos(), angles.sin())


def read_layer(weights: Weights, index: int) -> Layer:
    """A layer widened to fp32; the `weight` of each of its products may be replaced."""
    return Layer(weights.layers[index], Resident)


def attended(layer: Layer, x: Tensor, windows: Windows) -> Tensor:
    """Attention's output before `o`, [rows, heads * head_dim], of its input x (after the norm)."""
    q, k, v = heads(layer, windows.config, x, windows.cos, windows.sin)
    out = torch.empty_like(q)
    for rows in windows.parts():
        visible = torch.arange(1, rows.stop - rows.start + 1)
        out[rows] = attention(q[rows], k[rows].transpose(0, 1), v[rows].transpose(0, 1), visible)
    return out.flatten(1)


def run_layer(
    layer: Layer, hidden: Tensor, windows: Windows, see: Callable[[Tensor, Tensor], None] | None = None
) -> Tensor:
    """Hidden states after the layer, fp32 [rows, hidden_size]. see: called with what gate and up give, fp32 [rows,
    intermediate_size] each."""
    eps = windows.config.rms_eps
    hidden = hidden + layer.o(attended(layer, rms_norm(hidden, layer.attn_norm, eps), windows))
    x = rms_norm(hidden, layer.ffn_norm, eps)
    gate, up = layer.gate(x), layer.up(x)
    if see is not None:
        see(gate, up)
    return hidden + layer.down(silu_gate(gate, up))
