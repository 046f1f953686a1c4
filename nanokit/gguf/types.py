"""The numbers of the GGUF header: value types, tensor types and limits.

Geometry of the weight formats comes from `quant.formats`; this file adds the ids under which a GGUF file
names them, and the types that a file may hold but that are no weights (whole numbers, doubles, activation
blocks).
"""

import struct
from dataclasses import dataclass

from nanokit.quant.formats import FORMATS

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_NAME_BYTES = 63  # ggml keeps 64 bytes, the last of them a zero
MAX_KEY_BYTES = 65535
# A header that claims more entries than any model has is refused before Python objects are made for them.
MAX_ENTRIES = 1 << 20
MAX_ELEMENTS = 1 << 24

UINT32, BOOL, STRING, ARRAY = 4, 7, 8, 9

# Value type id -> (name, layout). Strings and arrays have no fixed layout.
SCALARS: dict[int, tuple[str, struct.Struct]] = {
    0: ("UINT8", struct.Struct("<B")),
    1: ("INT8", struct.Struct("<b")),
    2: ("UINT16", struct.Struct("<H")),
    3: ("INT16", struct.Struct("<h")),
    UINT32: ("UINT32", struct.Struct("<I")),
    5: ("INT32", struct.Struct("<i")),
    6: ("FLOAT32", struct.Struct("<f")),
    BOOL: ("BOOL", struct.Struct("<B")),
    10: ("UINT64", struct.Struct("<Q")),
    11: ("INT64", struct.Struct("<q")),
    12: ("FLOAT64", struct.Struct("<d")),
}
VALUE_NAMES = {**{number: name for number, (name, _) in SCALARS.items()}, STRING: "STRING", ARRAY: "ARRAY"}


@dataclass(frozen=True)
class TensorType:
    """A GGML tensor type: weights per block and bytes per block."""

    name: str
    block_size: int
    block_bytes: int


_WEIGHT_IDS = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11,
    "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "IQ2_XXS": 16, "IQ2_XS": 17, "IQ3_XXS": 18, "IQ1_S": 19, "IQ4_NL": 20,
    "IQ3_S": 21, "IQ2_S": 22, "IQ4_XS": 23, "IQ1_M": 29, "BF16": 30, "TQ1_0": 34, "TQ2_0": 35, "MXFP4": 39,
    "NVFP4": 40,
}  # fmt: skip

TENSOR_TYPES: dict[int, TensorType] = {
    **{i: TensorType(n, FORMATS[n].block_size, FORMATS[n].block_bytes) for n, i in _WEIGHT_IDS.items()},
    9: TensorType("Q8_1", 32, 36),
    15: TensorType("Q8_K", 256, 292),
    24: TensorType("I8", 1, 1),
    25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4),
    27: TensorType("I64", 1, 8),
    28: TensorType("F64", 1, 8),
    41: TensorType("Q1_0", 128, 18),
}
# Ids that ggml has given up; files with them exist, made by old versions.
RETIRED_TYPES = {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}  # fmt: skip

# First bytes of what people open by mistake.
FOREIGN: dict[bytes, str] = {
    b"PK\x03\x04": "a zip archive (a PyTorch checkpoint, perhaps)",
    b"\x1f\x8b": "a gzip archive",
    b"version https://git-lfs": "a Git LFS pointer: the text that stands for a file that was not fetched",
    b"<": "a web page or XML text, perhaps the error page of a download",
    b"lmgg": "a GGML file of the time before GGUF",
    b"fmgg": "a GGML file of the time before GGUF",
    b"tjgg": "a GGJT file of the time before GGUF",
    b"FUGG": "a GGUF file with its bytes swapped",
}
