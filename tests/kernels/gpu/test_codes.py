"""The PTX that takes nibbles apart, run by a few lines of Python on every byte: Triton's interpreter does not see it,
and where there is no GPU nothing else would tell of a shift too far."""

import re

import numpy as np
import pytest
import torch

from nanokit.kernels.gpu import runtime
from nanokit.kernels.gpu.device import codes
from nanokit.quant.blocks import FP4_LEVELS, IQ4_LEVELS

MASK = 0xFFFFFFFF


def byte_permute(low: int, high: int, selector: int) -> int:
    """PTX ISA, prmt in its default mode: each nibble of the selector names one of eight bytes; its top bit, which would
    ask for the byte's sign instead, must not be set here."""
    assert selector & 0x8888 == 0
    pool = (high << 32) | low
    return sum(((pool >> 8 * (selector >> 4 * i & 7)) & 255) << 8 * i for i in range(4))


OPERATIONS = {
    "mov.b32": lambda a: a,
    "not.b32": lambda a: ~a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shl.b32": lambda a, n: a << n,
    "shr.u32": lambda a, n: a >> n,
    "prmt.b32": byte_permute,
}


def run(ptx: str, *inputs: int) -> tuple[int, int]:
    """$0 and $1 after these instructions, $2 … being the inputs."""
    registers = {f"${2 + i}": value for i, value in enumerate(inputs)}
    declared = re.findall(r"\.reg \.b32 ([^;]*);", ptx)
    body = re.sub(r"\.reg [^;]*;|[{}]", "", ptx)
    names = {"$0", "$1", *(name.strip() for names in declared for name in names.split(","))}
    for line in filter(None, map(str.strip, body.split(";"))):
        operation, rest = line.split(maxsplit=1)
        target, *operands = (part.strip() for part in rest.split(","))
        assert target in names, line  # an input is never written: it may be another's register
        values = [registers[x] if x in registers else int(x, 0) for x in operands]
        registers[target] = OPERATIONS[operation](*values) & MASK
    return registers["$0"], registers["$1"]


def words(values: torch.Tensor) -> list[int]:
    """Bytes, four to a word, the first lowest."""
    return values.contiguous().view(torch.uint8).numpy().view("<u4").tolist()


def every_byte() -> torch.Tensor:
    """Each of the 256 bytes in each of the four places of a word."""
    return torch.cat([torch.arange(256, dtype=torch.uint8).roll(shift) for shift in range(4)])


def test_both_nibbles_of_a_code() -> None:
    """16 times the code in two's complement, as the interpreted kernel has it."""
    stored = every_byte()
    low, high = (stored << 4).view(torch.int8), (stored & 0xF0).view(torch.int8)
    for word, *wanted in zip(words(stored), words(low), words(high), strict=True):
        assert run(codes.BOTH4.value, word) == tuple(wanted)
    assert low[0x0F] == -16  # -1
    assert high[0x7F] == 112  # 7


def test_two_planes_of_a_code() -> None:
    """Upper and lower nibbles of one byte each, next to each other again."""
    original = every_byte().view(torch.int8)
    other = original.roll(100)
    upper = (original.view(torch.uint8) >> 4) | (other.view(torch.uint8) & 0xF0)
    lower = (original.view(torch.uint8) & 15) | (other.view(torch.uint8) << 4)
    for first, second, *wanted in zip(words(upper), words(lower), words(original), words(other), strict=True):
        assert run(codes.PLANES.value, first, second) == tuple(wanted)


@pytest.mark.parametrize(
    "table", [FP4_LEVELS, IQ4_LEVELS, np.arange(-128, 128, 17, np.int8)], ids=["fp4", "iq4", "all"]
)
def test_a_table(table: np.ndarray) -> None:
    """An entry for each index, whichever half of the table and whichever nibble of the word it is."""
    stored = every_byte()
    values = torch.from_numpy(table.astype(np.int8))
    low, high = values[(stored & 15).long()], values[(stored >> 4).long()]
    ptx = codes.lookup(table.tolist())
    for word, *wanted in zip(words(stored), words(low), words(high), strict=True):
        assert run(ptx, word) == tuple(wanted)


def test_an_interpreted_kernel_has_no_ptx() -> None:
    """Which of the two ways a kernel takes follows from what `pack` hands it."""
    from stored import random_weights

    from nanokit.kernels.gpu.pack import pack

    for name in ("Q4_0", "IQ4_NL", "Q8_0"):
        assert (pack("a", random_weights(name, 16, 64)).lookup is None) == runtime.INTERPRETED
