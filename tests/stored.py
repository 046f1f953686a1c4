"""Weights as files store them: random blocks of every coded format, since the gguf library quantizes only some."""

import numpy as np
import torch
from gguf import GGMLQuantizationType, quants

from nanokit.quant.formats import FORMATS
from nanokit.quant.ggml import GGML_FORMATS
from nanokit.quant.qtensor import QTensor
from nanokit.quant.weight_format import weight_format

# Where a block keeps its fp16 scale and, second, what its minimums are multiplied by.
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,),
}  # fmt: skip
INTEGERS = [f"int{bits}-{kind}-{group}" for bits in (4, 8) for kind in ("sym", "asym")
            for group in ("g32", "g64", "channel")]  # fmt: skip
# The other formats that the kit makes itself, and groups and ranges of integer ones that those above do not have.
TABLES = ["nvfp4", "mxfp4", "nf4", "nf4-dq"]
MADE = [*INTEGERS, "int4-sym-g16", "int4-asym-g192", "int8-asym-tensor-reduced", *TABLES]
# Every format with every reach of its scales.
MADE_ANYHOW = sorted({*MADE, *GGML_FORMATS, *(f"int{bits}-{kind}-{reach}" for bits in (4, 8) for kind in ("sym", "asym")
                     for reach in ("g16", "g32", "g96", "g192", "tensor", "qkv", "global"))})  # fmt: skip
CODED = [name for name, f in FORMATS.items() if f.has_codes]


def columns_of(name: str) -> int:
    """Columns of this format are a multiple of this number."""
    if name in FORMATS:
        return FORMATS[name].block_size
    return 192 if name.endswith("g192") else 64 if name.endswith("g64") or name.startswith("nf4") else 32


def random_blocks(name: str, rows: int, columns: int, seed: int = 0, size: float = 0.1) -> np.ndarray:
    """Raw bytes uint8 [rows, bytes]: any codes and sub-scales, weights of about `size`, a factor of 4 from block to
    block."""
    f, noise = FORMATS[name], np.random.default_rng(seed)
    raw = noise.integers(0, 256, (rows * columns // f.block_size, f.block_bytes), dtype=np.uint8)
    if name == "MXFP4":
        raw[:, 0] = noise.integers(121, 125, len(raw))
        return raw.reshape(rows, -1)
    for at in HALVES[name]:
        raw[:, at : at + 2] = np.array([1.0], "<f2").view(np.uint8)
    spread = np.abs(quants.dequantize(raw, GGMLQuantizationType[name])).mean()
    for at in HALVES[name]:
        halves = (size / spread * 2 ** noise.uniform(-1, 1, (len(raw), 1))).astype("<f2")
        raw[:, at : at + 2] = (halves * noise.choice([-1, 1], halves.shape).astype("<f2")).view(np.uint8)
    return raw.reshape(rows, -1)


def random_weights(name: str, rows: int, columns: int, seed: int = 0) -> QTensor:
    """A matrix in a format of files, or in one that the kit makes."""
    if name in FORMATS:
        return FORMATS[name].decode(random_blocks(name, rows, columns, seed), (rows, columns))
    noise = np.random.default_rng(seed)
    weights = noise.standard_normal((rows, columns)) * 2 ** noise.uniform(-3, 3, (rows, 1)) + 0.2
    return weight_format(name).quantize(weights.astype(np.float32))


def hard_weights(dtype: torch.dtype, rows: int = 37, columns: int = 384) -> torch.Tensor:
    """Rows of many sizes: outliers, zeros, one value alone, tiny and (of fp32 and bf16) nearly subnormal weights."""
    w = torch.randn(rows, columns, generator=torch.Generator().manual_seed(7))
    w *= 2.0 ** torch.arange(-12, rows - 12)[:, None].clamp(max=6)
    w[1] = 0
    w[2, 5] = 3000
    w[3] = -0.3
    w[4] *= 1e-6
    w[5], w[6] = w[5] * 1e-30, w[6] * 1e-37
    w[7] = w[7].abs() + 4
    return w.to(dtype).float()
