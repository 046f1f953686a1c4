"""Other programs on the same file, in the same run: what they have to offer, and which of our figures they meet.

    transformers    the file's weights dequantized by transformers itself, fp32
    llama-cpp       llama-cpp-python on the file as it is, and on a Q4_0 copy of a Q4_1 file: its Q4_0 kernels are
                    repacked and up to twice as fast, so that only both together are a fair comparison. nanokit then
                    runs on the Q4_0 copy too.

Both get as many threads as nanokit, the same token ids, and only the last row's logits. Neither is a dependency: a
peer that is not installed is an error that says how to get it, never a column that is silently missing.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from nanokit.engine.load import LoadedEngine
from nanokit.lab.bench.limit import BenchError
from nanokit.lab.bench.timing import WARM, Samples, milliseconds

SHORT = 64  # tokens of a prompt that warms up
PEERS = ("transformers", "llama-cpp")
MODULES = {"transformers": "transformers", "llama-cpp": "llama_cpp"}
INSTALL = {
    "transformers": "pip install transformers",
    "llama-cpp": 'CMAKE_ARGS="-DGGML_NATIVE=on" pip install llama-cpp-python --no-binary llama-cpp-python '
    "(compiles for some minutes)",
}


class Peer(Protocol):
    """Another engine. ids: the prompt, the same that nanokit gets."""

    name: str  # as in metric names: vs_<name>

    def prefill(self, ids: Sequence[int]) -> None:
        """Compute a prompt from nothing, up to the id of the most likely next token."""
        ...

    def begin(self, ids: Sequence[int]) -> None:
        """Be ready to decode after ids; what was computed for the same ids before may be kept."""
        ...

    def step(self) -> None:
        """Decode one token greedily."""
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...


@dataclass(frozen=True)
class Rival:
    """A peer and the nanokit engine it is compared with: the one that is measured anyway (None), or one on its file."""

    peer: Peer
    engine: LoadedEngine | None = None


def check_installed(names: Sequence[str]) -> None:
    """Raise BenchError for a peer that cannot be imported, before anything is loaded."""
    for name in names:
        if find_spec(MODULES[name]) is None:
            raise BenchError(
                f"the peer {name} is not installed",
                found=f"no Python package {MODULES[name]}",
                needed="the package in this environment",
                do=INSTALL[name],
            )


def open_rivals(names: Sequence[str], file: Path, like: LoadedEngine, threads: int, longest: int) -> list[Rival]:
    """Load the peers. like: the engine that is measured; longest: tokens of context. Raises BenchError."""
    rivals: list[Rival] = []
    if "transformers" in names:
        from nanokit.lab.bench.peer_transformers import TransformersPeer

        rivals.append(Rival(TransformersPeer(file, threads)))
    if "llama-cpp" in names:
        from nanokit.lab.bench.peer_llamacpp import LlamaCppPeer
        from nanokit.lab.bench.requantize import main_type, q4_0_copy

        own = main_type(file)
        rivals.append(Rival(LlamaCppPeer(file, own, threads, longest)))
        if own == "Q4_1":
            copy = q4_0_copy(file)
            rivals.append(Rival(LlamaCppPeer(copy, "Q4_0", threads, longest), _engine_like(like, copy)))
    return rivals


def _engine_like(engine: LoadedEngine, file: Path) -> LoadedEngine:
    from nanokit.lab.bench.workload import load_for

    sizes = engine.config
    return load_for(
        str(file),
        ctx=sizes.max_context,
        max_seqs=sizes.max_seqs,
        activations=engine.model.activations,
        kv_format=engine.kv.kv_format,
    )


def decode_visit(peer: Peer, ids: Sequence[int], steps: int) -> list[float]:
    """Milliseconds of `steps` decoded tokens after ids, and after `WARM` untimed ones."""
    peer.begin(ids)
    for _ in range(WARM):
        peer.step()
    return [milliseconds(peer.step) for _ in range(steps)]


def prefill_visit(peer: Peer, ids: Sequence[int]) -> list[float]:
    """Milliseconds of one prompt, after an untimed short one that wakes the threads."""
    peer.prefill(ids[:SHORT])
    return [milliseconds(lambda: peer.prefill(ids))]


def against_peers(samples: Samples, own: str, first: int) -> dict[str, float]:
    """How many times as fast as each peer we are, as ratios of medians: `vs_<peer>` at the setting `first`, and
    `vs_<peer>_at_<setting>` at others.

    samples: `peer_<peer>_ms_at_<setting>` against `beside_<peer>_ms_at_<setting>` (nanokit on the peer's file) where
    that is there, else against `<own>_ms_at_<setting>`.
    """
    ratios = {}
    for series in samples:
        if series.startswith("peer_"):
            peer, _, setting = series.removeprefix("peer_").partition("_ms_at_")
            beside = f"beside_{peer}_ms_at_{setting}"
            ours = samples[beside if beside in samples else f"{own}_ms_at_{setting}"]
            ending = "" if setting == str(first) else f"_at_{setting}"
            ratios[f"vs_{peer}{ending}"] = statistics.median(samples[series]) / statistics.median(ours)
    return ratios
