"""A model bound to the C kernels: weights packed once, a step resolved once, a forward in one call.

`bind` refuses what the kernels cannot take before it packs anything; from then on nothing is checked twice. What C
reads (structures, page addresses, rope tables) is kept alive here, since ctypes keeps addresses only. A bound model
computes one step at a time, under its own lock: its workspace is scratch, which a call plans and may move before the
team's queue is reached, and ctypes lets other threads run meanwhile.
"""

import ctypes
import threading
import time
import weakref
from array import array
from collections.abc import Callable
from copy import copy
from ctypes import POINTER, byref, c_int, c_int64, c_long, c_uint64, c_void_p
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nanokit.errors import NanokitError, ParameterError
from nanokit.kernels.activations import checked_peaks, not_calibrated
from nanokit.kernels.cpu import structs
from nanokit.kernels.cpu.library import Library
from nanokit.kernels.cpu.pack import LANES, Arena, Packed, pack_rows
from nanokit.kernels.cpu.select import Selection
from nanokit.kernels.cpu.team import Team, team
from nanokit.kernels.rotation import Rotation
from nanokit.quant.qtensor import QTensor

if TYPE_CHECKING:
    from nanokit.kernels.paged import Pages
    from nanokit.model.batch import Batch
    from nanokit.model.config import ModelConfig
    from nanokit.model.weights import LayerWeights, Linear, Matrix, Weights

MODES = {"a16": 0, "a8g32": 1, "a8g16": 2, "token": 3, "tensor": 4, "static": 5}
KV_FORMATS = {"fp32": 0, "fp16": 1, "int8": 2, "int8-static": 2, "int4": 3, "kivi4": 4}


@dataclass(frozen=True)
class Plan:
    """One step, resolved; `arrays` are what the structure points to."""

    step: structs.Step
    rows: int
    arrays: tuple[Any, ...]


class Functions:
    """The C functions of whole steps."""

    def __init__(self, library: Library) -> None:
        model, step = POINTER(structs.Model), POINTER(structs.Step)
        self.create = library.declare("nk_workspace_create", c_void_p)
        self.destroy = library.declare("nk_workspace_destroy", None, c_void_p)
        self.forward = library.declare("nk_forward", c_int, c_void_p, c_void_p, model, step, c_void_p)
        ask = (c_void_p, c_void_p, model, c_long, c_void_p)
        self.logits = library.declare("nk_logits", c_int, *ask, c_void_p, c_long)
        self.logits_of = library.declare("nk_logits_of", c_int, *ask, c_void_p, c_long, c_void_p)
        self.argmax = library.declare("nk_argmax", c_int, *ask, c_void_p)
        self.stream = library.declare("nk_stream", c_uint64, c_void_p, c_void_p, c_void_p, c_int64)


class Workspace:
    """Scratch of one step at a time: whoever computes holds the lock."""

    def __init__(self, functions: Functions) -> None:
        self._c, self.lock = functions, threading.Lock()
        self.handle = functions.create()
        if self.handle is None:
            raise MemoryError("no memory for a workspace")

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._c.destroy(self.handle)


