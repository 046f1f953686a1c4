"""Headers built from parts, any of which may lie: each is refused, or what it says lies in the file.

Bytes changed at random (test_malformed) rarely get past the first check. Here counts, lengths, types, dimensions,
offsets and the alignment are sound but for a few, so that every check is reached with everything before it in order.
"""

import struct
import tracemalloc
import warnings
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from handmade_gguf import array, gguf_bytes, info, pair, text, u32, u64
from hypothesis import given, settings
from hypothesis import strategies as st

from nanokit.errors import ModelFileError
from nanokit.gguf import types
from nanokit.gguf.reader import GGUFFile

# Python objects take more than the bytes they were read from. The worst is a list of INT8: a pointer and a whole number
# of 28 bytes, which take 32, for every byte.
OBJECT_BYTES, CONSTANT = 40, 1 << 15
EDGES = [0, 1, 2, 3, 7, 8, 31, 33, 64, 255, 2**16, 2**20, 2**24, 2**31, 2**32 - 1, 2**32, 2**61, 2**62, 2**63 - 1,
         2**63, 2**64 - 32, 2**64 - 1]  # fmt: skip
HUGE = st.sampled_from(EDGES) | st.integers(0, 2**64 - 1)
KEYS = ["general.architecture", "general.alignment", "split.count", "split.no", "split.tensors.count", "a", "a.b", "é"]
STRINGS = st.text(max_size=9).map(str.encode) | st.binary(max_size=9)


class Liar:
    """Draws; a twentieth of what it is asked for is replaced by something hostile."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw

    def lies(self, odds: int = 20) -> bool:
        return self.draw(st.integers(0, odds)) == odds // 2

    def number(self, true: int, below: int = 2**64) -> int:
        return self.draw(HUGE) % below if self.lies() else true

    def text(self, value: bytes) -> bytes:
        return u64(self.number(len(value))) + value

    def value(self, kind: int, depth: int = 0) -> bytes:
        if kind == types.STRING:
            return self.text(self.draw(STRINGS))
        if kind == types.ARRAY and depth < 3:
            element = self.draw(st.integers(0, 13)) if self.lies(5) else self.draw(st.sampled_from([0, 4, 6, 7, 8]))
            n = self.draw(st.integers(0, 20))
            return array(element, self.number(n), b"".join(self.value(element, depth + 1) for _ in range(n)))
        if kind == types.BOOL:
            return bytes([self.number(self.draw(st.integers(0, 1)), 256)])
        size = types.SCALARS[kind][1].size if kind in types.SCALARS else 4
        return self.draw(st.binary(min_size=size, max_size=size))

    def pairs(self) -> tuple[list[bytes], int]:
        """Metadata, and the alignment that is meant."""
        alignment, made = 32, []
        for key in self.draw(st.lists(st.sampled_from(KEYS), max_size=6, unique=not self.lies())):
            if key == "general.alignment" and not self.lies(5):
                alignment = self.draw(st.sampled_from([1, 2, 8, 32, 64, 256]))
                made.append(pair(key, 4, u32(self.number(alignment, 2**32))))
            else:
                kind = self.number(self.draw(st.integers(0, 12)), 2**32)
                made.append(self.text(key.encode()) + u32(kind) + self.value(kind))
        return made, alignment

    def infos(self, alignment: int) -> tuple[list[bytes], int]:
        """The table of tensors, and the bytes of data that it is about."""
        made, end = [], 0
        for i in range(self.draw(st.integers(0, 5))):
            type_id, kind = self.draw(st.sampled_from(list(types.TENSOR_TYPES.items())))
            dims = [kind.block_size * self.draw(st.integers(1, 2)), *self.draw(st.lists(st.integers(1, 3), max_size=3))]
            name = b"same" if self.lies() else b"t%d" % i
            n_dims = self.number(len(dims), 2**32)
            shape = b"".join(u64(self.number(dim)) for dim in dims)
            tail = u32(self.number(type_id, 2**32)) + u64(self.number(end))
            made.append(self.text(name) + u32(n_dims) + shape + tail)
            end += prod(dims) // kind.block_size * kind.block_bytes
            end += -end % alignment
        return made, end


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """A whole file, of at most a few kilobytes."""
    liar = Liar(draw)
    pairs, alignment = liar.pairs()
    infos, nbytes = liar.infos(alignment)
    data = np.random.default_rng(draw(st.integers(0, 99))).bytes(nbytes) if draw(st.booleans()) else bytes(nbytes)
    content = gguf_bytes(
        pairs, infos, data, alignment=alignment, version=liar.number(draw(st.sampled_from([2, 3])), 2**32),
        n_tensors=liar.number(len(infos)), n_pairs=liar.number(len(pairs)),
    )  # fmt: skip
    if liar.lies(6):
        at = draw(st.integers(0, len(content) - 1))
        content = content[:at] + draw(st.binary(max_size=9)) + content[at + draw(st.integers(0, 9)) :]
    return content[: draw(st.integers(1, len(content)))] if liar.lies(6) and content else content


def traced(path: Path) -> tuple[GGUFFile | ModelFileError, int]:
    """What opening gives, and the bytes that it took at most."""
    tracemalloc.start()
    try:
        try:
            found: GGUFFile | ModelFileError = GGUFFile.open(path)
        except ModelFileError as error:
            found = error
        return found, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def check(path: Path, content: bytes) -> bool:
    """Whether it opens. Refused, or sound: every tensor inside the file, apart from the others and readable."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, peak = traced(path)
        assert peak <= OBJECT_BYTES * len(content) + CONSTANT
        if isinstance(found, ModelFileError):
            assert path.name in found.what
            return False
        end = 0
        for name, entry in found.tensors.items():
            assert entry.offset >= end
            assert entry.offset % found.alignment == 0
            end = entry.offset + entry.nbytes
            assert end <= len(content)
            assert found.raw(name).tobytes() == content[entry.offset : end]
            read(found, name)
    return True


