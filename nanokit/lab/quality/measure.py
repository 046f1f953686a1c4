"""Quality of weight policies in one setting: divergence, tasks, bytes and time, by one run.

Quality belongs to a setting: context length, batch, activations, KV format and page layout are the same for all
policies of a run and stand beside the figures. All divergences are to one reference (`quality/reference.py`), the
policy "keep" included: it shows what activations and pages alone cost.

Time is that of a decoded token, as `nanokit bench decode` takes it, all policies in turns. Their engines are therefore
in memory together; divergences come one after the other.
"""

import statistics
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nanokit.engine.load import LoadedEngine, load
from nanokit.errors import ParameterError
from nanokit.lab.bench.common import BUDGET_S, threads_used
from nanokit.lab.bench.timing import Rounds, Samples, Visit
from nanokit.lab.bench.workload import Session, context_for
from nanokit.lab.lock import measuring
from nanokit.lab.progress import Progress, Silent, stop_if
from nanokit.lab.quality.divergence import compare_engine, engine_floor, reference_floor
from nanokit.lab.quality.params import KEEP, QualityParams
from nanokit.lab.quality.passes import Pass
from nanokit.lab.quality.reference import Reference, check_length, reference, source_of
from nanokit.lab.quality.tasks import TOGETHER, TaskScore, paired, score
from nanokit.lab.result import Result
from nanokit.lab.steadiness import remarks
from nanokit.lab.table import Table
from nanokit.model.requantize import choices_of
from nanokit.model.saved import QuantizedFile
from nanokit.model.weights import find_weights
from nanokit.quant.policy import parse_policy

TIMED_CTX = 64  # tokens of context at which a decoded token is timed
STEPS = 12  # of each policy in a round
TASK_CTX = 512  # room for a task's longest item and its answer


@dataclass(frozen=True)
class Measured:
    """One policy. metrics: names as in `QualityResult`, without the policy's. positions: "low-high" -> summary of the
    tokens there (`Divergences.by_position`). tasks: the score of each."""

    policy: str
    metrics: dict[str, float]
    positions: dict[str, dict[str, float]] = field(default_factory=dict)
    tasks: dict[str, TaskScore] = field(default_factory=dict)


@dataclass(frozen=True)
class QualityResult(Result):
    """Metrics of a run with one policy: those of `Divergences.summary`; `noise_floor_kl` (the setting against itself,
    computed in other chunks), `bits_per_weight` (of the layers' matrices, scales included), `stored_bytes` (all
    weights), `bytes_per_token` (that a decoded token reads, as packed), `ms_per_token`, `points_<task>` with
    `points_<task>_low` and `_high`. With several policies each name ends in `_of_<policy>`. `reference_floor_kl` is
    the reference's own. policies: the same, structured.
    """

    policies: tuple[Measured, ...] = ()

    @property
    def reference(self) -> str:
        """What every divergence is against, on which text."""
        return str(self.settings["reference"])

    def table(self) -> Table:
        """One row a policy, errors beside the figures."""
        tasks = list(self.policies[0].tasks)
        columns = ("policy", "bits", "MB", "KL (nats)", "KL p99", "top-1", "ppl ratio", "ms per token", *tasks)
        return Table(columns, [_row(each) for each in self.policies], right=columns[1:])

    def buckets(self) -> Table:
        """Mean KL by position in the window: one row a policy."""
        columns = ("policy", *(f"at {name}" for name in self.policies[0].positions))
        rows = [
            (each.policy, *(f"{b['kl_mean']:.3g} ± {b['kl_mean_se']:.1g}" for b in each.positions.values()))
            for each in self.policies
        ]
        return Table(columns, rows, right=columns[1:])


