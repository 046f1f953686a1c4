"""How fast the kernels are in the shapes of whole models, beside what the device copies and multiplies in bf16.

GB/s count the bytes that an operation has to move: packed weights of a product, pages of attention, inputs of norm,
gate, rope and selection, which a cache may hold as it does in a step, and of fake quantization all that is read and
written. share_of_copy: GB/s over those of torch's copy of a large buffer, read and write counted. vs_bf16: how many
times faster than torch.matmul with weights of that shape in bf16; inputs are quantized beforehand, as the norm does.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor

from nanokit.kernels.gpu import runtime
from nanokit.kernels.gpu.activations import quantize
from nanokit.kernels.gpu.attention import attention, tile_rows
from nanokit.kernels.gpu.checks.material import (
    BLOCK_SIZE,
    Batch,
    nbytes,
    packed_copies,
    page_copies,
    there,
)  # fmt: skip
from nanokit.kernels.gpu.checks.shapes import SHAPES, TINY, Shape
from nanokit.kernels.gpu.checks.timer import Actions, Timer, Timing
from nanokit.kernels.gpu.fake_quant import fake_quantize
from nanokit.kernels.gpu.product import multiply
from nanokit.kernels.gpu.rope import rotate_and_store
from nanokit.kernels.gpu.rows import rms_norm, silu_gate
from nanokit.kernels.gpu.select import argmax_rows
from nanokit.kernels.gpu.step import make_step
from nanokit.quant.integer import integer_format

FORMATS = ("int4-sym-g32", "Q4_1", "int8-sym-g32", "fp4-g16")
MODE = "a8g32"
ROWS = (1, 8, 4, 16)  # in the order in which they are measured, should time run out
KV_FORMATS = ("fp16", "int8", "int4")
COPIED = 1 << 30  # bytes of the buffer whose copy is timed, as far as a quarter of the free memory goes
FEW = 16  # copies at most of what stays in the cache between two kernels of a step, too


@dataclass
class Bench:
    """The timer, what the device copies, and bf16 products measured so far, by outputs, columns and rows.

    timer: None where kernels are only compiled.
    """

    timer: Timer | None
    tiny: bool = False
    copy_gb_s: float | None = None
    bf16: dict[tuple[int, int, int], Timing] = field(default_factory=dict)

    def copies(self, size: int, most: int = 1 << 30) -> int:
        """How many copies of so many bytes no cache holds; one where nothing is timed."""
        return 1 if self.timer is None else min(most, max(2, ceil(self.timer.rotated_bytes / size) + 1))

    def measure_copy(self) -> dict[str, Any]:
        """Time the copy of a large buffer; keeps its GB/s."""
        assert self.timer is not None
        size = 1 << 12 if self.tiny else min(COPIED, torch.cuda.mem_get_info()[0] // 8)
        source = torch.empty(size, dtype=torch.uint8, device=runtime.device()).fill_(1)
        target = torch.empty_like(source)
        timing = self.timer([lambda: target.copy_(source)])
        self.copy_gb_s = 2 * size / timing.median / 1e6
        told = {"op": "copy", "name": f"{size} bytes, read and written", "bytes": 2 * size, "gb_s": self.copy_gb_s}
        return {**told, **timing.to_record()}

    def rates(self, size: int, timing: Timing) -> dict[str, Any]:
        """bytes, gb_s, and their share of a copy's."""
        speed = size / timing.median / 1e6
        share = None if self.copy_gb_s is None else speed / self.copy_gb_s
        return {"bytes": size, "gb_s": speed, "share_of_copy": share}

    def bf16_product(self, outputs: int, columns: int, rows: int) -> Timing:
        """torch.matmul of that shape, measured once."""
        assert self.timer is not None
        key = outputs, columns, rows
        if key not in self.bf16:
            where = runtime.device()
            copies = self.copies(2 * outputs * columns)
            w = torch.randn(copies, outputs, columns, device=where, dtype=torch.bfloat16)
            x = torch.randn(rows, columns, device=where, dtype=torch.bfloat16)
            self.bf16[key] = self.timer([partial(torch.matmul, x, each.T) for each in w])
        return self.bf16[key]

    def bf16_records(self) -> list[dict[str, Any]]:
        """What `bf16_product` has measured."""
        return [
            {"op": "bf16", "name": f"{outputs} x {columns}, {rows} rows", "outputs": outputs, "columns": columns,
             "rows": rows, **self.rates(2 * outputs * columns, timing), **timing.to_record()}
            for (outputs, columns, rows), timing in self.bf16.items()
        ]  # fmt: skip


