"""What memory allows: the bytes a decoded token has to read, and how fast this machine reads exactly those.

    share_of_limit = tok/s * bytes per token / streaming speed

The streaming speed is that of a loop which reads the engine's own packed weights in order, with the engine's own
threads, and only xors them: same bytes, same pages, same cores, no arithmetic worth naming. Decoding cannot be faster
than that, so a share above 1 is a fault of the measurement and ends it. Rejected: a bandwidth measured elsewhere (on
other pages, by another program), whose share may come out above 1 or flatter the code by a quarter.

A backend that cannot stream its weights (the reference in torch) is held against a buffer of as many bytes.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch

from nanokit.engine.load import LoadedEngine
from nanokit.errors import NanokitError
from nanokit.lab.bench.timing import milliseconds


class BenchError(NanokitError):
    """A benchmark contradicts itself, or what it should run is not there."""


@runtime_checkable
class Streams(Protocol):
    """A model that can read its weights without computing."""

    bytes_per_token: int  # read for one decoded token, head included

    def stream(self) -> float:
        """Read them all once; seconds."""
        ...


def bytes_per_token(engine: LoadedEngine) -> int:
    """Bytes of weights that one decoded token reads, head included, as the engine holds them."""
    model = engine.model
    return model.bytes_per_token if isinstance(model, Streams) else model.footprint.per_token_dense


def reader(engine: LoadedEngine) -> Callable[[], float]:
    """A function that streams `bytes_per_token` once and returns GB/s (1e9 bytes)."""
    model = engine.model
    if isinstance(model, Streams):
        size, stream = model.bytes_per_token, model.stream
        return lambda: size / stream() / 1e9
    buffer = torch.ones(bytes_per_token(engine) // 4, dtype=torch.float32, device="cpu")

    def read() -> float:
        fastest = min(milliseconds(lambda: torch.dot(buffer, buffer)), milliseconds(buffer.sum))
        return buffer.nbytes / fastest / 1e6

    return read


def share_of_limit(tok_per_s: float, token_bytes: float, stream_gb_s: float, what: str = "decoding") -> float:
    """The part of the streaming speed that decoding reaches. Raises BenchError when it is above 1."""
    share = tok_per_s * token_bytes / (stream_gb_s * 1e9)
    if share > 1:
        raise BenchError(
            f"{what} looks faster than memory allows, so one of the two was measured wrongly",
            found=f"{tok_per_s:.4g} tok/s x {token_bytes:,} bytes = {tok_per_s * token_bytes / 1e9:.3g} GB/s, "
            f"{share:.2f} of the {stream_gb_s:.3g} GB/s of streaming",
            needed="a share of at most 1",
            do="measure again while nothing else runs; if it stays so, bytes_per_token counts bytes that are not read",
        )
    return share
