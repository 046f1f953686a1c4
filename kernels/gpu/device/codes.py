"""From the nibbles of a byte to the whole numbers that tensor cores multiply.

Compiled, four weights are worked on at a time, in the 32-bit register that their bytes share: an instruction for each
weight (as a shift of int8 in Triton is) would be most of a product. Interpreted, Triton's own operations say the same,
since numpy knows no PTX; tests/kernels/gpu/test_codes.py runs the PTX by itself, on every byte.

    CODES4   a nibble is a code in two's complement, -8 … 7 (codes 0 … 15 are stored less 8). What leaves is 16 times
             the code: the nibble at the top of a byte, so that no sign has to be extended
    TABLE4   a nibble is an index. prmt looks its lower three bits up in either half of the table, and a third time by
             the fourth bit for a mask of the half that is meant
    PLANES8  the upper nibbles of 8-bit codes in one byte, the lower ones in another
"""

from collections.abc import Sequence

import triton
import triton.language as tl

BOTH4 = tl.constexpr("shl.b32 $0, $2, 4; and.b32 $0, $0, 0xF0F0F0F0; and.b32 $1, $2, 0xF0F0F0F0;")
PLANES = tl.constexpr(
    "{ .reg .b32 t; shl.b32 $0, $2, 4; and.b32 $0, $0, 0xF0F0F0F0; and.b32 t, $3, 0x0F0F0F0F; or.b32 $0, $0, t;"
    " shr.u32 t, $3, 4; and.b32 t, t, 0x0F0F0F0F; and.b32 $1, $2, 0xF0F0F0F0; or.b32 $1, $1, t; }"
)


def lookup(table: Sequence[int]) -> str:
    """PTX that looks up four bytes of two indices each: $0 the values of the low nibbles, $1 of the high ones, $2 the
    bytes. table: 16 whole numbers that fit int8. A byte of a word of 16 bits is two neighbouring nibbles of prmt."""
    words = [f"0x{int.from_bytes(bytes(n & 255 for n in table[i : i + 4]), 'little'):08x}" for i in (0, 4, 8, 12)]
    return (
        "{ .reg .b32 i, j, a, b, m;"
        + " mov.b32 j, $2;"
        + _two_bytes("$0", words)
        + " shr.u32 j, $2, 16;"
        + _two_bytes("$1", words)
        + " prmt.b32 a, $0, $1, 0x6420; prmt.b32 $1, $0, $1, 0x7531; mov.b32 $0, a; }"
    )


def _two_bytes(out: str, words: Sequence[str]) -> str:
    """Into `out`, in order, the values of the four nibbles in the lower half of j."""
    return (
        f" and.b32 i, j, 0x7777; prmt.b32 a, {words[0]}, {words[1]}, i; prmt.b32 b, {words[2]}, {words[3]}, i;"
        f" shr.u32 i, j, 3; and.b32 i, i, 0x1111; prmt.b32 m, 0x0000FF00, 0, i;"
        f" and.b32 b, b, m; not.b32 m, m; and.b32 a, a, m; or.b32 {out}, a, b;"
    )


@triton.jit
def nibbles(stored, lower, table_ptr, KIND: tl.constexpr, LOOKUP: tl.constexpr):
    """Two tiles int8, of the low and of the high nibbles of the bytes uint8 in `stored`; `lower`: the other plane of
    PLANES8. LOOKUP: the PTX of a table, or of nothing; None where kernels are interpreted."""
    if LOOKUP is not None:
        if KIND == 3:  # PLANES8
            low, high = tl.inline_asm_elementwise(
                PLANES, "=&r,=&r,r,r", [stored, lower], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
            )
        else:
            low, high = tl.inline_asm_elementwise(
                BOTH4 if KIND == 0 else LOOKUP, "=&r,=&r,r", [stored], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
            )
    elif KIND == 1:  # TABLE4
        low = tl.load(table_ptr + (stored & 15).to(tl.int32))
        high = tl.load(table_ptr + (stored >> 4).to(tl.int32))
    else:
        low, high = stored << 4, stored & 0xF0
        if KIND == 3:
            low, high = low | (lower & 15), high | (lower >> 4)
        low, high = low.to(tl.int8, bitcast=True), high.to(tl.int8, bitcast=True)
    return low, high