def read(file: GGUFFile, name: str) -> None:
    """As weights and as codes: of the shape that the header gives, and finite, or refused by name."""
    shape = file.tensors[name].shape
    for method, part in (("tensor", "shape"), ("quantized", "codes")):
        try:
            got: Any = getattr(file, method)(name)
        except ModelFileError as error:
            if repr(name) not in error.what:
                raise
        else:
            if isinstance(got, np.ndarray):
                assert got.shape == shape
                assert np.isfinite(got).all()
            elif got is not None:
                assert getattr(got, part).shape == shape


@settings(max_examples=300, deadline=5000)
@given(content=files())
def test_a_header_that_lies_is_refused_or_sound(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    """No crash, no hang, no memory for what a count claims, no weights from outside the tensor."""
    check(tmp_path_factory.getbasetemp() / "lying.gguf", content)


def test_a_file_costs_no_more_than_its_objects(tmp_path: Path) -> None:
    """The factor that the property above allows, at the worst of each kind of value."""
    n = 1 << 16
    worst = {
        "INT8": array(1, n, b"\x80" * n),
        "BOOL": array(7, n, b"\x01" * n),
        "INT16": array(3, n, b"\x00\x80" * n),
        "FLOAT32": array(6, n, struct.pack("<f", 0.5) * n),
        "STRING": array(8, n, text("āb") * n),
        "long STRING": array(8, 1, text("ā" * n)),
    }
    for name, value in worst.items():
        content = gguf_bytes([pair("k", 9, value)], [info("a", [4])], bytes(32))
        assert check(tmp_path / "worst.gguf", content), name


@pytest.mark.parametrize("kind", ["Q4_K", "IQ4_XS", "Q6_K", "Q4_1"])
def test_codes_of_an_infinite_scale_are_refused_without_a_warning(tmp_path: Path, kind: str) -> None:
    """Infinite times a sub-scale of zero is no number: numpy's warning came before the refusal."""
    type_id, geometry = next((i, each) for i, each in types.TENSOR_TYPES.items() if each.name == kind)
    block = bytearray(geometry.block_bytes)
    for at in (0, geometry.block_bytes - 2):  # where the scale lies, first or last
        block[at : at + 2] = b"\x00\x7c"
    content = gguf_bytes([], [info("a", [geometry.block_size], type_id)], bytes(block))
    assert check(tmp_path / "infinite.gguf", content)
    with pytest.raises(ModelFileError, match="'a'"):
        GGUFFile.open(tmp_path / "infinite.gguf").quantized("a")