def _row(each: Measured) -> tuple[str, ...]:
    m = each.metrics
    points = (f"{s.points:.0f} ({s.interval[0]:.0f}-{s.interval[1]:.0f})" for s in each.tasks.values())
    return (
        each.policy,
        f"{m['bits_per_weight']:.2f}",
        f"{m['stored_bytes'] / 1e6:.1f}",
        f"{m['kl_mean']:.3g} ± {m['kl_mean_se']:.1g}",
        f"{m['kl_p99']:.3g}",
        f"{m['top1']:.1%} ({m['top1_low']:.1%}-{m['top1_high']:.1%})",
        f"{m['ppl_ratio']:.4g} ± {m['ppl_ratio_se']:.1g}",
        f"{m['ms_per_token']:.2f}",
        *points,
    )


def measure_quality(
    p: QualityParams, *, progress: Progress | None = None, cancel: threading.Event | None = None
) -> QualityResult:
    """Measure every policy of p in its setting.

    Raises StoppedError when cancelled, BusyError while something else is measured, ParameterError for a text too short,
    a window longer than the model's context or a policy that does not fit the model (before anything is measured), and
    what `nanokit.load` raises.
    """
    progress = progress or Silent()
    names = [parse_policy(each).name for each in p.policy]
    _check(p)
    with measuring("quality"):
        progress.start(2 + len(names), "the reference")
        ref = reference(p.reference or p.model, p.windows, p.text, p.ctx, cancel=cancel)
        measured: dict[str, Measured] = {}
        engines: dict[str, LoadedEngine] = {}
        for name in names:
            stop_if(cancel)
            progress.step(name)
            engines[name] = _engine(p, name)
            measured[name] = _measured(engines[name], ref, p, name, cancel)
        visits = {name: _visit(engine, name) for name, engine in engines.items()}
        turns = Rounds(p.repeats, BUDGET_S[p.preset], progress=progress, cancel=cancel).run(visits)
    for name, each in measured.items():
        each.metrics["ms_per_token"] = statistics.median(turns.samples[f"ms_per_token_of_{name}"])
    first = engines[names[0]]
    metrics = {"reference_floor_kl": reference_floor(ref), **_flat(measured)}
    notes = [
        *_itself(p),
        *_chosen(engines),
        *turns.remarks,
        *remarks(turns.samples),
        *_pareto(measured),
        *_tasks_lost(measured),
    ]
    return QualityResult(
        p, metrics, turns.samples, _settings(p, ref, first), remarks=notes, policies=tuple(measured.values())
    )


def _check(p: QualityParams) -> None:
    """Raise ParameterError for what does not fit the model. (The budget of `auto` shows when it is measured.)"""
    source = source_of(p.model)
    check_length(p.ctx, source.config)
    if p.reference:
        other = source_of(p.reference)
        sample = "The quick brown fox; 3 + 4 = 7.\n"
        if other.config.vocab_size != source.config.vocab_size or (
            other.tokenizer.encode(sample) != source.tokenizer.encode(sample)
        ):
            raise ParameterError(
                "a model can be compared with one of the same vocabulary only",
                found=f"{source.name} and {other.name}",
                needed="two files of one model",
            )
    if _context(p) > source.config.max_context:
        raise ParameterError(
            "the model's context is too short to be measured",
            found=f"{source.config.max_context} tokens",
            needed=f"{_context(p)}, for the tasks or the timing",
        )
    weights = find_weights(source.config, source)
    for policy in map(parse_policy, p.policy):
        if policy.auto_bits is None:
            choices_of(policy, source, weights)


def _context(p: QualityParams) -> int:
    return max(p.ctx, context_for(TIMED_CTX, 2 * STEPS), TASK_CTX if p.tasks else 0)


def _engine(p: QualityParams, policy: str) -> LoadedEngine:
    return load(
        p.model or None,
        ctx=_context(p),
        max_seqs=max(2, p.batch, TOGETHER if p.tasks else 0),
        prefix_cache=False,  # every prompt is to be computed
        activations=p.activations or None,
        kv_format=p.kv_format or None,
        policy=None if policy == KEEP else policy,
    )


