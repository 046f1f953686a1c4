"""Decoding several sequences at once: the tokens of all of them in a second, against one sequence alone.

The weights are read once a step, whatever the number of rows: what a further sequence costs is its own attention, and
arithmetic that the memory would have waited for anyway.
"""

import statistics
import threading
from dataclasses import dataclass
from typing import ClassVar

from nanokit.engine.load import LoadedEngine
from nanokit.errors import ParameterError
from nanokit.lab.bench.common import BenchParams, BenchResult, prepared, settings
from nanokit.lab.bench.timing import Samples, Visit
from nanokit.lab.bench.workload import Session, context_for
from nanokit.lab.params import experiment_params, knob
from nanokit.lab.progress import Progress
from nanokit.lab.steadiness import remarks


@experiment_params
class BatchParams(BenchParams):
    """How many sequences, at which context length."""

    sequences: list[int] = knob(
        [], "sequences at once, the first is the reference", unit="sequences", low=1, high=1024,
        by_preset={"smoke": [1, 4], "quick": [1, 2, 4, 8, 16], "full": [1, 2, 4, 8, 16]},
    )  # fmt: skip
    ctx: int = knob(64, "context length of each", unit="tokens", low=16, high=1 << 20)
    steps: int = knob(12, "timed steps of a number of sequences in each round", unit="steps", low=2, high=512)

    def check(self) -> None:
        if len(set(self.sequences)) < len(self.sequences):
            raise ParameterError("a number of sequences stands twice", found=self.sequences, needed="different ones")


@dataclass(frozen=True)
class BatchResult(BenchResult):
    """Series `step_ms_with_<sequences>`."""

    kind: ClassVar[str] = "batch"


def batch(
    p: BatchParams,
    *,
    engine: LoadedEngine | None = None,
    progress: Progress | None = None,
    cancel: threading.Event | None = None,
) -> BatchResult:
    """Time steps of several sequences. engine: instead of the one that p names. Raises as `decode.decode` does."""
    longest, most = context_for(p.ctx, p.steps), max(p.sequences)
    with prepared("batch", p, engine, ctx=longest, max_seqs=most, progress=progress, cancel=cancel) as bench:
        visits = {f"{count} sequences": _visit(Session(bench.engine, p.ctx, count), p.steps) for count in p.sequences}
        turns = bench.rounds.run(visits)
        held = dict(settings(bench))
    notes = [*turns.remarks, *remarks(turns.samples)]
    return BatchResult(p, figures(p, turns.samples), turns.samples, held, remarks=notes)


def _visit(session: Session, steps: int) -> Visit:
    def visit() -> Samples:
        with session.filled(steps):
            return {f"step_ms_with_{session.sequences}": [session.step() for _ in range(steps)]}

    return visit


def figures(p: BatchParams, samples: Samples) -> dict[str, float]:
    """The metrics of the samples; see `schema` for their names. tok_per_s is that of the first number of sequences."""
    speed = {n: n * 1e3 / statistics.median(samples[f"step_ms_with_{n}"]) for n in p.sequences}
    first = speed[p.sequences[0]]
    metrics = {"tok_per_s": first}
    for count, tok_per_s in speed.items():
        metrics[f"tok_per_s_with_{count}"] = tok_per_s
    for count in p.sequences[1:]:
        metrics[f"ratio_to_first_with_{count}"] = speed[count] / first
    return metrics
