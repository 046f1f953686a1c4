"""One forward under sliders: so many rows, after so long a context, in this activation mode and KV format.

One row, the rows asked for and the bare reading of the weights take turns, so that their ratios hold even where the
machine is not quiet.
"""

import statistics
import threading
from dataclasses import dataclass

from nanokit.kernels.activations import MODES
from nanokit.kernels.cpu.bound import KV_FORMATS
from nanokit.lab.bench.limit import doubts, reader
from nanokit.lab.bench.timing import Rounds, Samples, in_turns, milliseconds
from nanokit.lab.bench.verify_cost import Context
from nanokit.lab.engines import engine_for
from nanokit.lab.lock import measuring
from nanokit.lab.params import Params, experiment_params, knob
from nanokit.lab.progress import Progress, Silent
from nanokit.lab.result import Result
from nanokit.lab.steadiness import remarks

BUDGET_S = {"smoke": 2.0, "quick": 5.0, "full": float("inf")}
STEPS = 6  # of each in a round


@experiment_params
class StepParams(Params):
    """A forward, and how the engine keeps activations, keys and values."""

    model: str = knob("", "GGUF file, folder of safetensors or hub name; empty is the default model")
    rows: int = knob(8, "rows of the forward", unit="rows", low=1, high=64)
    ctx: int = knob(64, "context before them", unit="tokens", low=64, high=4096, step=64)
    activations: str = knob("a8g32", "activation mode", choices=MODES)
    kv_format: str = knob("fp16", "format of the KV pages", choices=tuple(KV_FORMATS))
    repeats: int = knob(0, "rounds", low=2, high=50, by_preset={"smoke": 2, "quick": 5, "full": 15})


@dataclass(frozen=True)
class StepResult(Result):
    """Series `one_row_ms`, `rows_ms` and `stream_ms`."""


def step_cost(p: StepParams, *, progress: Progress | None = None, cancel: threading.Event | None = None) -> StepResult:
    """Time the forward and its head against one row and against reading the weights.

    Raises StoppedError when cancelled, BusyError while something else is measured, and what `nanokit.load` raises.
    """
    progress = progress or Silent()
    with measuring("a step"):
        progress.start(1, "loading the model")
        engine = engine_for(p.model, p.activations, p.kv_format)
        size, read = engine.model.bytes_per_token, reader(engine)
        context = Context(engine, p.ctx, p.rows)
        actions = {
            "one_row_ms": lambda: milliseconds(lambda: context.verify(1)),
            "rows_ms": lambda: milliseconds(lambda: context.verify(p.rows)),
            "stream_ms": lambda: size / read() / 1e6,
        }

        def visit() -> Samples:
            context.verify(p.rows)
            context.verify(1)
            return in_turns(actions, STEPS)

        try:
            context.fill()
            rounds = Rounds(p.repeats, BUDGET_S[p.preset], progress=progress, cancel=cancel)
            turns = rounds.run({f"{p.rows} rows": visit})
        finally:
            context.close()
    median = {name: statistics.median(values) for name, values in turns.samples.items()}
    metrics = {
        **median,
        "bytes_per_token": size,
        "v_ratio": median["rows_ms"] / median["one_row_ms"],
        "row_tok_per_s": p.rows * 1e3 / median["rows_ms"],
        "one_row_share": median["stream_ms"] / median["one_row_ms"],
        "stream_gb_s": size / median["stream_ms"] / 1e6,
    }
    settings = {"model": engine.model.name, "compiled": engine.model.compiled}
    notes = [*turns.remarks, *remarks(turns.samples), *doubts(metrics["one_row_share"])]
    return StepResult(p, metrics, turns.samples, settings, remarks=notes)
