"""Packed panels: byte by byte where c/nk.h draws them, and unpacked, by C, the dequantized weights bit for bit."""

from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from stored import CODED, MADE, columns_of, random_weights

from nanokit.errors import ModelFileError
from nanokit.kernels.cpu.library import Library
from nanokit.kernels.cpu.ops import Linear
from nanokit.kernels.cpu.pack import CODES4, CODES8, PLANES8, TABLE4, Arena, Packed, pack, pack_rows
from nanokit.kernels.packable import fits_four_bits
from nanokit.quant.qtensor import QTensor

FORMATS = [*CODED, *MADE]


def same_bits(ours: np.ndarray, theirs: np.ndarray) -> bool:
    return ours.dtype == theirs.dtype == np.float32 and np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))


def in_planes(q: QTensor) -> list[bool]:
    return [False] if q.table is not None or fits_four_bits(q.code_range) else [False, True]


@pytest.mark.parametrize("name", FORMATS)
def test_unpacked_equals_dequantized(kernels: Library, name: str) -> None:
    """Fake quantization equals the packed kernel: else quality would be measured on other weights than those that run.
    Rows that fill panels and rows that do not."""
    for rows in (1, 16, 37):
        q = random_weights(name, rows, 2 * columns_of(name), rows)
        for planes in in_planes(q):
            assert same_bits(Linear(q, planes=planes, library=kernels).unpack().numpy(), q.dequantize())


@given(st.sampled_from(FORMATS), st.integers(1, 70), st.integers(1, 9), st.integers(0, 999))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_unpacked_equals_dequantized_at_odd_sizes(
    kernels: Library, name: str, rows: int, blocks: int, seed: int
) -> None:
    q = random_weights(name, rows, columns_of(name) * (1 + blocks % 2 if columns_of(name) == 256 else blocks), seed)
    for planes in in_planes(q):
        assert same_bits(Linear(q, planes=planes, library=kernels).unpack().numpy(), q.dequantize())


