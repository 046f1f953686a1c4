"""Few rows of activations times packed weights, and the rows of packed weights by themselves.

A step is 32 columns: whole numbers times whole numbers in the tensor cores, exact in int32; then, in fp32,

    acc = fma(float(dot), w_scale * a_scale, acc)      and with minimums      acc = fma(w_minimum, a_sum, acc)

in the order of the columns, as kernels/cpu does it. Weights are the left factor: the instruction takes 64 of their rows
or 16, and can do with 8 rows of activations, where few are most. What codes.py makes of 4-bit codes is 16 times a code
less `ADDED`: the 16 is taken out of a_scale, a power of two, and ADDED comes back as ADDED times the sum of the
activations' codes, exactly. So any tile, BLOCK_M or BLOCK_N, gives the same bits.

Where weights or activations are scaled by 16 columns, a step is two dots of 32 columns with half of the activations
zero: 16 columns alone are too few for the tensor cores' integers. Columns are cut into SPLITS ranges whose sums are
added in order, by the program that has them all or by `fold`.
"""

import triton
import triton.language as tl

from nanokit.kernels.gpu.device.codes import nibbles


@triton.jit
def _loaded(at, plane, table_ptr, KIND: tl.constexpr, LOOKUP: tl.constexpr):
    """Two tiles int8 of the weights in these bytes; twice the same one where a byte is a weight. plane: bytes from
    upper to lower nibbles."""
    stored = tl.load(at)
    if KIND == 2:  # CODES8
        low = stored.to(tl.int8, bitcast=True)
        high = low
    else:
        lower = stored
        if KIND == 3:  # PLANES8
            lower = tl.load(at + plane)
        low, high = nibbles(stored, lower, table_ptr, KIND, LOOKUP)
    return low, high


