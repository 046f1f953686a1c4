"""What memory allows: the bytes a decoded token has to read, and how fast this machine reads exactly those.

    share_of_limit = tok/s * bytes per token / streaming speed

The streaming speed is that of a loop which reads the engine's own weights in order, with the engine's own threads, and
does next to nothing with them (the C kernels xor, the reference adds up): same bytes, same pages, same cores. Decoding
cannot be faster than that, so a share above 1 is a fault of the measurement and ends it. Only where something else was
using the machine, so that the times themselves vary by more than that, it is a remark beside those that say so: two
medians of such times may stand to each other anyhow. Rejected: a bandwidth measured
elsewhere (on other pages, by another program), whose share may come out above 1 or flatter the code by a quarter.
"""

from collections.abc import Callable

from nanokit.engine.load import LoadedEngine
from nanokit.errors import NanokitError


class BenchError(NanokitError):
    """A benchmark contradicts itself, or what it should run is not there."""


def reader(engine: LoadedEngine) -> Callable[[], float]:
    """A function that streams the model's `bytes_per_token` once and returns GB/s (1e9 bytes)."""
    size, stream = engine.model.bytes_per_token, engine.model.stream
    return lambda: size / stream() / 1e9


def doubts(*shares: float) -> list[str]:
    """A remark when one of the shares of the limit is above 1."""
    if max(shares) <= 1:
        return []
    return ["decoding looks faster than memory allows: the two were not measured on equal terms; run again"]


def share_of_limit(
    tok_per_s: float, token_bytes: float, stream_gb_s: float, what: str = "decoding", *, disturbance: float = 1.0
) -> float:
    """The part of the streaming speed that decoding reaches. Raises BenchError when it is above 1, and above
    disturbance: how many-fold the times vary, see `steadiness.disturbance`."""
    share = tok_per_s * token_bytes / (stream_gb_s * 1e9)
    if share > disturbance:
        raise BenchError(
            f"{what} looks faster than memory allows, so one of the two was measured wrongly",
            found=f"{tok_per_s:.4g} tok/s x {token_bytes:,} bytes = {tok_per_s * token_bytes / 1e9:.3g} GB/s, "
            f"{share:.2f} of the {stream_gb_s:.3g} GB/s of streaming",
            needed="a share of at most 1",
            do="measure again while nothing else runs; if it stays so, bytes_per_token counts bytes that are not read",
        )
    return share
