"""What all benchmarks share: how they are asked, what they return, and the order of preparation.

Params and Result are those of the kit's experiments, so that a notebook's panel, its record and the command line come
from the same dataclass.
"""

import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from nanokit.engine.load import LoadedEngine
from nanokit.errors import ParameterError
from nanokit.kernels.cpu.team import thread_count
from nanokit.lab.bench.peers import PEERS, Rival, check_installed, open_rivals
from nanokit.lab.bench.timing import PAUSE_S, Rounds, spread
from nanokit.lab.bench.workload import check_engine, load_for
from nanokit.lab.lock import measuring
from nanokit.lab.params import Params, experiment_params, knob
from nanokit.lab.progress import Progress, Silent
from nanokit.lab.result import Result, figure
from nanokit.lab.table import Table

# Seconds after which no further round is begun; each peer adds as much again.
BUDGET_S = {"smoke": 6.0, "quick": 20.0, "full": math.inf}


@experiment_params
class BenchParams(Params):
    """Which engine is measured, and how often."""

    model: str = knob("", "GGUF file, folder of safetensors or hub name; empty is the default model")
    activations: str = knob("", "activation mode; empty is the engine's own choice")
    kv_format: str = knob("", "format of the KV pages; empty is the engine's own choice")
    policy: str = knob("", "what the weights are quantized to; empty runs them as they are stored")
    repeats: int = knob(0, "rounds", low=2, high=1000, by_preset={"smoke": 2, "quick": 5, "full": 15})


@experiment_params
class PeerParams(BenchParams):
    """With other programs in the same run."""

    peer: list[str] = knob([], "other programs to compare with", choices=PEERS)


@dataclass(frozen=True)
class BenchResult(Result):
    """A Result whose samples have a spread. Metrics without a suffix belong to the first of several settings."""

    kind: ClassVar[str]

    @property
    def spread(self) -> dict[str, dict[str, float]]:
        """min, median, max and n of every series."""
        return {name: spread(values) for name, values in self.samples.items()}

    def figures(self) -> dict[str, Any]:
        """The metrics as the JSON has them; a kind may add maps."""
        return dict(self.metrics)

    def spread_table(self) -> Table:
        """One row a series."""
        rows = [
            (name, *(figure(found[key]) for key in ("min", "median", "max", "n")))
            for name, found in self.spread.items()
        ]
        return Table(("series", "min", "median", "max", "n"), rows, right=("min", "median", "max", "n"))

    def table(self) -> Table:
        """One row a metric."""
        return Table(("figure", "value"), [(n, figure(v)) for n, v in self.metrics.items()], right=("value",))


@dataclass(frozen=True)
class Bench:
    """What is ready to be measured."""

    engine: LoadedEngine
    rivals: tuple[Rival, ...]
    rounds: Rounds


@contextmanager
def prepared(
    kind: str,
    p: BenchParams,
    engine: LoadedEngine | None,
    *,
    ctx: int,
    max_seqs: int = 1,
    peer: tuple[str, ...] = (),
    progress: Progress | None = None,
    cancel: threading.Event | None = None,
) -> Iterator[Bench]:
    """Take the measurement lock, load what is not handed in, and give peers back at the end.

    ctx: the longest context that will be reached. Raises BusyError, BenchError for a peer that is not there,
    ParameterError for an engine that does not suit, and what `nanokit.load` raises.
    """
    check_installed(peer)
    if p.policy and (peer or engine is not None):
        raise ParameterError(
            "a policy would measure other weights than those beside it",
            found=f"policy {p.policy!r} with " + ("other programs" if peer else "an engine that is loaded already"),
            do="write the quantized model first (nanokit quantize) and name that file, or leave one of them out",
        )
    progress = progress or Silent()
    with measuring(f"bench {kind}"), ExitStack() as closing:
        progress.start(1, "loading")
        source = p.model or (_default_model() if engine is None or peer else "")
        if engine is None:
            engine = load_for(
                source, ctx=ctx, max_seqs=max_seqs, activations=p.activations, kv_format=p.kv_format, policy=p.policy
            )
        elif peer and Path(source).name != engine.model.name:
            raise ParameterError(
                "peers would run another file than nanokit",
                found=f"{Path(source).name} beside an engine of {engine.model.name}",
                do="name the engine's file in `model`",
            )
        check_engine(engine, ctx=ctx, max_seqs=max_seqs)
        rivals = open_rivals(peer, Path(source).expanduser(), engine, threads_used(engine), ctx) if peer else []
        for rival in rivals:
            closing.callback(rival.peer.close)
        budget = BUDGET_S[p.preset] * (1 + len(rivals))
        pause = PAUSE_S if rivals else 0.0
        yield Bench(engine, tuple(rivals), Rounds(p.repeats, budget, pause, progress, cancel))


def _default_model() -> str:
    from nanokit.model.fetch import resolve_default

    return str(resolve_default())


def threads_used(engine: LoadedEngine) -> int:
    """Threads that compute: of the C kernels' team, or torch's."""
    return thread_count() if engine.model.compiled else torch.get_num_threads()


def settings(bench: Bench) -> Mapping[str, Any]:
    """What held during a measurement without being a parameter."""
    engine, sizes = bench.engine, bench.engine.config
    return {
        "model": engine.model.name,
        "kernels": engine.model.kernels,
        "activations": engine.model.activations,
        "kv_format": engine.kv.kv_format,
        "kv_blocks": sizes.num_blocks,
        "block_size": sizes.block_size,
        "token_budget": sizes.token_budget,
        "threads": threads_used(engine),
        "peers": [rival.peer.name for rival in bench.rivals],
    }