@triton.jit
def _integer_step(
    acc, w, codes_ptr, a_scales_ptr, sums_ptr, scale_at, minimum_at, m, rows, columns, column,
    GROUP: tl.constexpr, A_GROUP: tl.constexpr, PLANES: tl.constexpr, HALVES: tl.constexpr, HAS_MIN: tl.constexpr,
    TIMES: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """acc [N, M] and the products of columns column … column + 31; w: int8 [N, 32], TIMES times code less ADDED."""
    k = tl.arange(0, 32)
    row = m.to(tl.int64)
    at = row[None, :] * columns + (column + k)[:, None]
    there = (m < rows)[None, :] & (column + k < columns)[:, None]
    first = tl.load(codes_ptr + at, mask=there, other=0)
    second = first
    if PLANES == 2:
        second = tl.load(codes_ptr + rows.to(tl.int64) * columns + at, mask=there, other=0)
    seen = m < tl.where(column < columns, rows, 0)  # the last unit may end with 32 columns that are not there
    for half in tl.static_range(HALVES):
        start = column + half * 16
        a, b = first, second
        if HALVES == 2:
            a = tl.where((k // 16 == half)[:, None], a, 0)
            b = tl.where((k // 16 == half)[:, None], b, 0)
        dot = tl.dot(w, a, out_dtype=tl.int32)
        if PLANES == 2:
            dot = dot * 256 + tl.dot(w, b, out_dtype=tl.int32)
        a_scale = tl.load(a_scales_ptr + row * (columns // A_GROUP) + start // A_GROUP, mask=seen, other=0.0)
        if ADDED != 0 or HAS_MIN:
            sums = sums_ptr + row * (columns // 16) + start // 16
            total = tl.load(sums, mask=seen, other=0.0)
            if HALVES == 1:
                total += tl.load(sums + 1, mask=seen, other=0.0)
        if ADDED != 0:
            dot += (total * (ADDED * TIMES)).to(tl.int32)[None, :]
        w_scale = tl.load(scale_at + start // GROUP * 16).to(tl.float32)
        acc = tl.fma(dot.to(tl.float32), w_scale[:, None] * (a_scale * (1.0 / TIMES))[None, :], acc)
        if HAS_MIN:
            minimum = tl.load(minimum_at + start // GROUP * 16).to(tl.float32)
            acc = tl.fma(minimum[:, None], (a_scale * total)[None, :], acc)
    return acc


@triton.jit
def _float_step(
    acc, w, x_ptr, scale_at, minimum_at, m, rows, columns, column,
    GROUP: tl.constexpr, HAS_MIN: tl.constexpr, TIMES: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """The same for activations in fp32: weights are widened first."""
    k = tl.arange(0, 32)
    x = tl.load(
        x_ptr + m.to(tl.int64)[None, :] * columns + (column + k)[:, None],
        mask=(m < rows)[None, :] & (column + k < columns)[:, None], other=0.0,
    )  # fmt: skip
    groups = (column + k) // GROUP * 16
    wide = (w.to(tl.float32) * (1.0 / TIMES) + ADDED) * tl.load(scale_at[:, None] + groups[None, :]).to(tl.float32)
    if HAS_MIN:
        wide += tl.load(minimum_at[:, None] + groups[None, :]).to(tl.float32)
    return acc + tl.dot(wide, x, input_precision="ieee")


@triton.jit(do_not_specialize=["rows"])
def product(
    x_ptr, a_scales_ptr, sums_ptr, w_ptr, scales_ptr, minimums_ptr, table_ptr, bias_ptr, ids_ptr, out_ptr,
    rows, outputs, columns, units, plane, groups, per_split,
    KIND: tl.constexpr, LOOKUP: tl.constexpr, TIMES: tl.constexpr, ADDED: tl.constexpr, GROUP: tl.constexpr,
    A_GROUP: tl.constexpr, PLANES: tl.constexpr, HALVES: tl.constexpr, HAS_MIN: tl.constexpr, HAS_BIAS: tl.constexpr,
    GATHER: tl.constexpr, SPLITS: tl.constexpr, FOLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out [rows, outputs], or partial sums [SPLITS, rows, outputs] where FOLD is 1 and SPLITS is not.

    x: int8 [PLANES, rows, columns], or fp32 [rows, columns] where PLANES is 0; units, groups: of a row; per_split:
    units of a range; TIMES, ADDED: see the module; GATHER: outputs are the rows `ids` of the weights."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    here = n < outputs
    weight_row = tl.where(here, n, 0).to(tl.int64)
    if GATHER:
        weight_row = tl.load(ids_ptr + n, mask=here, other=0)
    panel, lane = weight_row // 16, weight_row % 16
    byte = (panel * units * 16 + lane) * 32
    scale_at = scales_ptr + panel * groups * 16 + lane
    minimum_at = scale_at
    if HAS_MIN:
        minimum_at = minimums_ptr + panel * groups * 16 + lane
    j = tl.arange(0, 32)
    NIBBLES: tl.constexpr = 1 if KIND == 2 else 2
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for part in range(FOLD):
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        first = (tl.program_id(2) * FOLD + part) * per_split
        for unit in range(first, tl.minimum(first + per_split, units)):
            at = w_ptr + byte[:, None] + (unit * 512 + j)[None, :]
            low, high = _loaded(at, plane, table_ptr, KIND, LOOKUP)
            for nibble in tl.static_range(NIBBLES):
                w = low
                if nibble == 1:
                    w = high
                column = (unit * NIBBLES + nibble) * 32
                if PLANES == 0:
                    acc = _float_step(
                        acc, w, x_ptr, scale_at, minimum_at, m, rows, columns, column, GROUP, HAS_MIN, TIMES, ADDED
                    )
                else:
                    acc = _integer_step(
                        acc, w, x_ptr, a_scales_ptr, sums_ptr, scale_at, minimum_at, m, rows, columns, column,
                        GROUP, A_GROUP, PLANES, HALVES, HAS_MIN, TIMES, ADDED,
                    )  # fmt: skip
        total += acc
    if HAS_BIAS and (SPLITS == FOLD):
        total += tl.load(bias_ptr + weight_row, mask=here, other=0.0)[:, None]
    out = out_ptr + (tl.program_id(2) * rows + m).to(tl.int64)[None, :] * outputs + n[:, None]
    tl.store(out, total, mask=(m < rows)[None, :] & here[:, None])


@triton.jit(do_not_specialize=["rows"])
def fold(
    parts_ptr, bias_ptr, ids_ptr, out_ptr, rows, outputs,
    HAS_BIAS: tl.constexpr, GATHER: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [rows, outputs]: the sum of parts [SPLITS, rows, outputs] in order, and the bias."""
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = n < outputs
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(SPLITS):
        total += tl.load(parts_ptr + (part * rows + row) * outputs + n, mask=here, other=0.0)
    if HAS_BIAS:
        at = tl.load(ids_ptr + n, mask=here, other=0) if GATHER else n
        total += tl.load(bias_ptr + at, mask=here, other=0.0)
    tl.store(out_ptr + row * outputs + n, total, mask=here)


@triton.jit
def unpack(
    ids_ptr, w_ptr, scales_ptr, minimums_ptr, table_ptr, out_ptr, columns, units, plane, groups,
    KIND: tl.constexpr, LOOKUP: tl.constexpr, TIMES: tl.constexpr, ADDED: tl.constexpr, GROUP: tl.constexpr,
    HAS_MIN: tl.constexpr, BLOCK_U: tl.constexpr,
):  # fmt: skip
    """out fp32 [ids, columns]: rows of the weights, multiply then add, each rounded. A program widens BLOCK_U units of
    one row."""
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(ids_ptr + index)
    unit = tl.program_id(1) * BLOCK_U + tl.arange(0, BLOCK_U)
    j = tl.arange(0, 32)
    panel, lane = row // 16, row % 16
    at = w_ptr + ((panel * units + tl.minimum(unit, units - 1)) * 16 + lane)[:, None] * 32 + j[None, :]
    low, high = _loaded(at, plane, table_ptr, KIND, LOOKUP)
    NIBBLES: tl.constexpr = 1 if KIND == 2 else 2
    for nibble in tl.static_range(NIBBLES):
        w = low
        if nibble == 1:
            w = high
        column = (unit * NIBBLES + nibble)[:, None] * 32 + j[None, :]
        there = column < columns
        scale_at = panel * groups * 16 + column // GROUP * 16 + lane
        code = w.to(tl.float32) * (1.0 / TIMES) + ADDED
        wide = code * tl.load(scales_ptr + scale_at, mask=there, other=0.0).to(tl.float32)
        if HAS_MIN:
            wide += tl.load(minimums_ptr + scale_at, mask=there, other=0.0).to(tl.float32)
        tl.store(out_ptr + index * columns + column, wide, mask=there)