@dataclass(frozen=True)
class Timed:
    """Something to be timed. prepare: gives what is launched in turn, and what to say of a timing."""

    op: str
    name: str
    prepare: Callable[[Bench], tuple[Actions, Callable[[Timing], dict[str, Any]]]]

    def measure(self, bench: Bench) -> dict[str, Any]:
        """Time it."""
        assert bench.timer is not None
        actions, told = self.prepare(bench)
        timing = bench.timer(actions)
        return {"op": self.op, "name": self.name, **told(timing), **timing.to_record()}


def tasks(tiny: bool) -> list[Timed]:
    """What is timed, what matters most first."""
    shapes, rows = (TINY, (1, 2)) if tiny else (SHAPES, ROWS)
    found = [task for n in rows[:1] for task in _products(shapes, n)]
    found += _attentions(shapes, 130 if tiny else 4096)
    found += [task for name, shape in shapes.items() for task in _row_operations(name, shape, rows[-1] if tiny else 1)]
    found += [task for n in rows[1:] for task in _products(shapes, n)]
    size = 64 if tiny else 4096
    return [*found, Timed("fake_quant", f"int4-sym-g32 {size} x {size}", partial(_fake_quant, size))]


def _products(shapes: dict[str, Shape], rows: int) -> list[Timed]:
    return [
        Timed("product", f"{name} {matrix}, {weight_format}, {rows} rows",
              partial(_product, weight_format, name, matrix, shape.matrices[matrix], rows))
        for name, shape in shapes.items()
        for matrix in shape.matrices
        for weight_format in FORMATS
    ]  # fmt: skip


def _product(
    weight_format: str, model: str, matrix: str, shape: tuple[int, int], rows: int, bench: Bench
) -> tuple[Actions, Callable[[Timing], dict[str, Any]]]:
    outputs, columns = shape
    packed = packed_copies(weight_format, outputs, columns, 1)
    size = packed[0].nbytes
    packed = packed_copies(weight_format, outputs, columns, bench.copies(size))
    x = quantize(torch.randn(rows, columns, device=runtime.device()), MODE)

    def told(timing: Timing) -> dict[str, Any]:
        return {
            "model": model, "matrix": matrix, "format": weight_format, "mode": MODE, "rows": rows, "outputs": outputs,
            "columns": columns, **bench.rates(size, timing),
            "vs_bf16": bench.bf16_product(outputs, columns, rows).median / timing.median,
        }  # fmt: skip

    return [partial(multiply, each, x) for each in packed], told


def _attentions(shapes: dict[str, Shape], context: int) -> list[Timed]:
    return [
        Timed("attention", f"{name}, {kv_format} pages, {batch} x {context} tokens",
              partial(_attention, kv_format, name, shape, batch, context))
        for batch in (1, 8)
        for name, shape in shapes.items()
        for kv_format in KV_FORMATS
    ]  # fmt: skip


