"""One product under sliders: weight format, shape, rows and activation mode, by every backend that can run here.

Errors first, since they mean the same wherever the kernels run: how far each output is from the product of the same
codes in fp64, as a part of the bound that the kernels keep to (lab/oracle.py). Then times, of those that are meant to
be fast; the one matrix stays in a cache if it fits there.
"""

import statistics
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nanokit.kernels.activations import MODES
from nanokit.lab.bench.timing import PAUSE_S, Rounds, Samples
from nanokit.lab.experiments.gains import NO_SPEED, walk
from nanokit.lab.experiments.kernel_params import check_columns
from nanokit.lab.lock import measuring
from nanokit.lab.oracle import FORMATS, bound, matrix, same_codes
from nanokit.lab.params import Params, experiment_params, knob
from nanokit.lab.progress import Progress, Silent
from nanokit.lab.result import Result
from nanokit.lab.sides import Side, interpreted, missing, sides
from nanokit.lab.steadiness import remarks
from nanokit.lab.table import Table

BUDGET_S = {"smoke": 1.0, "quick": 3.0, "full": float("inf")}
CALLS = 5  # of each in a round
PEAK = 2.5  # of static activations


@experiment_params
class BackendsParams(Params):
    """A matrix, and what it is multiplied with."""

    weights: str = knob("int4-asym-g32", "weight format", choices=FORMATS)
    outputs: int = knob(64, "rows of the matrix", unit="outputs", low=1, high=2048)
    columns: int = knob(576, "columns of the matrix", unit="columns", low=32, high=2048, step=32)
    rows: int = knob(4, "rows of activations", unit="rows", low=1, high=64)
    activations: str = knob("a8g32", "activation mode", choices=MODES[1:])
    repeats: int = knob(0, "rounds", low=2, high=50, by_preset={"smoke": 2, "quick": 5, "full": 15})

    def check(self) -> None:
        check_columns(self.columns)


@dataclass(frozen=True)
class BackendsResult(Result):
    """Series `error_of_bound_<backend>`: the largest of each row; and `<backend>_ms`, where times mean anything."""

    def table(self) -> Table:
        """A backend a row."""
        m, rows = self.metrics, []
        for name in self.settings["backends"]:
            time = f"{m[f'{name}_ms']:.3f} ms" if f"{name}_ms" in m else NO_SPEED
            codes = "yes" if m[f"codes_equal_{name}"] else "no"
            bits = 8 * m[f"bytes_{name}"] / m["weights"]
            rows.append((name, f"{m[f'error_of_bound_{name}']:.2%}", codes, f"{bits:.2f}", time))
        columns = ("backend", "largest error, of its bound", "codes of the contract", "bits a weight", "a product")
        return Table(columns, rows, right=columns[1:])


def backends(
    p: BackendsParams, *, progress: Progress | None = None, cancel: threading.Event | None = None
) -> BackendsResult:
    """Compute the product in every backend, then time it. Raises StoppedError when cancelled, and BusyError."""
    progress = progress or Silent()
    with measuring("backends"), torch.inference_mode():
        progress.start(1, "multiplying")
        weights = matrix(p.weights, p.outputs, p.columns)
        x = torch.randn(p.rows, p.columns, generator=torch.Generator().manual_seed(0))
        peak = PEAK if p.activations == "static" else None
        exact, allowed = bound(weights, x, p.activations, peak)
        there = sides(weights)
        metrics: dict[str, float] = {"weights": p.outputs * p.columns}
        samples: Samples = {}
        for side in there:
            found = side.multiply(x, p.activations, peak)
            samples[f"error_of_bound_{side.name}"] = ((found - exact).abs() / allowed).amax(dim=1).tolist()
            metrics[f"error_of_bound_{side.name}"] = max(samples[f"error_of_bound_{side.name}"])
            metrics[f"codes_equal_{side.name}"] = same_codes(side, x, p.activations, peak)
            metrics[f"bytes_{side.name}"] = side.nbytes
        visits = {side.name: _visit(side, p) for side in there if side.timed}
        turns = Rounds(p.repeats, BUDGET_S[p.preset], PAUSE_S, progress=progress, cancel=cancel).run(visits)
    metrics |= {name: statistics.median(values) for name, values in turns.samples.items()}
    settings = {
        "backends": [side.name for side in there], "missing": missing(), "triton_interpreted": interpreted(),
    }  # fmt: skip
    return BackendsResult(
        p, metrics, samples | turns.samples, settings, remarks=[*turns.remarks, *remarks(turns.samples)]
    )


def _visit(side: Side, p: BackendsParams) -> Callable[[], Samples]:
    multiply = walk([side], p.activations, p.rows)

    def visit() -> Samples:
        multiply()
        return {f"{side.name}_ms": [multiply() for _ in range(CALLS)]}

    return visit
