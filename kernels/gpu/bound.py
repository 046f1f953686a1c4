"""A model bound to the Triton kernels: weights packed onto the device once, a step resolved once, then some twenty
launches a layer, none of which waits for the host.

`bind` refuses what the kernels cannot take before it packs anything. The residual is added where the next norm reads
it, and what a product reads is quantized where it is computed. Hidden states and logits stay on the device; ids of an
argmax come back.
"""

import time
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanokit.errors import ParameterError
from nanokit.kernels.activations import checked_peaks, not_calibrated, note_peak
from nanokit.kernels.gpu import runtime
from nanokit.kernels.gpu.activations import Activations, check_mode, quantize
from nanokit.kernels.gpu.attention import attention, tile_rows
from nanokit.kernels.gpu.pack import Packed, pack
from nanokit.kernels.gpu.product import multiply, rows_of
from nanokit.kernels.gpu.rope import rotate_and_store
from nanokit.kernels.gpu.rows import rms_norm, silu_gate
from nanokit.kernels.gpu.select import Selection, argmax_rows
from nanokit.kernels.gpu.step import Step, make_step
from nanokit.kernels.rotation import Rotation

if TYPE_CHECKING:
    from nanokit.kernels.paged import Pages
    from nanokit.model.batch import Batch
    from nanokit.model.config import ModelConfig
    from nanokit.model.weights import LayerWeights, Linear, Matrix, Weights

PAGES = ("fp32", "fp16", "int8", "int8-static", "int4")


@dataclass(frozen=True)
class Plan:
    """One step, resolved: see gpu.step. cos, sin: fp32 [rows, head_dim / 2]."""

    step: Step
    cos: Tensor
    sin: Tensor
    pages: "Pages"


class Layer:
    """One layer's packed matrices and its norms on the device."""

    def __init__(self, w: "LayerWeights") -> None:
        self.attn_norm, self.ffn_norm = _vector(w.attn_norm), _vector(w.ffn_norm)
        self.q_norm = None if w.q_norm is None else _vector(w.q_norm)
        self.k_norm = None if w.k_norm is None else _vector(w.k_norm)
        self.q, self.k, self.v, self.o = (_linear(x) for x in (w.q, w.k, w.v, w.o))
        self.gate, self.up, self.down = (_linear(x) for x in (w.gate, w.up, w.down))
        self.matrices = (self.q, self.k, self.v, self.o, self.gate, self.up, self.down)