def _attention(
    kv_format: str, model: str, shape: Shape, batch: int, context: int, bench: Bench
) -> tuple[Actions, Callable[[Timing], dict[str, Any]]]:
    each = -(-context // BLOCK_SIZE)
    dims = each * batch, shape.kv_heads, shape.dim
    size = nbytes(page_copies(kv_format, *dims, 1)[0])
    pages = page_copies(kv_format, *dims, bench.copies(size))
    order = torch.randperm(each * batch, generator=torch.Generator().manual_seed(0)).view(batch, each).tolist()
    tokens = Batch([0] * batch, [1] * batch, [context] * batch, order)
    step = make_step(tokens, BLOCK_SIZE, tile_rows(shape.heads, shape.kv_heads), runtime.device())
    q = torch.randn(batch, shape.heads, shape.dim, device=runtime.device())

    def told(timing: Timing) -> dict[str, Any]:
        return {"model": model, "pages": kv_format, "sequences": batch, "context": context, **bench.rates(size, timing)}

    return [partial(attention, q, layer, step, scale=shape.dim**-0.5) for layer in pages], told


def _row_operations(model: str, shape: Shape, rows: int) -> list[Timed]:
    def timed(op: str, make: Callable[[], tuple[list[Tensor], Callable[..., object]]]) -> Timed:
        return Timed(op, f"{model}, {rows} rows", partial(_row_operation, make, model, rows))

    def random(*dims: int) -> Tensor:
        return torch.randn(dims, device=runtime.device())

    def norm() -> tuple[list[Tensor], Callable[..., object]]:
        weight = random(shape.hidden)
        x = [random(rows, shape.hidden), random(rows, shape.hidden)]
        return x, lambda hidden, delta: rms_norm(hidden, weight, 1e-6, MODE, delta=delta)

    def gate() -> tuple[list[Tensor], Callable[..., object]]:
        x = [random(rows, shape.intermediate), random(rows, shape.intermediate)]
        return x, lambda first, second: silu_gate(first, second, MODE)

    def rope() -> tuple[list[Tensor], Callable[..., object]]:
        pages = page_copies("fp16", -(-rows // BLOCK_SIZE), shape.kv_heads, shape.dim, 1)[0]
        angles, slots = random(rows, shape.dim // 2), torch.arange(rows, device=runtime.device())
        x = [random(rows, n, shape.dim) for n in (shape.heads, shape.kv_heads, shape.kv_heads)]
        return x, lambda q, k, v: rotate_and_store(q, k, v, angles, angles, slots, pages)

    def argmax() -> tuple[list[Tensor], Callable[..., object]]:
        return [random(rows, shape.vocab)], argmax_rows

    return [timed("rms_norm", norm), timed("silu_gate", gate), timed("rope", rope), timed("select", argmax)]


def _row_operation(
    make: Callable[[], tuple[list[Tensor], Callable[..., object]]], model: str, rows: int, bench: Bench
) -> tuple[Actions, Callable[[Timing], dict[str, Any]]]:
    """Inputs are few: in a step, too, they come from the kernel before. Bytes are those of the inputs."""
    inputs, call = make()
    size = sum(x.nbytes for x in inputs)
    turns = [[x.clone() for x in inputs] for _ in range(bench.copies(size, FEW))]
    return [partial(call, *each) for each in turns], lambda timing: {
        "model": model, "rows": rows, **bench.rates(size, timing),
    }  # fmt: skip


def _fake_quant(size: int, bench: Bench) -> tuple[Actions, Callable[[Timing], dict[str, Any]]]:
    """Forward and backward: weights read, values and bits written; upstream and bits read, gradients written."""
    fmt, moved = integer_format("int4-sym-g32"), size * size * 4 * 4
    leaves = [torch.randn(size, size, device=runtime.device()).requires_grad_()
              for _ in range(bench.copies(4 * size * size))]  # fmt: skip
    upstream = there(torch.ones(size, size))

    def both(leaf: Tensor) -> None:
        leaf.grad = None
        with torch.enable_grad():
            fake_quantize(leaf, fmt).backward(upstream)

    return [partial(both, leaf) for leaf in leaves], lambda timing: bench.rates(moved, timing)