class Bound:
    """See the module. Weights are in panels; hidden states and logits come out as torch tensors."""

    def __init__(self, config: "ModelConfig", weights: "Weights", activations: str, library: Library) -> None:
        self._config, self._mode, self._c = config, activations, Functions(library)
        self.variant, self.selection = library.variant, Selection(library)
        self._team: Team = team(library)
        self._arena = Arena()
        self._arrays: list[np.ndarray] = []
        self._matrices: list[Packed] = []
        self._layers = (structs.Layer * config.num_layers)(*(self._layer(layer) for layer in weights.layers))
        embedding = self._pack(weights.embedding)
        if not config.tied_head:
            self._matrices.pop()  # of an embedding, a step reads a row for each token
        head = embedding if weights.head is None else self._linear(weights.head)
        self._model = structs.Model(
            config.hidden_size, config.intermediate_size, config.num_layers, config.num_heads, config.num_kv_heads,
            config.head_dim, config.vocab_size, MODES[activations], config.rms_eps, embedding, head,
            self._vector(weights.final_norm), ctypes.addressof(self._layers), None, None,
        )  # fmt: skip
        self._rope = Rotation(config.rope.inverse_frequencies(config.head_dim))
        self._workspace = Workspace(self._c)
        self._tables: PageTables | None = None
        self.peaks: Tensor | None = None

    def calibrate(self, peaks: Tensor) -> None:
        """Set the peaks of static activations, as `run` and `logits` noted them on a text. Raises ParameterError for
        peaks that are not this model's, and in another mode."""
        self.peaks = checked_peaks(peaks, self._config.num_layers, self._mode).contiguous()
        self._model.static_peak = self.peaks.data_ptr()

    def in_mode(self, mode: str) -> "Bound":
        """The same weights and workspace in another activation mode; static has no peaks yet. Raises ParameterError for
        one that these kernels lack."""
        if mode not in MODES:
            raise ParameterError(
                "the C kernels multiply whole numbers only",
                found=f"{mode} activations",
                needed="one of " + ", ".join(MODES),
                do='load the model with activations="fp32", whose kernels run every mode',
            )
        other = copy(self)
        other._mode, other.peaks = mode, None
        other._model = structs.Model.from_buffer_copy(self._model)
        other._model.mode, other._model.static_peak = MODES[mode], None
        return other

    # -- binding ------------------------------------------------------------------------------------------------------

    def _layer(self, w: "LayerWeights") -> structs.Layer:
        norms = [None if norm is None else self._vector(norm) for norm in (w.attn_norm, w.ffn_norm, w.q_norm, w.k_norm)]
        return structs.Layer(*(self._linear(each) for each in (w.q, w.k, w.v, w.o, w.gate, w.up, w.down)), *norms)

    def _linear(self, layer: "Linear") -> structs.Matrix:
        return self._pack(layer.weight, None if layer.bias is None else layer.bias.dense().numpy())

    def _pack(self, matrix: "Matrix", bias: np.ndarray | None = None) -> structs.Matrix:
        def read(first: int, end: int) -> QTensor:
            codes = matrix.quantized(first, end)
            assert codes is not None, f"{matrix.name} has no codes"  # `check` was asked before
            return codes

        packed = pack_rows(matrix.name, matrix.shape, read, self._arena, bias)
        self._matrices.append(packed)
        self._arrays += packed.arrays
        return packed.struct

    def _vector(self, vector: "Matrix") -> int:
        values = np.ascontiguousarray(vector.dense().numpy())
        self._arrays.append(values)
        return values.ctypes.data

    # -- a step -------------------------------------------------------------------------------------------------------

    def plan(self, batch: "Batch", pages: "Pages") -> Plan:
        """Resolve positions, blocks and pages of a step. Sequences without new tokens take no part in it."""
        positions: list[int] = []
        blocks: list[int] = []
        first_row, first_block, longest = [0], [0], 0
        for query_len, kv_len, table in zip(batch.query_lens, batch.kv_lens, batch.block_tables, strict=True):
            if query_len:
                positions += range(kv_len - query_len, kv_len)
                blocks += table[: -(-kv_len // pages.block_size)]
                first_row.append(len(positions))
                first_block.append(len(blocks))
                longest = max(longest, kv_len)
        rope = self._rope = self._rope.reaching(longest)
        at, addresses = 0, []
        full = pages.begin_step(batch)
        for part in (parts := (batch.token_ids, positions, first_row, first_block, blocks, full)):
            addresses.append(at)
            at += 8 * len(part)
        tables = self._tables_of(pages)
        words = array("q", list(chain.from_iterable(parts)))
        start = words.buffer_info()[0]
        *addresses, last = [start + offset for offset in addresses]
        step = structs.Step(
            len(positions), len(first_row) - 1, *addresses, *rope.addresses, *tables.step(), len(full), last
        )  # fmt: skip
        return Plan(step, len(positions), (words, rope, tables, pages))

    def run(self, plan: Plan, peaks: Tensor | None = None) -> Tensor:
        """Hidden states after the final norm, fp32 [rows, hidden_size]; writes the step's keys and values.

        peaks: noted there (`activations.no_peaks`), the activations of this step being a16. Raises ParameterError for
        static activations without peaks.
        """
        out = torch.empty(plan.rows, self._config.hidden_size, dtype=torch.float32)
        self._done(self._c.forward, *self._call(peaks), byref(plan.step), out.data_ptr())
        return out

    def logits(self, hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        """fp32 [rows, vocab_size], or [rows, len(ids)]. hidden: [rows, hidden_size]. Raises IndexError for an id beyond
        the vocabulary."""
        hidden = self._input(hidden)
        if ids is not None:
            ids = ids.to(torch.int64).contiguous()
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._config.vocab_size:
                raise IndexError(f"an id lies outside 0…{self._config.vocab_size - 1}")
            out = torch.empty(len(hidden), len(ids), dtype=torch.float32)
            question = (*self._call(), len(hidden), hidden.data_ptr())
            self._done(self._c.logits_of, *question, ids.data_ptr(), len(ids), out.data_ptr())
            return out
        stride = -(-self._config.vocab_size // LANES) * LANES
        out = torch.empty(len(hidden), stride, dtype=torch.float32)
        self._done(self._c.logits, *self._call(), len(hidden), hidden.data_ptr(), out.data_ptr(), stride)
        return out[:, : self._config.vocab_size]

    def argmax(self, hidden: Tensor) -> Tensor:
        """The id of the largest logit, int64 [rows]: the lowest among equals, -1 where one is not finite."""
        hidden = self._input(hidden)
        rows = hidden.shape[0]
        best = torch.empty(rows, dtype=torch.int64)
        self._done(self._c.argmax, *self._call(), rows, hidden.data_ptr(), best.data_ptr())
        return best

    # -- what a step reads --------------------------------------------------------------------------------------------

    @property
    def bytes_per_token(self) -> int:
        """Bytes of weights that one decoded token reads, as they are packed."""
        return sum(packed.nbytes for packed in self._matrices)

    def stream(self) -> float:
        """Seconds to read every packed weight once, and do nothing else with it, by the threads of a step."""
        arrays = [array for packed in self._matrices for array in packed.arrays]
        spans = np.array([array.ctypes.data for array in arrays], np.int64)
        sizes = np.array([array.nbytes for array in arrays], np.int64)
        started = time.perf_counter()
        self._c.stream(self._team.handle, spans.ctypes.data, sizes.ctypes.data, len(spans))
        return time.perf_counter() - started

    # -----------------------------------------------------------------------------------------------------------------

    def _call(self, peaks: Tensor | None = None) -> tuple[Any, ...]:
        model = self._model
        if peaks is not None:
            model = structs.Model.from_buffer_copy(model)
            model.mode, model.peaks = MODES["a16"], peaks.data_ptr()
        elif self._mode == "static" and self.peaks is None:
            raise not_calibrated()
        return self._team.handle, self._workspace.handle, byref(model)

    def _input(self, hidden: Tensor) -> Tensor:
        if hidden.dtype is torch.float32 and hidden.is_contiguous():
            return hidden
        return hidden.to(torch.float32).contiguous()

    def _done(self, function: Callable[..., int], *arguments: Any) -> None:
        with self._workspace.lock:
            code = function(*arguments)
        if code:
            raise NanokitError(
                "the CPU kernels could not run the step",
                found="no memory for its scratch",
                do="lower token_budget or ctx, or free memory",
            )

    def _tables_of(self, pages: "Pages") -> "PageTables":
        tables = self._tables
        if tables is None or tables.peaks is not pages.kv_peaks or tables.pages() is not pages:
            self._tables = tables = PageTables(pages)
        return tables


class PageTables:
    """Where the pages of every layer begin, as structs.Step has it. Keeps no pages alive: a model holds its last
    tables, and pages that were made for one forward, as calibration does, are large."""

    def __init__(self, pages: "Pages") -> None:
        self.pages, self.peaks, self._found = weakref.ref(pages), pages.kv_peaks, pages.addresses()
        keys = pages.layer(0).keys
        self._format, self._block_bytes = KV_FORMATS[pages.kv_format], keys.stride(0) * keys.itemsize

    def step(self, layer: int = 0) -> tuple[int | None, ...]:
        """From kv_format to sealed, the tables beginning at `layer`."""
        found = self._found
        tables = (found.keys, found.values, found.key_scales, found.value_scales)
        peaks = None if self.peaks is None else self.peaks[layer].data_ptr()
        return (
            self._format,
            *(table[layer:].ctypes.data for table in tables),
            peaks,
            self._block_bytes,
            found.sealed[layer:].ctypes.data,
        )
