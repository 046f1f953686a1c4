"""Pictures in a palette: the same picture, in every way of writing rows that PNG has."""

import struct
import zlib

import numpy as np
import pytest

from nanokit.lab.palette import SIGNATURE, smaller


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def written(pixels: np.ndarray, filters: list[int]) -> bytes:
    """A PNG of uint8 [height, width, channels], each row by its filter: the specification's formulas, byte by byte."""
    height, width, channels = pixels.shape
    flat = pixels.reshape(height, -1).astype(int)
    raw = bytearray()
    for y, kind in enumerate(filters):
        raw.append(kind)
        for x in range(width * channels):
            left = flat[y, x - channels] if x >= channels else 0
            up = flat[y - 1, x] if y else 0
            corner = flat[y - 1, x - channels] if y and x >= channels else 0
            p = left + up - corner
            near = [abs(p - left), abs(p - up), abs(p - corner)]
            paeth = (left, up, corner)[near.index(min(near))]
            raw.append((flat[y, x] - (0, left, up, (left + up) // 2, paeth)[kind]) % 256)
    header = struct.pack(">IIBBBBB", width, height, 8, 6 if channels == 4 else 2, 0, 0, 0)
    body = zlib.compress(bytes(raw), 0)
    parts = [(b"IHDR", header), (b"IDAT", body[:50]), (b"IDAT", body[50:]), (b"IEND", b"")]
    return SIGNATURE + b"".join(chunk(*part) for part in parts)


def shown(png: bytes) -> np.ndarray:
    """RGBA of a palette picture as `smaller` writes it, checksums included."""
    found, at = {}, len(SIGNATURE)
    while at < len(png):
        (size,) = struct.unpack_from(">I", png, at)
        name, data = png[at + 4 : at + 8], png[at + 8 : at + 8 + size]
        assert png[at : at + 12 + size] == chunk(name, data)
        found[name] = data
        at += 12 + size
    width, height, depth, kind = struct.unpack(">IIBB", found[b"IHDR"][:10])
    assert (depth, kind) == (8, 3)
    rows = np.frombuffer(zlib.decompress(found[b"IDAT"]), np.uint8).reshape(height, width + 1)
    assert not rows[:, 0].any()
    colours = np.frombuffer(found[b"PLTE"], np.uint8).reshape(-1, 3)
    return np.concatenate([colours, np.frombuffer(found[b"tRNS"], np.uint8)[:, None]], axis=1)[rows[:, 1:]]


@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize("kind", range(5))
def test_few_colours_stay_as_they_are(channels: int, kind: int) -> None:
    """A filter undone wrongly shears the picture; a first row or column is where that goes unseen."""
    noise = np.random.default_rng(kind)
    colours = noise.integers(0, 256, (40, channels), dtype=np.uint8)
    pixels = colours[noise.integers(0, 40, (30, 40))]
    found = shown(smaller(written(pixels, [kind, *[(kind + y) % 5 for y in range(29)]])))
    assert np.array_equal(found[..., :channels][found[..., 3] > 0], pixels[found[..., 3] > 0])
    assert channels == 4 or (found[..., 3] == 255).all()


def test_many_colours_are_rounded_a_little_and_nothing_invisible_counts() -> None:
    noise = np.random.default_rng(9)
    pixels = np.full((60, 60, 4), 127, np.uint8)
    pixels[..., 3] = noise.integers(0, 256, (60, 60))  # the shades of grey letters on a transparent ground
    pixels[:10, ..., :3] = noise.integers(0, 256, (10, 60, 3))
    pixels[:10, ..., 3] = 0
    found = shown(smaller(written(pixels, [0] * 60)))
    seen = found[..., 3] > 0
    assert np.abs(found[seen].astype(int) - pixels[seen]).max() <= 4
    assert not found[:10].any()


def test_what_is_no_such_picture_is_left_alone() -> None:
    grey = SIGNATURE + chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)) + chunk(b"IDAT", b"")
    assert smaller(grey) == grey
