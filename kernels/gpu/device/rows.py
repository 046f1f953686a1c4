"""Operations on rows that end in a product's input: the norm with the residual before it, and the gate."""

import triton
import triton.language as tl

from nanokit.kernels.gpu.device.activations import store_input


@triton.jit
def inverse_rms(squares, count, eps):
    """1 / sqrt(squares / count + eps), every operation rounded once; squares: the sum over `count` columns."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, count * 1.0) + eps))


@triton.jit(do_not_specialize=["rows"])
def norm(
    hidden_ptr, delta_ptr, weight_ptr, x_ptr, codes_ptr, scales_ptr, sums_ptr, rows, columns, eps,
    LIMIT: tl.constexpr, GROUP: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program row: the whole of it, in registers from the one load to the one store."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    hidden = tl.load(hidden_ptr + row * columns + column, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    if delta_ptr is not None:
        hidden += tl.load(delta_ptr + row * columns + column, mask=inside, other=0.0)
        tl.store(hidden_ptr + row * columns + column, hidden, mask=inside)
    x = hidden * inverse_rms(tl.sum(hidden * hidden, axis=0), columns, eps) * weight
    store_input(x, x_ptr, codes_ptr, scales_ptr, sums_ptr, row, 0, rows, columns, LIMIT, GROUP, PLANES, BLOCK)


@triton.jit(do_not_specialize=["rows"])
def gate(
    gate_ptr, up_ptr, x_ptr, codes_ptr, scales_ptr, sums_ptr, rows, columns,
    LIMIT: tl.constexpr, GROUP: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, i): BLOCK columns from i * BLOCK on."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    column = first + tl.arange(0, BLOCK)
    inside = column < columns
    z = tl.load(gate_ptr + row * columns + column, mask=inside, other=0.0)
    up = tl.load(up_ptr + row * columns + column, mask=inside, other=0.0)
    x = tl.div_rn(z, 1.0 + tl.exp(-z)) * up
    store_input(x, x_ptr, codes_ptr, scales_ptr, sums_ptr, row, first, rows, columns, LIMIT, GROUP, PLANES, BLOCK)
