"""Packed weights and KV pages at addresses that their makers would not give them: what a kernel loses by it.

`loads` says what a straddling load costs when there is nothing but loads. Here the whole kernels run: the product on
panels of 4-bit codes and the attention on pages, each copied to every offset and otherwise the same, with the same bits
as result. Weights are walked through layer by layer, as a step does, and once more as one matrix that stays in the
caches; attention reads one long sequence. One thread, and the fastest of the repeats: a kernel is compared with itself,
and what disturbs a run is not its address.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from nanokit.kernels.cpu.library import library
from nanokit.kernels.cpu.ops import Linear
from nanokit.kernels.cpu.ops_attention import attention
from nanokit.kernels.cpu.pack import ALIGNMENT, Packed
from nanokit.kernels.cpu.structs import Matrix as MatrixStruct
from nanokit.kernels.paged import LayerPages
from nanokit.kv.pages import BLOCK_SIZE, PagedKV
from nanokit.lab.bench.timing import Rounds, Samples, Visit, in_turns, milliseconds
from nanokit.lab.experiments.alignment_params import BUDGET_S, KV_FORMATS, AlignmentParams, AlignmentResult
from nanokit.lab.experiments.kernel_params import coded, matrices, notes, opened
from nanokit.lab.experiments.loads import few, on_page
from nanokit.lab.lock import measuring
from nanokit.lab.progress import Progress, Silent
from nanokit.lab.steadiness import remarks
from nanokit.lab.table import Table
from nanokit.model.batch import Batch
from nanokit.model.source import ModelSource

PRODUCT, MODE = "up", "a8g32"
MOVES = ("product_walked", "product_cached", *(f"attention_{each}" for each in KV_FORMATS))
TIMES = 6  # that each is timed in a visit
LEAST_NOISE = 0.05  # few samples agree by chance: a smaller difference is not looked into


@dataclass(frozen=True)
class ShiftedResult(AlignmentResult):
    """Metrics are the least of the series `<move>_ms_<offset>` and `…_again` of offset 0; `<move>_equal`: how many
    offsets gave offset 0's bits."""

    def relative(self, move: str, offset: int) -> float:
        """Speed at the offset over that at offset 0 (the mean of its two series)."""
        return self._aligned(move) / self.metrics[f"{move}_ms_{offset}"]

    def noise(self, move: str) -> float:
        """By how much times differ that should not: those of offset 0 twice, and of multiples of a cache line."""
        same = [o for o in self.asked.offsets if o % ALIGNMENT == 0]
        times = [self.metrics[f"{move}_ms_{each}"] for each in (*same, "again")]
        return max(LEAST_NOISE, max(times) / min(times) - 1)

    def slowest(self, move: str) -> tuple[int, float]:
        """The offset that costs most, and by how much times grow there."""
        worst = min(self.asked.offsets, key=lambda offset: self.relative(move, offset))
        return worst, 1 / self.relative(move, worst) - 1

    def _aligned(self, move: str) -> float:
        return (self.metrics[f"{move}_ms_0"] + self.metrics[f"{move}_ms_again"]) / 2

    @property
    def intact(self) -> bool:
        """Whether every offset gave the bits of offset 0."""
        return all(self.metrics[f"{move}_equal"] == len(self.asked.offsets) for move in MOVES)

    def table(self) -> Table:
        """Milliseconds at offset 0, speed at the other offsets over that, and the noise floor."""
        rows = []
        for move in MOVES:
            cells = [f"{self.relative(move, offset):.3f}" for offset in self.asked.offsets if offset]
            rows.append((move.replace("_", ", "), f"{self._aligned(move):.3f}", *cells, f"{self.noise(move):.1%}"))
        columns = ("kernel", "ms at 0", *(f"at {o}" for o in self.asked.offsets if o), "noise floor")
        return Table(columns, rows, right=columns[1:])

    @property
    def verdict_q9(self) -> str:
        """Of the claim that attention wants KV on 128 bytes: whether any other offset costs more than the noise."""
        said = []
        for move in MOVES:
            if move.startswith("attention"):
                offset, loss = self.slowest(move)
                if loss > self.noise(move):
                    said.append(f"{move.removeprefix('attention_')} pages at offset {offset} take {loss:.0%} longer")
        if said:
            return "holds for these kernels: " + "; ".join(said)
        return "does not hold for these kernels: no offset costs more than the noise"


