"""Weights of every format that the kit makes, packed for C and unpacked again: the very numbers that training and
quality saw, from weights of any float type."""

import numpy as np
import pytest
import torch
from stored import MADE_ANYHOW, hard_weights

from nanokit.kernels.cpu.library import Library
from nanokit.kernels.cpu.ops import Linear
from nanokit.kernels.fake_quant import fake_quantize
from nanokit.quant.integer import IntegerFormat
from nanokit.quant.weight_format import weight_format

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MADE_ANYHOW)
def test_unpacked_equals_dequantized(kernels: Library, name: str, dtype: torch.dtype) -> None:
    """In every bit, but for the sign of a zero, which a packed code does not have (q4_0's zero blocks have a scale of
    -0). fake_quantize gives the same, where there is one."""
    w, fmt = hard_weights(dtype), weight_format(name)
    span = (float(w.min()) - 1, float(w.max())) if fmt.scope in ("qkv", "global") else None
    q = fmt.quantize(w.numpy(), span=span)
    for planes in [False, True] if fmt.table is None and fmt.code_range[1] > 15 else [False]:
        unpacked = Linear(q, planes=planes, library=kernels).unpack().numpy()
        np.testing.assert_array_equal(unpacked, q.dequantize())
    if isinstance(fmt, IntegerFormat):
        given = [torch.from_numpy(x) if span and x is not None else None for x in (q.scales, q.minimums)]
        assert torch.equal(fake_quantize(w, fmt, *given), torch.from_numpy(q.dequantize()))


@pytest.mark.parametrize(("name", "bits"), [
    ("int4-sym-g64", 4.25), ("int4-asym-g32", 5), ("int4-sym-channel", 4), ("int8-sym-g32", 8.5), ("q4_0", 4.5),
    ("nf4", 4.5), ("nf4-dq", 4.5), ("mxfp4", 4.5), ("nvfp4", 5),
])  # fmt: skip
def test_bits_that_a_product_reads(name: str, bits: float) -> None:
    """Scales of eleven bits take two bytes in a kernel, and so do a file's one-byte scales, NVFP4's without the factor
    that they share: what a format saves in a file by them it does not save here. Four would be read for nothing."""
    w = torch.randn(64, 1536, generator=torch.Generator().manual_seed(0)).numpy() * 0.05
    packed = Linear(weight_format(name).quantize(w)).packed
    assert packed.nbytes * 8 / w.size == pytest.approx(bits, abs=0.03)
