"""GGUF files written byte by byte, so that any one can be wrong; the library writes sound ones."""

import struct
from collections.abc import Sequence


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, type_id: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", type_id) + value


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def array(type_id: int, n: int, data: bytes) -> bytes:
    return u32(type_id) + u64(n) + data


def info(name: str | bytes, dims: Sequence[int], type_id: int = 0, offset: int = 0, n_dims: int | None = None) -> bytes:
    """One entry of the tensor table; dims fastest first, as in the file."""
    shape = b"".join(map(u64, dims))
    return text(name) + u32(len(dims) if n_dims is None else n_dims) + shape + u32(type_id) + u64(offset)


def gguf_bytes(
    pairs: Sequence[bytes] = (),
    infos: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_tensors: int | None = None,
    n_pairs: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A whole file: header, padding to `alignment`, data. Counts are those of the lists unless given."""
    counts = u64(len(infos) if n_tensors is None else n_tensors) + u64(len(pairs) if n_pairs is None else n_pairs)
    head = magic + u32(version) + counts + b"".join(pairs) + b"".join(infos)
    return head + b"\0" * (-len(head) % alignment) + data


def small_file() -> bytes:
    """A sound file with every kind of entry and three tensors: F32 [3, 4], Q8_0 [2, 32], Q4_1 [1, 64]."""
    pairs = [
        pair("general.architecture", 8, text("llama")),
        pair("general.alignment", 4, u32(32)),
        pair("tokenizer.ggml.tokens", 9, array(8, 3, text("a") + text("é") + text(""))),
        pair("tokenizer.ggml.scores", 9, array(6, 3, struct.pack("<3f", 0.0, -1.0, 2.5))),
        pair("a.bool", 7, b"\x01"),
        pair("a.bools", 9, array(7, 2, b"\x01\x00")),
        pair("a.double", 12, struct.pack("<d", 0.1)),
        pair("an.empty.list", 9, array(5, 0, b"")),
    ]
    infos = [info("norm", [4, 3], 0, 0), info("head", [32, 2], 8, 64), info("blk.0.ffn", [64, 1], 3, 160)]
    norm = struct.pack("<12f", *range(12)) + b"\0" * 16
    head = (struct.pack("<e", 0.5) + bytes(range(32))) * 2 + b"\0" * 28
    ffn = (struct.pack("<2e", 0.25, -1.0) + bytes(range(16))) * 2
    return gguf_bytes(pairs, infos, norm + head + ffn)