def _measured(
    engine: LoadedEngine, ref: Reference, p: QualityParams, policy: str, cancel: threading.Event | None
) -> Measured:
    how = Pass(p.batch, layout=p.layout)
    found = compare_engine(engine, ref, how, cancel)
    metrics = found.summary()
    metrics["noise_floor_kl"] = engine_floor(engine, ref, how, cancel)
    metrics["bits_per_weight"] = engine.model.footprint.matrix_bits
    metrics["stored_bytes"] = engine.model.footprint.stored
    metrics["bytes_per_token"] = engine.model.bytes_per_token
    scores = {}
    for task in p.tasks:
        stop_if(cancel)
        scores[task] = score(engine, task, p.items)
        low, high = scores[task].interval
        metrics |= {f"points_{task}": scores[task].points, f"points_{task}_low": low, f"points_{task}_high": high}
    buckets = {f"{low}-{high - 1}": summary for (low, high), summary in found.by_position().items()}
    return Measured(policy, metrics, buckets, scores)


def _visit(engine: LoadedEngine, policy: str) -> Visit:
    session = Session(engine, TIMED_CTX)

    def visit() -> Samples:
        with session.filled(STEPS):
            return {f"ms_per_token_of_{policy}": [session.step() for _ in range(STEPS)]}

    return visit


def _flat(measured: Mapping[str, Measured]) -> dict[str, float]:
    if len(measured) == 1:
        return dict(next(iter(measured.values())).metrics)
    return {f"{name}_of_{policy}": v for policy, each in measured.items() for name, v in each.metrics.items()}


def _settings(p: QualityParams, ref: Reference, engine: LoadedEngine) -> dict[str, Any]:
    return {
        "reference": ref.name,
        "model": engine.model.name,
        "activations": engine.model.activations,
        "kv_format": engine.kv.kv_format,
        "kernels": engine.model.kernels,
        "threads": threads_used(engine),
        "ctx": p.ctx,
        "batch": p.batch,
        "layout": p.layout,
        "timed_at_ctx": TIMED_CTX,
        "scored_tokens": ref.scored,
    }


def _itself(p: QualityParams) -> list[str]:
    """A sentence where a file that nanokit quantized is compared with itself."""
    source = source_of(p.model)
    if p.reference or not isinstance(source, QuantizedFile):
        return []
    return [
        f"{source.name} was quantized already ({source.policy}) and is compared with itself: --reference ORIGINAL says "
        "what that cost"
    ]


def _chosen(engines: Mapping[str, LoadedEngine]) -> list[str]:
    """A sentence for every `auto`: what it chose on this model."""
    return [
        f"{name} chose {engine.model.name.split(' as ')[-1]}"
        for name, engine in engines.items()
        if parse_policy(name).auto_bits is not None
    ]


def _pareto(measured: Mapping[str, Measured]) -> list[str]:
    """A sentence for every policy that another one beats in divergence without being larger. Time is left out of it:
    differences within its noise would decide. Divergences within their standard errors beat nobody."""
    notes = []
    for name, each in measured.items():
        mine = each.metrics
        better = [
            other
            for other, its in ((o, m.metrics) for o, m in measured.items() if o != name)
            if its["bits_per_weight"] <= mine["bits_per_weight"]
            and its["kl_mean"] + its["kl_mean_se"] + mine["kl_mean_se"] < mine["kl_mean"]
        ]
        if better:
            best = min(better, key=lambda other: measured[other].metrics["kl_mean"])
            notes.append(f"{name} is not worth its bits: {best} takes no more and diverges less")
    return notes


def _tasks_lost(measured: Mapping[str, Measured]) -> list[str]:
    """A sentence for every task that a policy changes against the first one by more than chance (p < .05)."""
    (first, base), *others = measured.items()
    notes = []
    for policy, each in others:
        for task, found in each.tasks.items():
            change = paired(base.tasks[task], found)
            if change.p < 0.05:
                notes.append(
                    f"{task}: {policy} has {change.difference:+.0f} points against {first} "
                    f"({change.gained} items gained, {change.lost} lost, p = {change.p:.2g})"
                )
    return notes