class Bound:
    """See the module. peaks: of static activations, as in kernels/reference.py."""

    def __init__(self, config: "ModelConfig", weights: "Weights", activations: str) -> None:
        self._config, self._mode, self._device = config, activations, runtime.device()
        self.variant = "triton-interpreter" if runtime.INTERPRETED else "triton"
        self.selection = Selection()
        self._layers = [Layer(layer) for layer in weights.layers]
        self._embedding = _packed(weights.embedding)
        self._head = self._embedding if weights.head is None else _linear(weights.head)
        self._final_norm = _vector(weights.final_norm)
        self._tile_rows = tile_rows(config.num_heads, config.num_kv_heads)
        self._rotation = Rotation(config.rope.inverse_frequencies(config.head_dim), device=self._device)
        self.peaks: Tensor | None = None
        self._device_peaks: Tensor | None = None

    def calibrate(self, peaks: Tensor) -> None:
        """Set the peaks of static activations, as `run` and `logits` noted them on a text. Raises ParameterError for
        peaks that are not this model's, and in another mode."""
        self.peaks = checked_peaks(peaks, len(self._layers), self._mode)
        # Each alone at the beginning of 16 bytes, where a kernel wants what it reads.
        self._device_peaks = self.peaks.to(self._device)[:, None].repeat(1, 4)

    def in_mode(self, mode: str) -> "Bound":
        """The same weights in another activation mode; static has no peaks yet. Raises ParameterError for an unknown
        one."""
        check_mode(mode)
        other = copy(self)
        other._mode, other.peaks, other._device_peaks = mode, None, None
        return other

    # -- a step -------------------------------------------------------------------------------------------------------

    def plan(self, batch: "Batch", pages: "Pages") -> Plan:
        """Resolve positions, slots, tiles and pages of a step. Sequences without new tokens take no part in it."""
        if pages.kv_format not in PAGES:
            raise ParameterError("no such pages in the Triton kernels", found=pages.kv_format, needed=", ".join(PAGES))
        pages.begin_step(batch)
        step = make_step(batch, pages.block_size, self._tile_rows, self._device)
        self._rotation = rotation = self._rotation.reaching(step.longest)
        return Plan(step, rotation.cos[step.positions], rotation.sin[step.positions], pages)

    @torch.inference_mode()
    def run(self, plan: Plan, peaks: Tensor | None = None) -> Tensor:
        """Hidden states after the final norm, fp32 [rows, hidden_size] on the device; writes the step's keys and
        values.

        peaks: noted there instead (`activations.no_peaks`), the activations of this step staying in fp32. Raises
        ParameterError for static activations without peaks.
        """
        eps = self._config.rms_eps
        mode = self._mode if peaks is None else "fp32"
        hidden = rows_of(self._embedding, plan.step.token_ids)
        delta = None
        for index, layer in enumerate(self._layers):
            place = 4 * index
            x = rms_norm(hidden, layer.attn_norm, eps, mode, self._peak(place, mode), delta)
            _note(peaks, place, x)
            x = quantize(self._attend(layer, index, x, plan), mode, self._peak(place + 1, mode))
            _note(peaks, place + 1, x)
            delta = multiply(layer.o, x)
            x = rms_norm(hidden, layer.ffn_norm, eps, mode, self._peak(place + 2, mode), delta)
            _note(peaks, place + 2, x)
            x = silu_gate(multiply(layer.gate, x), multiply(layer.up, x), mode, self._peak(place + 3, mode))
            _note(peaks, place + 3, x)
            delta = multiply(layer.down, x)
        return rms_norm(hidden, self._final_norm, eps, "fp32", delta=delta).dequantize()

    @torch.inference_mode()
    def logits(self, hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        """fp32 [rows, vocab_size], or [rows, len(ids)], on the device. hidden: as `run` gives it. Raises IndexError for
        an id beyond the vocabulary."""
        if ids is not None:
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._config.vocab_size:
                raise IndexError(f"an id lies outside 0…{self._config.vocab_size - 1}")
            ids = ids.to(self._device, torch.int64).contiguous()
        x = quantize(hidden.to(torch.float32).contiguous(), self._mode, self._peak(4 * len(self._layers), self._mode))
        return multiply(self._head, x, ids)

    def argmax(self, hidden: Tensor) -> Tensor:
        """The id of the largest logit, int64 [rows] on the CPU: the lowest among equals, -1 where one is not finite."""
        return argmax_rows(self.logits(hidden)).cpu()

    # -- what a step reads --------------------------------------------------------------------------------------------

    @property
    def bytes_per_token(self) -> int:
        """Bytes of weights that one decoded token reads, as they are packed."""
        return sum(packed.nbytes for packed in self._matrices())

    def stream(self) -> float:
        """Seconds to read every packed weight once, and do nothing else with it."""
        arrays = [array for packed in self._matrices() for array in packed.arrays]
        self._synchronize()
        started = time.perf_counter()
        for array in arrays:
            array.view(torch.int32).sum()
        self._synchronize()
        return time.perf_counter() - started

    # -----------------------------------------------------------------------------------------------------------------

    def _matrices(self) -> list[Packed]:
        return [*(matrix for layer in self._layers for matrix in layer.matrices), self._head]

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _peak(self, place: int, mode: str) -> Tensor | None:
        """Of static activations: fp32 [1]."""
        if mode != "static":
            return None
        if self._device_peaks is None:
            raise not_calibrated()
        return self._device_peaks[place, :1]

    def _attend(self, layer: Layer, index: int, x: Activations, plan: Plan) -> Tensor:
        """Attention's output before `o`, fp32 [rows, heads * head_dim]."""
        config, pages = self._config, plan.pages.layer(index)
        q = multiply(layer.q, x).unflatten(-1, (config.num_heads, config.head_dim))
        k = multiply(layer.k, x).unflatten(-1, (config.num_kv_heads, config.head_dim))
        v = multiply(layer.v, x).unflatten(-1, (config.num_kv_heads, config.head_dim))
        norms = (layer.q_norm, layer.k_norm, config.rms_eps)
        rotate_and_store(q, k, v, plan.cos, plan.sin, plan.step.slots, pages, *norms, peaks=plan.pages.peaks(index))
        return attention(q, pages, plan.step, scale=config.head_dim**-0.5).flatten(1)


def _note(peaks: Tensor | None, place: int, x: Activations) -> None:
    if peaks is not None:
        note_peak(peaks, place, x.dequantize())


def _linear(layer: "Linear") -> Packed:
    return _packed(layer.weight, None if layer.bias is None else layer.bias.dense().numpy())


def _packed(matrix: "Matrix", bias: np.ndarray | None = None) -> Packed:
    codes = matrix.quantized()
    assert codes is not None, f"{matrix.name} has no codes"  # `check` was asked before
    return pack(matrix.name, codes, bias)


def _vector(vector: "Matrix") -> Tensor:
    return vector.dense().to(runtime.device()).contiguous()
