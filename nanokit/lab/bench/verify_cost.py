"""What verification costs: v(rows) = T(rows) / T(1), the price of a speculation that guesses rows - 1 tokens.

T is one forward over `rows` tokens of one sequence, plus the head's argmax of every row: what a verifier of drafted
tokens asks for. The drafted tokens' keys and values go to the same slots each time, so that the context stays what its
label says. The engine's scheduler takes no part: it asks for the last row only.

A controller reads v as `read_v(document)[ctx][rows]`.
"""

import statistics
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from nanokit.engine.load import LoadedEngine
from nanokit.errors import ParameterError
from nanokit.lab.bench.common import BenchParams, BenchResult, prepared, settings
from nanokit.lab.bench.timing import Samples, Visit, in_turns, milliseconds
from nanokit.lab.bench.workload import prompt_ids
from nanokit.lab.params import experiment_params, knob
from nanokit.lab.progress import Progress
from nanokit.lab.steadiness import remarks
from nanokit.model.batch import Batch


@experiment_params
class VerifyCostParams(BenchParams):
    """Rows of one forward, and context lengths."""

    rows: list[int] = knob(
        [], "rows of a forward", unit="rows", low=1, high=512,
        by_preset={"smoke": [1, 2, 4, 8], "quick": [1, 2, 3, 4, 6, 8, 12, 16], "full": [1, 2, 3, 4, 6, 8, 12, 16]},
    )  # fmt: skip
    ctx: list[int] = knob(
        [], "context lengths, the first is the reference", unit="tokens", low=1, high=1 << 20,
        by_preset={"smoke": [64], "quick": [64, 512], "full": [64, 512]},
    )  # fmt: skip
    steps: int = knob(4, "timed forwards of each in each round", unit="forwards", low=1, high=512)

    def check(self) -> None:
        for name, values in (("rows", self.rows), ("ctx", self.ctx)):
            if len(set(values)) < len(values):
                raise ParameterError(f"{name}: a value stands twice", found=values, needed="different ones")
        if 1 not in self.rows:
            raise ParameterError("rows lacks 1, to which v is the ratio", found=self.rows, needed="1 among them")


@dataclass(frozen=True)
class VerifyCostResult(BenchResult):
    """Series `rows_<rows>_ms_at_<ctx>`."""

    kind: ClassVar[str] = "verify-cost"

    @property
    def v(self) -> dict[int, dict[int, float]]:
        """Context length -> rows -> T(rows) / T(1)."""
        p = self.params
        assert isinstance(p, VerifyCostParams)
        return {ctx: {rows: self.metrics[_name(rows, ctx)] for rows in p.rows} for ctx in p.ctx}

    def figures(self) -> dict[str, Any]:
        return {
            **self.metrics,
            "v": {str(c): {str(r): v for r, v in per_rows.items()} for c, per_rows in self.v.items()},
        }


def read_v(document: Mapping[str, Any]) -> dict[int, dict[int, float]]:
    """`v` of a JSON document of this kind, with numbers as keys again."""
    return {int(c): {int(r): float(v) for r, v in rows.items()} for c, rows in document["metrics"]["v"].items()}


def verify_cost(
    p: VerifyCostParams,
    *,
    engine: LoadedEngine | None = None,
    progress: Progress | None = None,
    cancel: threading.Event | None = None,
) -> VerifyCostResult:
    """Time forwards of several rows. engine: instead of the one that p names. Raises as `decode.decode` does."""
    most, count = max(p.rows), len(p.ctx)
    with prepared(
        "verify-cost", p, engine, ctx=max(p.ctx) + most, max_seqs=count, progress=progress, cancel=cancel
    ) as bench:
        contexts = [Context(bench.engine, ctx, most) for ctx in p.ctx]
        try:
            for context in contexts:
                context.fill()
            turns = bench.rounds.run({f"ctx {c.length}": _visit(c, p) for c in contexts})
        finally:
            for context in contexts:
                context.close()
        held = dict(settings(bench))
    notes = [*turns.remarks, *remarks(turns.samples)]
    return VerifyCostResult(p, figures(p, turns.samples), turns.samples, held, remarks=notes)


class Context:
    """`length` tokens in blocks of the engine's pool, and room for `most` more rows after them."""

    def __init__(self, engine: LoadedEngine, length: int, most: int) -> None:
        self.engine, self.length = engine, length
        self._ids = prompt_ids(engine, length + most)
        size = engine.config.block_size
        self._blocks = [engine.pool.allocate() for _ in range(-(-(length + most) // size))]

    def fill(self) -> None:
        """Compute the context."""
        most = self.engine.config.token_budget
        for start in range(0, self.length, most):
            self._forward(start, min(most, self.length - start))

    def _forward(self, start: int, rows: int) -> torch.Tensor:
        end = start + rows
        batch = Batch(self._ids[start:end], [rows], [end], [self._blocks])
        return self.engine.model.forward(batch, self.engine.kv)

    def verify(self, rows: int) -> None:
        """The forward and the head for so many rows after the context."""
        with torch.inference_mode():
            self.engine.model.head.argmax(self._forward(self.length, rows))

    def close(self) -> None:
        """Give the blocks back."""
        self.engine.pool.release(self._blocks)


def _visit(context: Context, p: VerifyCostParams) -> Visit:
    def timed(rows: int) -> Callable[[], float]:
        def once() -> float:
            return milliseconds(lambda: context.verify(rows))

        return once

    actions = {f"rows_{rows}_ms_at_{context.length}": timed(rows) for rows in p.rows}

    def visit() -> Samples:
        context.verify(max(p.rows))
        context.verify(1)
        return in_turns(actions, p.steps)

    return visit


def _name(rows: int, ctx: int) -> str:
    return f"v_ratio_of_{rows}_at_{ctx}"


def figures(p: VerifyCostParams, samples: Samples) -> dict[str, float]:
    """The metrics of the samples: T(1) in milliseconds, and v of every number of rows and context length."""
    metrics = {}
    for ctx in p.ctx:
        one = statistics.median(samples[f"rows_1_ms_at_{ctx}"])
        metrics[f"ms_of_one_row_at_{ctx}"] = one
        for rows in p.rows:
            metrics[_name(rows, ctx)] = statistics.median(samples[f"rows_{rows}_ms_at_{ctx}"]) / one
    return metrics
