"""Task points by activation mode on the same weights and the same items, and what a token takes.

Static scales are calibrated on the calibration text, once. a16 stands for exact activations: it keeps the model's
output to within fp16 pages, on the same kernels. Two modes are compared item by item (lab/quality/tasks.py), for the
interval of each alone is far wider than that of their difference.

Time: one sequence takes another mode for each token (`Engine.update`), so that a slow moment hits all modes alike; and
one forward over a prompt in each.
"""

import statistics
import threading
from dataclasses import dataclass
from functools import partial

from nanokit.engine.load import LoadedEngine
from nanokit.engine.sampling import Sampling
from nanokit.lab.bench.timing import Rounds, Samples, Visit, in_turns, milliseconds
from nanokit.lab.bench.workload import Session
from nanokit.lab.engines import in_mode
from nanokit.lab.experiments.drift_params import DriftParams, DriftResult, fast_engine, forward, text_start
from nanokit.lab.lock import measuring
from nanokit.lab.progress import Progress, Silent, stop_if
from nanokit.lab.quality.tasks import Paired, TaskScore, paired, score
from nanokit.lab.steadiness import remarks
from nanokit.lab.table import Table

BUDGET_S = {"smoke": 2.0, "quick": 8.0, "full": float("inf")}
STEPS, CTX, PROMPT = 12, 64, 256  # decoded tokens of a round, their context, and tokens of the timed prompt
EXACT, FIXED = "a16", "static"


@dataclass(frozen=True)
class PointsResult(DriftResult):
    """`points_<mode>_<task>` with `points_low_…`, `points_high_…`; `gained_points_<mode>_over_<other>_<task>` with its
    interval, of the pairs in `PAIRS`; `ms_per_token_<mode>` and `prefill_ms_<mode>`."""

    def pair(self, mode: str, other: str, task: str) -> tuple[float, float, float]:
        """Points of mode less those of the other, and the ends of the interval of that."""
        name = f"{mode}_over_{other}_{task}"
        m = self.metrics
        return m[f"gained_points_{name}"], m[f"gained_points_low_{name}"], m[f"gained_points_high_{name}"]

    @property
    def slowdown(self) -> float:
        """Time of a decoded token with a scale for each token, over that of its neighbour with static scales: the
        median of all pairs."""
        pairs = zip(self.samples["ms_per_token_token"], self.samples[f"ms_per_token_{FIXED}"], strict=True)
        return statistics.median(a / b for a, b in pairs)

    def table(self) -> Table:
        """A mode a row: points of each task with intervals, and times."""
        m, rows = self.metrics, []
        for mode in modes_of(self.asked):
            cells = [
                f"{m[f'points_{mode}_{task}']:.1f} ({m[f'points_low_{mode}_{task}']:.0f} to "
                f"{m[f'points_high_{mode}_{task}']:.0f})"
                for task in self.asked.tasks
            ]
            rows.append((mode, *cells, f"{m[f'ms_per_token_{mode}']:.2f}", f"{1e3 / m[f'ms_per_token_{mode}']:.0f}",
                         f"{1e3 * PROMPT / m[f'prefill_ms_{mode}']:.0f}"))  # fmt: skip
        tasks = [f"{task} (points)" for task in self.asked.tasks]
        columns = ("activations", *tasks, "ms a token", "decode tok/s", "prefill tok/s")
        return Table(columns, rows, right=columns[1:])

    def differences(self) -> Table:
        """Item by item: static against exact activations, and what switching to dynamic scales gains."""
        rows = []
        for mode, other in pairs_of(self.asked):
            for task in self.asked.tasks:
                gained, low, high = self.pair(mode, other, task)
                n = self.metrics[f"items_{task}"]
                rows.append((f"{mode} less {other}", task, f"{gained:+.1f}", f"{low:+.1f} to {high:+.1f}", f"{n:.0f}"))
        return Table(("modes", "task", "points", "95 %", "items"), rows, right=("points", "95 %", "items"))


def modes_of(p: DriftParams) -> list[str]:
    """Static first, a16 last: it stands for exact activations."""
    return [FIXED, *p.scored, EXACT]


def pairs_of(p: DriftParams) -> list[tuple[str, str]]:
    """Which modes are compared with which: static with exact, then all others with static."""
    return [(FIXED, EXACT), *((mode, FIXED) for mode in modes_of(p)[1:])]


def drift_points(
    p: DriftParams, *, progress: Progress | None = None, cancel: threading.Event | None = None
) -> PointsResult:
    """Score every task in every mode, then time the modes in turns.

    Raises StoppedError when cancelled, BusyError, ParameterError for a text too short, and what `nanokit.load` raises.
    """
    progress = progress or Silent()
    metrics: dict[str, float] = {}
    scores: dict[tuple[str, str], TaskScore] = {}
    with measuring("activation drift: points"):
        progress.start(len(p.tasks) * len(modes_of(p)) + 1, "loading the model")
        engine = fast_engine(p.model)
        engine.calibrate(text_start(engine, p.calibration, p.tokens))
        for mode in modes_of(p):
            for task in p.tasks:
                stop_if(cancel)
                progress.step(f"{task} in {mode}")
                found = scores[mode, task] = score(in_mode(engine, mode), task, p.items)
                low, high = found.interval
                metrics[f"items_{task}"] = len(found.right)
                metrics[f"points_{mode}_{task}"] = found.points
                metrics |= {f"points_low_{mode}_{task}": low, f"points_high_{mode}_{task}": high}
        for mode, other in pairs_of(p):
            for task in p.tasks:
                metrics |= _paired(paired(scores[other, task], scores[mode, task]), f"{mode}_over_{other}_{task}")
        visits = {"timing": _visit(engine, modes_of(p))}
        turns = Rounds(p.repeats, BUDGET_S[p.preset], progress=progress, cancel=cancel).run(visits)
    metrics |= {name: statistics.median(values) for name, values in turns.samples.items()}
    settings = {
        "model": engine.model.name, "kernels": engine.model.kernels, "kv_format": engine.kv.kv_format,
        "calibration": f"{p.calibration}.txt, {p.tokens} tokens",
    }  # fmt: skip
    notes = [*turns.remarks, *remarks(turns.samples)]
    return PointsResult(p, metrics, turns.samples, settings, remarks=notes)


def _paired(found: Paired, name: str) -> dict[str, float]:
    low, high = found.interval
    return {
        f"gained_points_{name}": found.difference,
        f"gained_points_low_{name}": low,
        f"gained_points_high_{name}": high,
        f"p_value_{name}": found.p,
    }


def _visit(engine: LoadedEngine, modes: list[str]) -> Visit:
    """One sequence that takes another mode for each token, then a prompt in each mode."""
    session, prompt = Session(engine, CTX), text_start(engine, "evaluation", PROMPT)

    def step(mode: str) -> float:
        session.use(Sampling(activations=mode))
        return session.step()

    def visit() -> Samples:
        steps = {f"ms_per_token_{mode}": partial(step, mode) for mode in modes}
        prompts = {
            f"prefill_ms_{mode}": partial(milliseconds, partial(forward, in_mode(engine, mode), prompt))
            for mode in modes
        }
        with session.filled(STEPS * len(modes)):
            found = in_turns(steps, STEPS)
        return found | in_turns(prompts, 1)

    return visit
