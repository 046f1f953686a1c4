"""The structures of c/nk.h as ctypes sees them, field by field in the same order; nk.h says what they mean.

A pointer is a plain address (`c_void_p`): what it points to is kept alive by whoever binds a model, not by ctypes.
Generating these from the header was rejected: five structures do not carry a parser, and a drift is refused at load
(sizes) and by a test (names and order).
"""

from ctypes import Structure, c_double, c_int64, c_uint8, c_void_p
from typing import ClassVar


class Matrix(Structure):
    """A packed matrix."""

    _fields_: ClassVar = [
        ("rows", c_int64),
        ("cols", c_int64),
        ("kind", c_int64),
        ("bias", c_int64),
        ("group", c_int64),
        ("scale16", c_int64),
        ("factor", c_double),
        ("code_bytes", c_int64),
        ("panel_bytes", c_int64),
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("minimums", c_void_p),
        ("offset", c_void_p),
        ("table", c_uint8 * 16),
    ]


class Act(Structure):
    """Quantized activations of some rows."""

    _fields_: ClassVar = [
        ("high", c_void_p),
        ("low", c_void_p),
        ("scale32", c_void_p),
        ("scale16", c_void_p),
        ("sum32", c_void_p),
        ("sum16", c_void_p),
        ("start32", c_void_p * 3),
        ("start16", c_void_p * 3),
    ]


class Layer(Structure):
    """The weights of one layer."""

    _fields_: ClassVar = [
        *((name, Matrix) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        ("attn_norm", c_void_p),
        ("ffn_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
    ]


class Model(Structure):
    """A bound model."""

    _fields_: ClassVar = [
        ("hidden", c_int64),
        ("intermediate", c_int64),
        ("layers", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("vocab", c_int64),
        ("mode", c_int64),
        ("eps", c_double),
        ("embedding", Matrix),
        ("head", Matrix),
        ("final_norm", c_void_p),
        ("layer", c_void_p),
        ("static_peak", c_void_p),
        ("peaks", c_void_p),
    ]


class Step(Structure):
    """One ragged step."""

    _fields_: ClassVar = [
        ("rows", c_int64),
        ("sequences", c_int64),
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("first_row", c_void_p),
        ("first_block", c_void_p),
        ("blocks", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("kv_format", c_int64),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_scales", c_void_p),
        ("value_scales", c_void_p),
        ("kv_peaks", c_void_p),
        ("block_bytes", c_int64),
        ("sealed", c_void_p),
        ("fulls", c_int64),
        ("full", c_void_p),
    ]


STRUCTURES: tuple[type[Structure], ...] = (Matrix, Act, Layer, Model, Step)
