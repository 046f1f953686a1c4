"""The noise's experiment: one and the same step, timed again and again. Whatever differs is not the code.

Three things are looked at: the first steps of an engine that has just been loaded, steps after a pause, and steps
that follow each other at once. The last ones are then compared with themselves, as one would compare two programs A and
B: some of them are called A, others B, and their ratio should be 1. How far it is from 1 is the noise floor: a
difference smaller than that cannot be told from none.
"""

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nanokit.lab.bench.timing import milliseconds
from nanokit.lab.bench.verify_cost import Context
from nanokit.lab.engines import engine_for
from nanokit.lab.experiments.roofline import RooflineParams
from nanokit.lab.lock import measuring
from nanokit.lab.progress import Progress, Silent, stop_if
from nanokit.lab.result import Result

FIRST = 20  # steps of a fresh engine that are kept apart
RESTED = 20  # steps after a pause
PAUSE_S = 0.05  # longer than waiting threads spin before they sleep
BLOCK = 10  # steps of A, and of B, in one comparison
LEAST_FOR_TENTHS = 10

Middle = Callable[[Sequence[float]], float]


@dataclass(frozen=True)
class NoiseResult(Result):
    """Series `first_ms`, `rested_ms`, `same_ms`, and of each way of comparing the ratios `ratio_<way>`."""


def noise(p: RooflineParams, *, progress: Progress | None = None, cancel: threading.Event | None = None) -> NoiseResult:
    """Time one step of a fresh engine at the first context length: its first times, then after pauses, then at once.

    Raises StoppedError when cancelled, BusyError while something else is measured, and what `nanokit.load` raises.
    """
    progress = progress or Silent()
    with measuring("the noise"):
        progress.start(3, "loading the model")
        ctx = p.ctx[0]
        engine_for.cache_clear()  # a step of an engine that has run before is not a first one
        engine = engine_for(p.model, p.activations, p.kv_format)
        context = Context(engine, ctx, 1)

        def step() -> float:
            stop_if(cancel)
            return milliseconds(lambda: context.verify(1))

        try:
            first = [step() for _ in range(FIRST)]
            context.fill()
            progress.step("after pauses")
            rested = [_after_a_pause(step) for _ in range(RESTED)]
            progress.step("at once")
            for _ in range(FIRST):
                step()
            same = [step() for _ in range(p.same_steps)]
        finally:
            context.close()
    samples = {"first_ms": first, "rested_ms": rested, "same_ms": same, **comparisons(same)}
    settings = {"model": engine.model.name, "activations": engine.model.activations, "steps_compared": BLOCK}
    return NoiseResult(p, _metrics(samples), samples, settings)


def _after_a_pause(step: Callable[[], float]) -> float:
    time.sleep(PAUSE_S)
    return step()


def comparisons(same: Sequence[float]) -> dict[str, list[float]]:
    """Ratios of BLOCK steps to BLOCK others of one series, by three ways of measuring, each over 2 * BLOCK steps.

    ratio_means_in_sequence: the first half against the second, means. ratio_medians_in_sequence: medians.
    ratio_medians_in_turns: every second step against the ones between, medians.
    """
    spans = [same[at : at + 2 * BLOCK] for at in range(0, len(same) - 2 * BLOCK + 1, 2 * BLOCK)]
    return {
        "ratio_means_in_sequence": [_ratio(statistics.fmean, s[:BLOCK], s[BLOCK:]) for s in spans],
        "ratio_medians_in_sequence": [_ratio(statistics.median, s[:BLOCK], s[BLOCK:]) for s in spans],
        "ratio_medians_in_turns": [_ratio(statistics.median, s[::2], s[1::2]) for s in spans],
    }


def _ratio(middle: Middle, a: Sequence[float], b: Sequence[float]) -> float:
    return middle(a) / middle(b)


def floor(ratios: Sequence[float]) -> float:
    """The distance from 1 that nine of ten ratios keep; of fewer than ten ratios, the largest."""
    distances = [abs(ratio - 1) for ratio in ratios]
    return max(distances) if len(distances) < LEAST_FOR_TENTHS else statistics.quantiles(distances, n=10)[-1]


def _metrics(samples: dict[str, list[float]]) -> dict[str, float]:
    usual = statistics.median(samples["same_ms"])
    metrics = {
        "same_step_ms": usual,
        "same_step_min_ms": min(samples["same_ms"]),
        "first_step_vs_usual": samples["first_ms"][0] / usual,
        "rested_step_vs_usual": statistics.median(samples["rested_ms"]) / usual,
    }
    return metrics | {f"floor_{name}": floor(values) for name, values in samples.items() if name.startswith("ratio_")}