def shifted(
    p: AlignmentParams, *, progress: Progress | None = None, cancel: threading.Event | None = None
) -> ShiftedResult:
    """Time the product and attention at every offset, in turns.

    Raises NoKernelsError, StoppedError when cancelled, BusyError, and what `nanokit.load` raises of a model file."""
    progress = progress or Silent()
    with measuring("moved weights and pages"), torch.inference_mode():
        source, weights = opened(p.model)
        found = matrices(weights, PRODUCT, p.layers)
        moves = {**_products([Linear(coded(each), threads=1) for each in found], p), **_attention(source, p)}
        equal = {f"{move}_equal": _equal(each) for move, each in moves.items()}
        visits = {move: _visit(move, each) for move, each in moves.items()}
        turns = Rounds(p.repeats, BUDGET_S[p.preset], progress=progress, cancel=cancel).run(visits)
    metrics = {name: min(values) for name, values in turns.samples.items()}
    settings = {"model": source.name, "product": PRODUCT, "activations": MODE}
    said = [*notes(found), *turns.remarks, *few(remarks(turns.samples))]
    return ShiftedResult(p, {**metrics, **equal}, turns.samples, settings, remarks=said)


Calls = Mapping[str, Callable[[], Tensor]]  # by offset, and "again"; each gives the kernel's result


def _equal(calls: Calls) -> int:
    first = calls["0"]()
    return sum(torch.equal(first, call()) for offset, call in calls.items() if offset != "again")


def _visit(move: str, calls: Calls) -> Visit:
    actions = {f"{move}_ms_{offset}": lambda call=call: milliseconds(call) for offset, call in calls.items()}

    def visit() -> Samples:
        for call in calls.values():
            call()
        samples: Samples = {name: [] for name in actions}
        for _ in range(TIMES):  # never backwards: the copy that was read last would be read once more, out of a cache
            for name, values in in_turns(actions, 1).items():
                samples[name] += values
        return samples

    return visit


def moved(packed: Packed, offset: int) -> Packed:
    """The same matrix, its panels copied to `offset` bytes after a multiple of 4096."""
    panels = packed.arrays[0]
    there = on_page(panels.nbytes + offset)[offset:].reshape(panels.shape)
    there[:] = panels
    shift = there.ctypes.data - panels.ctypes.data
    struct = MatrixStruct.from_buffer_copy(packed.struct)
    for name in ("codes", "scales", "minimums"):
        if getattr(struct, name):
            setattr(struct, name, getattr(struct, name) + shift)
    return replace(packed, struct=struct, arrays=(there, *packed.arrays[1:]))


def _products(linears: list[Linear], p: AlignmentParams) -> dict[str, Calls]:
    x = torch.randn(1, linears[0].shape[1], generator=torch.Generator().manual_seed(1))
    places = {name: [moved(linear.packed, each) for linear in linears] for name, each in _offsets(p).items()}

    def walk(packs: list[Packed]) -> Tensor:
        out = torch.empty(0)
        for linear, packed in zip(linears, packs, strict=True):
            linear.packed = packed
            out = linear(x, MODE)
        return out

    return {
        "product_walked": {name: partial(walk, packs) for name, packs in places.items()},
        "product_cached": {name: partial(walk, packs[:1] * len(linears)) for name, packs in places.items()},
    }


def _offsets(p: AlignmentParams) -> dict[str, int]:
    """By name; "again" is a copy of its own, for one that was just read is still in a cache."""
    return {**{str(offset): offset for offset in p.offsets}, "again": 0}


class MovedPages(PagedKV):
    """Pages whose tensors begin at `offset` bytes after a multiple of 4096."""

    def __init__(self, source: ModelSource, num_blocks: int, kv_format: str, offset: int) -> None:
        super().__init__(source.config, num_blocks, kv_format)
        self._layers = [LayerPages(*(_moved_tensor(each, offset) for each in self.layer(0)))]


def _moved_tensor(tensor: Tensor | None, offset: int) -> Tensor | None:
    if tensor is None:
        return None
    room = torch.from_numpy(on_page(tensor.nbytes + offset)[offset:])
    return room.view(tensor.dtype).view(tensor.shape).zero_()


def _attention(source: ModelSource, p: AlignmentParams) -> dict[str, Calls]:
    config, generator = source.config, torch.Generator().manual_seed(2)
    blocks = -(-p.ctx // BLOCK_SIZE)
    heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    cos, sin = torch.ones(p.ctx, config.head_dim // 2), torch.zeros(p.ctx, config.head_dim // 2)

    def rows(count: int) -> dict[str, Tensor]:
        return {name: torch.randn(count, h, config.head_dim, generator=generator) for name, h in heads.items()}

    context, token, kernels = rows(p.ctx - 1), rows(1), library()

    def call(kv_format: str, offset: int) -> Callable[[], Tensor]:
        pages = MovedPages(source, blocks, kv_format, offset)
        table = [list(range(blocks))]
        attention(Batch([0] * (p.ctx - 1), [p.ctx - 1], [p.ctx - 1], table), pages, **context, cos=cos, sin=sin,
                  library=kernels)  # fmt: skip
        step = Batch([0], [1], [p.ctx], table)
        return lambda: attention(step, pages, **token, cos=cos, sin=sin, threads=1, library=kernels)

    return {
        f"attention_{kv_format}": {name: call(kv_format, offset) for name, offset in _offsets(p).items()}
        for kv_format in KV_FORMATS
    }
