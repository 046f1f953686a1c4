"""Every format that weights can be brought into, by name: one list for API, command line, parameters and panels.

    int4-sym-g64 …       INT4 and INT8, symmetric or with a minimum; one scale for a group of columns, a row
                         (channel), a matrix (tensor), the q, k and v of a layer (qkv) or the whole model (global);
                         quant/integer.py
    nvfp4 mxfp4 nf4      4-bit tables; nf4-dq is nf4 with scales quantized once more; quant/float4.py
    q4_0 … q8_0          blocks of 32 as ggml makes them; quant/ggml.py
    tq1_0 tq2_0          ternary, blocks of 256; quant/ggml.py

A name says all there is to say: formats are compared by it and files keep it. A format turns float weights into a
`QTensor` and no more: how its codes are packed is a backend's affair, how they are filed is quant/storage.py's, and
which matrix gets which format is quant/policy.py's.
"""

from typing import Protocol

import numpy as np

from nanokit.errors import ParameterError
from nanokit.quant.float4 import MXFP4, NF4, NVFP4, NestedNF4
from nanokit.quant.ggml import GGML_FORMATS, TERNARY_FORMATS
from nanokit.quant.integer import INTEGER_NAME, integer_format
from nanokit.quant.qtensor import QTensor


class WeightFormat(Protocol):
    """How weights are rounded. scope: what one scale serves: "group", "channel", "tensor", "qkv" or "global"."""

    @property
    def name(self) -> str: ...

    @property
    def scope(self) -> str: ...

    @property
    def code_range(self) -> tuple[int, int]:
        """Lowest and highest code."""
        ...

    @property
    def table(self) -> np.ndarray | None:
        """Values of the codes, int8 [16]; None: the codes themselves."""
        ...

    def group_of(self, columns: int) -> int:
        """Columns that share a scale in a matrix of so many. Raises ParameterError where they do not divide, naming the
        groups that would."""
        ...

    def quantize(self, weights: np.ndarray, name: str = "a matrix", span: tuple[float, float] | None = None) -> QTensor:
        """Codes and scales of float32 weights (…, rows, columns). name: what messages call them. span: lowest and
        highest weight that the scale has to reach, for the scopes wider than a row ("tensor" takes its own if None).

        Raises ParameterError for columns that the group does not divide, and for a span that is missing or has no use;
        ModelFileError for weights that are not finite, or whose range is not.
        """
        ...


TABLE_FORMATS: dict[str, WeightFormat] = {each.name: each for each in (NVFP4(), MXFP4(), NF4(), NestedNF4())}
BLOCK_FORMATS: dict[str, WeightFormat] = {**GGML_FORMATS, **TERNARY_FORMATS}
EXAMPLES = "int4-sym-g64, int4-asym-g32, int8-sym-channel, int8-sym-tensor-reduced, int4-sym-global, int4-sym-qkv"


def weight_format(name: str) -> WeightFormat:
    """The format of this name; capitals do not matter. Raises ParameterError, listing the choices."""
    key = name.strip().lower()
    found = TABLE_FORMATS.get(key) or BLOCK_FORMATS.get(key)
    if found is not None:
        return found
    if INTEGER_NAME.fullmatch(key):
        return integer_format(key)
    raise ParameterError(
        "unknown weight format",
        found=repr(name),
        needed=f"{', '.join((*TABLE_FORMATS, *BLOCK_FORMATS))}, or one such as {EXAMPLES}",
    )


def is_format(name: str) -> bool:
    """Whether `weight_format` knows the name."""
    key = name.strip().lower()
    return key in TABLE_FORMATS or key in BLOCK_FORMATS or INTEGER_NAME.fullmatch(key) is not None
