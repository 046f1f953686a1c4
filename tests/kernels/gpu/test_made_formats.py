"""Weights of every format that the kit makes, packed for Triton and unpacked again."""

import pytest
import torch
from stored import MADE_ANYHOW, hard_weights

from nanokit.kernels.gpu import runtime
from nanokit.kernels.gpu.pack import pack
from nanokit.kernels.gpu.product import rows_of
from nanokit.quant.weight_format import weight_format


@pytest.mark.parametrize("name", MADE_ANYHOW)
def test_unpacked_equals_dequantized(name: str) -> None:
    """As the C kernels have it: in every bit but for the sign of a zero."""
    w, fmt = hard_weights(torch.bfloat16 if "asym" in name else torch.float32, 19, 192), weight_format(name)
    q = fmt.quantize(w.numpy(), span=(-9.0, 4.0) if fmt.scope in ("qkv", "global") else None)
    ids = torch.arange(0, len(w), 4, device=runtime.device())
    for planes in [False, True] if fmt.table is None and fmt.code_range[1] > 15 else [False]:
        assert torch.equal(rows_of(pack(name, q, planes=planes), ids).cpu(), torch.from_numpy(q.dequantize())[::4])
