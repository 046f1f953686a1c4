"""Products, unpacked rows and quantized activations against fp64 and against the contract's bits.

The bound of a product. It is one fma a step (two in formats with minimums) on whole numbers times rounded scales. With
u = 2^-24, s steps and M = sum of (|scale code| + |minimum|) |x|, every fma adds at most u M, the roundings inside the
terms at most 4 u M together, and the sum over ranges one u M for each: |error| <= (2 s + 4 + ranges) u (M + |bias|).
Where nothing is quantized a step is a column.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from nanokit.kernels.activations import GROUPS, MODES
from nanokit.kernels.activations import planes as planes_of
from nanokit.kernels.activations import quantize as reference_quantize
from nanokit.kernels.gpu.activations import Activations, quantize
from nanokit.kernels.gpu.checks.material import KINDS, activations, there, weights
from nanokit.kernels.gpu.checks.work import Case, Judgement, Work, equal, within, worst
from nanokit.kernels.gpu.pack import pack
from nanokit.kernels.gpu.product import multiply, rows_of, splits_of
from nanokit.quant.qtensor import QTensor

PEAK = 2.5  # of static activations: some are beyond it
ROUNDING = 2.0**-24


@dataclass(frozen=True)
class Shape:
    """Rows of activations, outputs and columns of the weights."""

    rows: int
    outputs: int
    columns: int


def cases(tiny: bool) -> list[Case]:
    """Every format in one mode, every mode in one format, and what changes the way a product is cut."""
    few, tile, many = (
        (Shape(2, 21, 96), Shape(17, 21, 64), Shape(34, 21, 64))
        if tiny
        else (Shape(3, 331, 1056), Shape(17, 331, 1056), Shape(70, 331, 1056))
    )
    found = [_product(name, "a8g32", few) for name in KINDS if KINDS[name].group != 64]
    found += (
        [_product("int4-asym-g64", "a8g32", few if not tiny else Shape(2, 21, 128))]
        if tiny
        else [_product("int4-asym-g64", "a8g32", Shape(3, 331, 1088))]
    )
    found += [_product("Q4_1", mode, few) for mode in MODES if mode != "a8g32"]
    found += [_product(name, mode, few) for name, mode in (("fp4-g16", "a8g16"), ("fp4-g16", "fp32"),
              ("int8-sym-g32", "a16"), ("int8-sym-g32", "fp32"))]  # fmt: skip
    found += [_product("Q4_1", "a8g32", tile), _product("Q4_1", "a8g32", many), _product("int8-sym-g32", "a8g16", many)]
    found += [_product("int8-sym-g32", "a8g32", few, planes=True), _product("6-bit-g16", "a16", few, planes=True)]
    found += [_product("Q4_1", "a8g32", few, bias=True, ids=True)]
    cuts = [Shape(1, 5, 512)] if tiny else [Shape(1, 4096, 14336), Shape(1, 19000, 512)]  # in ranges, and in none
    found += [_product("Q4_1", "a8g32", shape) for shape in cuts]
    alone = [("Q4_1", "a8g32"), ("int8-sym-g32", "fp32"), *([] if tiny else [("fp4-g16", "a16")])]
    found += [
        Case("product", f"{name} {mode}: a row alone as among {many.rows}", partial(_alone, name, mode, many))
        for name, mode in alone
    ]
    found += [Case("unpack", name, partial(_unpack, name, Shape(0, 37, 320 if tiny else 1088))) for name in KINDS]
    rows = Shape(2, 0, 96) if tiny else Shape(5, 0, 4128)
    modes = sorted(MODES[1:], key=lambda mode: mode in GROUPS)  # a row's own scale first, then a group's
    found += [Case("quantize", mode, partial(_quantize, mode, rows)) for mode in (modes[0], modes[-1], *modes[1:-1])]
    return found


def _product(
    name: str, mode: str, shape: Shape, *, planes: bool = False, bias: bool = False, ids: bool = False
) -> Case:
    told = "".join(f", {what}" for what, is_so in (("two planes", planes), ("bias, gathered", bias or ids)) if is_so)
    described = f"{name} {mode}, {shape.rows} x {shape.columns} -> {shape.outputs}{told}"
    return Case("product", described, partial(_work, name, mode, shape, planes, bias, ids))


def seen(x: Tensor, mode: str) -> Activations:
    """x as a product reads it on the device."""
    return quantize(there(x), mode, _peak(mode))


def _peak(mode: str) -> Tensor | None:
    return there(torch.tensor([PEAK])) if mode == "static" else None


def _work(name: str, mode: str, shape: Shape, planes: bool, bias: bool, ids: bool) -> Work:
    q, x = weights(name, shape.outputs, shape.columns, 1), activations(shape.rows, shape.columns, 2)
    added = np.random.default_rng(3).standard_normal(shape.outputs).astype(np.float32) if bias else None
    chosen = torch.tensor([shape.outputs - 1, 0, 17, 16, 0]) if ids else None
    packed = pack(name, q, added, planes=planes)

    def launch() -> Tensor:
        return multiply(packed, seen(x, mode), None if chosen is None else there(chosen))

    ranges = splits_of(shape.outputs, packed.units)
    return Work(launch, lambda out: judge_product(q, x, mode, out, ranges, added, chosen))


def judge_product(
    q: QTensor, x: Tensor, mode: str, out: Tensor, ranges: int, bias: np.ndarray | None, ids: Tensor | None
) -> Judgement:
    """See the module. ranges: that the columns were cut into."""
    if mode == "fp32":
        a = x.double()
    else:
        codes = reference_quantize(x, mode, PEAK if mode == "static" else None)
        a = codes.codes.double() * codes.scales.double().repeat_interleave(codes.group, 1)
    values = torch.from_numpy(q.codes if q.table is None else q.table[q.codes]).double()
    scaled = values * torch.from_numpy(q.scales).double().repeat_interleave(q.group, 1)
    minimums = torch.zeros(1, dtype=torch.float64)
    if q.minimums is not None:
        minimums = torch.from_numpy(q.minimums).double().repeat_interleave(q.group, 1)
    added = torch.zeros(len(values)) if bias is None else torch.from_numpy(bias)
    wanted, size = a @ (scaled + minimums).T + added, a.abs() @ (scaled.abs() + minimums.abs()).T + added.abs()
    if ids is not None:
        wanted, size = wanted[:, ids], size[:, ids]
    step = 1 if mode == "fp32" else 16 if 16 in (q.group, GROUPS.get(mode)) else 32
    return within(out, wanted, size, (2 * x.shape[1] / step + 4 + ranges) * ROUNDING)


def _alone(name: str, mode: str, shape: Shape) -> Work:
    """The contract that a row's result does not depend on its batch mates: first, middle and last one."""
    packed = pack(name, weights(name, shape.outputs, shape.columns, 4))
    x = activations(shape.rows, shape.columns, 5)
    chosen = (0, shape.rows // 2, shape.rows - 1)

    def launch() -> tuple[Tensor, Tensor]:
        apart = [multiply(packed, seen(x[row : row + 1].clone(), mode)) for row in chosen]
        return multiply(packed, seen(x, mode))[list(chosen)], torch.cat(apart)

    return Work(launch, lambda pair: equal(pair))


def _unpack(name: str, shape: Shape) -> Work:
    q = weights(name, shape.outputs, shape.columns, 6)
    ids = torch.tensor([shape.outputs - 1, 0, 17, 16, 15, 17])
    made = [pack(name, q)] + ([pack(name, q, planes=True)] if name.startswith(("int8", "6-bit")) else [])
    wanted = q.dequantize()[ids.numpy()]
    return Work(
        lambda: [rows_of(packed, there(ids)) for packed in made],
        lambda found: equal(*((rows, wanted) for rows in found)),
    )


def _quantize(mode: str, shape: Shape) -> Work:
    x = activations(shape.rows, shape.columns, 7)
    x[-1, 16:] = 2.0**-110
    if mode != "tensor":  # where one would be everybody's
        x[0, 3] = float("nan")
    return Work(lambda: seen(x, mode), lambda made: judge_codes(made, x, mode))


def judge_codes(made: Activations, x: Tensor, mode: str) -> Judgement:
    """Codes, scales and sums of x, fp32 on the CPU, are the contract's bits."""
    wanted = reference_quantize(x, mode, PEAK if mode == "static" else None)
    codes = torch.stack(planes_of(wanted.codes)) if mode == "a16" else wanted.codes[None]
    sums = wanted.codes.unflatten(1, (-1, 16)).sum(-1).float()
    assert made.codes is not None
    assert made.scales is not None
    assert made.sums is not None
    pairs: Sequence[tuple[Tensor, Tensor]] = (made.codes, codes), (made.scales, wanted.scales), (made.sums, sums)
    return worst(*(equal(pair) for pair in pairs))
