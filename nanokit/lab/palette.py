"""PNG pictures of figures in a palette: a tenth of the bytes that a browser's screenshot takes.

A figure has few colours, and thousands of shades of them where lines and letters meet a transparent ground. Rounding
each channel to a few levels leaves fewer than 256, which fit a byte a pixel; how many levels is tried from many to
few. Committed notebooks hold every figure, so their size is the repository's. Rejected: an imaging library as a
dependency for this one step.
"""

import struct
import zlib

import numpy as np

SIGNATURE = b"\x89PNG\r\n\x1a\n"
LEVELS = (256, 64, 32, 16, 8, 6, 4)  # of each channel; what does not fit is rounded more coarsely
COLOURS = 256


def smaller(png: bytes) -> bytes:
    """The same picture with at most 256 colours; as it is when it is no 8-bit RGB(A) picture, or would not get smaller.

    png: a whole PNG file, not interlaced, as browsers write it.
    """
    chunks = _chunks(png)
    width, height, depth, kind, _, _, interlaced = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    if depth != 8 or kind not in (2, 6) or interlaced:
        return png
    pixels = _pixels(zlib.decompress(chunks[b"IDAT"]), width, height, channels=3 if kind == 2 else 4)
    colours, indices = _palette(pixels)
    rows = np.zeros((height, width + 1), np.uint8)  # each row begins with its filter: none
    rows[:, 1:] = indices.reshape(height, width)
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", colours[:, :3].tobytes()),
        (b"tRNS", colours[:, 3].tobytes()),
        (b"IDAT", zlib.compress(rows.tobytes(), 9)),
        (b"IEND", b""),
    ]
    made = SIGNATURE + b"".join(_chunk(name, data) for name, data in parts)
    return min(made, png, key=len)


def _chunks(png: bytes) -> dict[bytes, bytes]:
    """Contents by name; those of one name joined."""
    found: dict[bytes, bytes] = {}
    at = len(SIGNATURE)
    while at < len(png):
        (size,) = struct.unpack_from(">I", png, at)
        name = png[at + 4 : at + 8]
        found[name] = found.get(name, b"") + png[at + 8 : at + 8 + size]
        at += 12 + size
    return found


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _pixels(raw: bytes, width: int, height: int, channels: int) -> np.ndarray:
    """RGBA uint8 [height * width, 4] of filtered rows (PNG specification, section 9)."""
    lines = np.frombuffer(raw, np.uint8).reshape(height, 1 + width * channels)
    out = np.zeros((height, width, channels), np.uint8)
    above = np.zeros((width, channels), np.uint8)
    for y, line in enumerate(lines):
        row = line[1:].reshape(width, channels)
        out[y] = above = _unfiltered(int(line[0]), row, above)
    if channels == 3:
        out = np.concatenate([out, np.full((height, width, 1), 255, np.uint8)], axis=2)
    return out.reshape(-1, 4)


def _unfiltered(kind: int, row: np.ndarray, above: np.ndarray) -> np.ndarray:
    if kind == 0:
        return row
    if kind == 1:
        return np.cumsum(row, axis=0, dtype=np.uint8)
    if kind == 2:
        return row + above
    left, corner = [0] * row.shape[1], [0] * row.shape[1]
    out = []
    for delta, up in zip(row.tolist(), above.tolist(), strict=True):
        if kind == 3:
            left = [(d + (a + b) // 2) & 255 for d, a, b in zip(delta, left, up, strict=True)]
        else:
            left = [(d + _paeth(a, b, c)) & 255 for d, a, b, c in zip(delta, left, up, corner, strict=True)]
        corner = up
        out.append(left)
    return np.array(out, np.uint8)


def _paeth(left: int, up: int, corner: int) -> int:
    guess = left + up - corner
    return min((left, up, corner), key=lambda value: abs(guess - value))


def _palette(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Colours uint8 [n, 4], n at most COLOURS, and the index of each pixel's."""
    for levels in LEVELS:
        step = 255 / (levels - 1)
        rounded = np.rint(np.rint(pixels / step) * step).astype(np.uint8)
        rounded[rounded[:, 3] == 0] = 0  # what cannot be seen needs no colour
        found, indices = np.unique(rounded.view(np.uint32), return_inverse=True)
        if len(found) <= COLOURS:
            break
    return found[:, None].view(np.uint8), indices.astype(np.uint8)