def drawn_codes(packed: Packed, rows: int, columns: int) -> np.ndarray:
    """Unsigned codes [rows, columns] read one by one, as nk.h draws them."""
    struct, panels = packed.struct, packed.arrays[0]
    out = np.empty((rows, columns), int)
    for r in range(rows):
        panel, lane = panels[r // 16, : struct.code_bytes], r % 16
        for c in range(columns):
            if struct.kind == CODES8:
                out[r, c] = panel.reshape(-1, 16, 4)[c // 4, lane, c % 4]
                continue
            shift = 4 if c % 8 >= 4 else 0
            regions = panel.reshape(2, -1) if struct.kind == PLANES8 else panel.reshape(1, -1)
            nibbles = [int(region.reshape(-1, 16, 4)[c // 8, lane, c % 4]) >> shift & 15 for region in regions]
            out[r, c] = nibbles[0] if len(nibbles) == 1 else 16 * nibbles[0] + nibbles[1]
    return out


def drawn_scales(packed: Packed, start: int, groups: int) -> np.ndarray:
    """Scales or minimums [panels * 16, groups] that lie from address `start` on in the first panel."""
    struct, panels = packed.struct, packed.arrays[0]
    dtype = np.float16 if struct.scale16 else np.float32
    at = start - struct.codes
    numbers = np.ascontiguousarray(panels[:, at : at + groups * 16 * dtype().itemsize]).view(dtype)
    return numbers.reshape(-1, groups, 16).transpose(0, 2, 1).reshape(-1, groups)


@pytest.mark.parametrize(
    ("name", "planes", "kind", "bias"),
    [("Q4_0", False, CODES4, 8), ("Q4_1", False, CODES4, 0), ("Q3_K", False, CODES4, 8), ("IQ4_NL", False, TABLE4, 0),
     ("int4-sym-g64", False, CODES4, 8), ("Q8_0", False, CODES8, 128), ("Q8_0", True, PLANES8, 128),
     ("Q5_1", True, PLANES8, 128), ("Q6_K", False, CODES8, 128), ("int8-asym-g32", True, PLANES8, 128)],
)  # fmt: skip
def test_panels_are_as_drawn(name: str, planes: bool, kind: int, bias: int) -> None:
    """Packing and unpacking that err alike cancel out: the screened head and later kernels read the drawing."""
    rows, columns = 19, max(64, columns_of(name))
    q = random_weights(name, rows, columns)
    packed = pack("w", q, Arena(), planes=planes)
    assert packed.struct.kind == kind
    assert np.array_equal(drawn_codes(packed, rows, columns), q.codes.astype(int) + bias)
    assert (drawn_codes(packed, 32, columns)[rows:] == bias).all()  # rows of the padding are zero
    for start, wanted in ((packed.struct.scales, q.scales), (packed.struct.minimums, q.minimums)):
        assert (start is None) == (wanted is None)
        if wanted is not None:
            stored = drawn_scales(packed, start, columns // q.group)
            assert np.array_equal(stored[:rows], wanted)
            assert not stored[rows:].any()


def test_scales_are_halves_only_where_nothing_is_lost() -> None:
    """A rounded scale is a requantized weight; a rounded minimum no less."""
    for name, half in [("Q4_1", True), ("Q8_0", True), ("Q4_K", False), ("int8-sym-g32", True), ("nf4", False)]:
        assert pack("w", random_weights(name, 16, 256), Arena()).struct.scale16 == half
    codes, scales = np.ones((16, 32), np.int8), np.full((16, 1), 0.5, np.float32)
    for odd in (0.1, 65536.0, 2.0**-25, 1.0 + 2.0**-11):
        wrong = scales.copy()
        wrong[9] = odd
        for pair in ((wrong, scales), (scales, wrong)):
            q = QTensor("w", codes.shape, codes, *pair, 32, None, (0, 15))
            assert not pack("w", q, Arena()).struct.scale16
    exact = QTensor("w", codes.shape, codes, scales, scales * 2.0**-23, 32, None, (0, 15))
    assert pack("w", exact, Arena()).struct.scale16


def test_the_fifth_bit_takes_a_byte_and_four_take_half() -> None:
    """What a step reads, and with it its speed, follows from the range of the codes."""
    for name, bits in [("Q2_K", 4), ("Q4_K", 4), ("MXFP4", 4), ("int4-asym-g32", 4), ("Q5_0", 8), ("Q6_K", 8)]:
        assert pack("w", random_weights(name, 16, 256), Arena()).struct.code_bytes == 16 * 256 * bits / 8


def test_everything_starts_on_a_cache_line_and_nothing_overlaps() -> None:
    """A matrix larger than a chunk, many small ones, and the seam between chunks."""

    class Small(Arena):
        CHUNK = 4096

    arena, packed = Small(), []
    for i, (rows, columns) in enumerate([(3, 32), (20, 64), (200, 320), (1, 32), (17, 96), (16, 32), (90, 128)] * 3):
        q = random_weights(("Q4_0", "Q5_1", "Q8_0")[i % 3], rows, columns, i)
        packed.append((q, pack("w", q, arena, np.arange(rows, dtype=np.float32))))
    spans = sorted((a.ctypes.data, a.ctypes.data + a.nbytes) for _, p in packed for a in p.arrays)
    for _, p in packed:
        starts = [
            p.struct.codes,
            p.struct.scales,
            p.struct.panel_bytes,
            *([p.struct.minimums] * bool(p.struct.minimums)),
        ]
        assert not any(start % 64 for start in starts)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    for q, p in packed:  # the first of them are still what they were
        again = pack("w", q, Arena(), np.arange(q.shape[0], dtype=np.float32))
        assert all(np.array_equal(a, b) for a, b in zip(p.arrays, again.arrays, strict=True))
        assert p.nbytes == sum(a.nbytes for a in again.arrays)


@given(st.sampled_from(FORMATS), st.integers(1, 90), st.integers(1, 5), st.booleans(), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_packing_some_rows_at_a_time_changes_nothing(name: str, rows: int, pieces: int, late: bool, seed: int) -> None:
    """A seam that loses, shifts or doubles rows; fp16 scales in the first pieces when the last one needs fp32."""
    q = random_weights(name, rows, 2 * columns_of(name), seed)
    if late:
        q.scales[:] = 0.5
        q.scales[-1] = 0.1
    bias = np.arange(rows, dtype=np.float32)
    read_at_once: list[int] = []

    def read(first: int, end: int) -> QTensor:
        read_at_once.append(end - first)
        return q.rows(first, end)

    for planes in in_planes(q):
        whole = pack("w", q, Arena(), bias, planes=planes)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("nanokit.kernels.cpu.pack.PIECE", pieces * 16 * q.shape[1])
            parts = pack_rows("w", q.shape, read, Arena(), bias, planes=planes)
        assert all(np.array_equal(a, b) for a, b in zip(whole.arrays, parts.arrays, strict=True))
        assert same_structure(whole, parts)
        assert max(read_at_once) <= pieces * 16


def same_structure(one: Packed, other: Packed) -> bool:
    """Equal but for the addresses, of which only the distances to the first code count."""

    def numbers(packed: Packed) -> dict[str, object]:
        s = packed.struct
        fields = {name: getattr(s, name) for name, _ in s._fields_}
        starts = {name: fields[name] and fields[name] - s.codes for name in ("codes", "scales", "minimums")}
        return fields | starts | {"offset": bool(s.offset), "table": list(s.table)}

    return numbers(one) == numbers(other)


def test_memory_of_a_packing_that_began_in_vain_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanokit.kernels.cpu.pack.PIECE", 1)
    arena, q = Arena(), random_weights("Q4_1", 64, 64)
    first = pack("w", q, arena)
    q.scales[-1] = 0.1
    second = pack("w", q, arena)
    assert (first.struct.scale16, second.struct.scale16) == (1, 0)
    assert second.struct.codes == first.struct.codes + first.arrays[0].nbytes


def test_packing_leaves_the_codes_as_they_are() -> None:
    q = random_weights("Q8_0", 32, 64)
    before = q.codes.copy()
    for planes in (False, True):
        pack("w", q, Arena(), planes=planes)
    assert np.array_equal(q.codes, before)


@pytest.mark.parametrize(("shape", "group"), [((4, 48), 16), ((4, 96), 48), ((4, 64), 8), ((2, 4, 64), 32)])
def test_what_does_not_fit_is_refused_by_name(shape: tuple[int, ...], group: int) -> None:
    scales = np.zeros((*shape[:-1], shape[-1] // group), np.float32)
    q = QTensor("w", shape, np.zeros(shape, np.int8), scales, None, group, None, (0, 15))
    with pytest.raises(ModelFileError, match=rf"(?s)blk\.3\.ffn_down\.weight.*groups of {group}.*multiple of 32"):
        pack("blk.3.ffn_down.weight", q, Arena())


def test_a_bias_is_added_once_to_each_output(kernels: Library) -> None:
    """Also in the panel that is not full, and to rows of zeros exactly."""
    bias = np.random.default_rng(0).standard_normal(37).astype(np.float32)
    out = Linear(random_weights("Q4_1", 37, 64), bias, library=kernels)(torch.zeros(9, 64), "a16")
    assert torch.equal(out, torch.from_numpy(bias).expand(9, 37))
