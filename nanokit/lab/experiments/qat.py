"""Quantization-aware training against rounding afterwards, on the model itself: what is recovered, and what it costs.

Three ways to the same format, the same bytes: every weight to the nearest code under the scale that its group gives;
scales found by search, which looks at the weights alone (quant/rounding.py); and training on the grid by
self-distillation (distil.py). Damage is the mean KL from the fp32-activation reference on a text that nobody trained
on.

    recovered       (plain - QAT) / plain        of all the damage
    beyond search   (search - QAT) / search      of what the best rounding without data leaves: what training is for

The same three, and the file as it is stored, are scored on tasks (qat_points.py). The reference is the file as it is
stored, 4-bit in the default model. Times are those of whole steps, with rounding and
with the same layers computing with their weights as they are, in turns, after the training and with a rate of 0.
"""

import statistics
import threading
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import nn

from nanokit import quant
from nanokit.lab.bench.timing import Samples
from nanokit.lab.experiments.distil import Lesson, Training, lesson_of, own_texts, products_of
from nanokit.lab.experiments.gradient_params import GradientParams, GradientResult
from nanokit.lab.experiments.kernel_params import opened
from nanokit.lab.experiments.qat_points import figures, gains, points_as_stored, points_of
from nanokit.lab.lock import measuring
from nanokit.lab.progress import Progress, Silent, stop_if
from nanokit.lab.quality.divergence import compare
from nanokit.lab.quality.intervals import standard_error
from nanokit.lab.quality.reference import Reference, reference
from nanokit.lab.table import Table
from nanokit.model.trainable import TrainableModel
from nanokit.quant.layers import FakeQuantLinear

WAYS = ("plain", "search", "qat")
CALLED = {"plain": "plain rounding", "search": "searched scales", "qat": "QAT"}
TIMED = {"smoke": 1, "quick": 1, "full": 4}  # steps of each kind
CLAIMED_TIME = (0.35, 0.60)  # more time a step that agrees with Q6's 47 %


@dataclass(frozen=True)
class QatResult(GradientResult):
    """Metrics: kl_mean, kl_mean_se, kl_p99, top1 and ppl_ratio of each way (`kl_mean_of_qat`); `recovered_rate`,
    `beyond_search_rate`; `points_of_<way>_<task>` with intervals, `stored` among the ways, and `gained_points_<task>`:
    QAT's less plain rounding's; `rounding_time_ratio`: of steps with rounding over steps without. Samples: `loss` and
    `gradient_norm` of every step, `ms_per_step_rounded`, `ms_per_step_plain`."""

    @property
    def kl(self) -> dict[str, float]:
        return {way: self.metrics[f"kl_mean_of_{way}"] for way in WAYS}

    @property
    def beats_search(self) -> bool:
        """Whether QAT is better than searched scales by more than twice the error of the difference, token by token."""
        return self.kl["search"] - self.kl["qat"] > 2 * self.metrics["kl_se_of_search_less_qat"]

    @property
    def verdict_q6(self) -> str:
        """Of the claim that training with rounding and the straight-through estimator beats rounding afterwards, at
        47 % more training time."""
        more = self.metrics["rounding_time_ratio"] - 1
        cost = f"a step takes {more:+.0%}{self.where and ', rounding'}{self.where} (claimed: +47 %)"
        if not self.beats_search:
            word = "does not hold" if self.kl["qat"] >= self.kl["search"] else "is not shown"
            return f"{word} here: QAT is not better than a search of scales by more than the error; {cost}"
        low, high = CLAIMED_TIME
        gain = f"QAT takes {self.metrics['beyond_search_rate']:.0%} off what a search of scales leaves"
        agrees = low <= more <= high and not self.where
        return f"{'holds here' if agrees else 'holds here in part'}: {gain}; {cost}"

    def table(self) -> Table:
        """One row a way."""
        m = self.metrics
        rows = [("as stored", "0", "-", "100.0%", "1", *self._points("stored"))]
        for way in WAYS:
            kl, error = m[f"kl_mean_of_{way}"], m[f"kl_mean_se_of_{way}"]
            recovered = 1 - kl / m["kl_mean_of_plain"]
            top1, ratio = m[f"top1_of_{way}"], m[f"ppl_ratio_of_{way}"]
            figures = (f"{kl:.3f} ± {error:.3f}", f"{recovered:.0%}", f"{top1:.1%}", f"{ratio:.3f}")
            rows.append((CALLED[way], *figures, *self._points(way)))
        tasks = (f"{task} (points)" for task in self.asked.tasks)
        columns = ("rounded by", "KL (nats)", "recovered", "top-1", "ppl ratio", *tasks)
        return Table(columns, rows, right=columns[1:])

    def _points(self, way: str) -> list[str]:
        m = self.metrics
        return [
            f"{m[f'points_of_{way}_{task}']:.1f} ({m[f'points_low_of_{way}_{task}']:.0f} to "
            f"{m[f'points_high_of_{way}_{task}']:.0f})"
            for task in self.asked.tasks
        ]

    @property
    def gained(self) -> str:
        """What QAT's points are beside plain rounding's, task by task, in a line each."""
        m = self.metrics
        if not self.asked.tasks:
            return "points are counted by the full preset, or with tasks of your choice"
        return "\n".join(
            f"{task}: {m[f'gained_points_{task}']:+.1f} points by QAT over plain rounding (95 %: "
            f"{m[f'gained_points_low_{task}']:+.1f} to {m[f'gained_points_high_{task}']:+.1f}, "
            f"{m[f'items_{task}']:.0f} items)"
            for task in self.asked.tasks
        )


def qat(p: GradientParams, *, progress: Progress | None = None, cancel: threading.Event | None = None) -> QatResult:
    """Round in all three ways and measure.

    Raises StoppedError when cancelled, BusyError, ParameterError for a format that does not fit the model, and what
    `nanokit.load` raises.
    """
    progress = progress or Silent()
    with measuring("QAT"):
        progress.start(6 + p.steps, "the reference")
        ref = reference_for(p)
        progress.step("points of the model as it is stored")
        metrics, scores = figures(points_as_stored(p), "stored"), {}
        kls: dict[str, np.ndarray] = {}
        progress.step("the model writes texts")
        lesson = lesson_for(p)
        for way in ("search", "plain"):
            stop_if(cancel)
            progress.step(CALLED[way])
            student = _prepared(p, way == "search")
            found, kls[way] = quality(student, ref, way)
            metrics |= found
            scores[way] = points_of(p, student, policy_of(p, way == "search"))
        if p.scales == "searched":
            student = _prepared(p, True)
        samples, training = trained(student, layers_of(student), lesson, p, p.steps, p.learning_rate, progress, cancel)
        found, kls["qat"] = quality(student, ref, "qat")
        metrics |= found | {"kl_se_of_search_less_qat": standard_error(kls["search"] - kls["qat"])}
        scores["qat"] = points_of(p, student, policy_of(p, p.scales == "searched"))
        progress.step("timing steps")
        samples |= _times(student, training, TIMED[p.preset], cancel)
    median = {name: statistics.median(samples[name]) for name in ("ms_per_step_rounded", "ms_per_step_plain")}
    metrics |= {
        "recovered_rate": 1 - metrics["kl_mean_of_qat"] / metrics["kl_mean_of_plain"],
        "beyond_search_rate": 1 - metrics["kl_mean_of_qat"] / metrics["kl_mean_of_search"],
        "search_recovered_rate": 1 - metrics["kl_mean_of_search"] / metrics["kl_mean_of_plain"],
        "trained_tokens": p.steps * p.batch * p.text_tokens,
        "rounding_time_ratio": median["ms_per_step_rounded"] / median["ms_per_step_plain"],
        **median,
        **gains(scores["plain"], scores["qat"]),
    }
    for way, each in scores.items():
        metrics |= figures(each, way)
    return QatResult(p, metrics, samples, settings_of(p, ref, lesson))


def reference_for(p: GradientParams) -> Reference:
    """What every divergence here is from."""
    return reference(p.model, p.windows, length=p.window_tokens)


def lesson_for(p: GradientParams) -> Lesson:
    """Texts of the model, and its own states for them; the latest is kept."""
    return _lesson(p.model, p.texts, p.text_tokens, p.seed, p.batch, products_of(p))


@lru_cache(maxsize=1)
def _lesson(model: str, texts: int, length: int, seed: int, batch: int, products: torch.dtype) -> Lesson:
    source, weights = opened(model)
    teacher = TrainableModel(source.config, weights).requires_grad_(False)
    return lesson_of(teacher, own_texts(model, texts, length, seed), products, batch)


def policy_of(p: GradientParams, searched: bool = False) -> str:
    """The format for the layers that are rounded."""
    last = opened(p.model)[0].config.num_layers - 1
    kept = f";{p.layers}-{last}=keep" if p.layers <= last else ""
    return p.weights + ("+search" if searched else "") + kept


def fresh(p: GradientParams) -> TrainableModel:
    """The model as it is stored, frozen."""
    source, weights = opened(p.model)
    return TrainableModel(source.config, weights).requires_grad_(False)


def _prepared(p: GradientParams, searched: bool) -> TrainableModel:
    model = fresh(p)
    quant.prepare(model, policy_of(p, searched))
    return model


def layers_of(student: nn.Module) -> list[nn.Parameter]:
    """The weights of the prepared layers, made to train."""
    found: list[nn.Parameter] = []
    for layer in student.modules():
        if isinstance(layer, FakeQuantLinear):
            layer.weight.requires_grad_(True)
            found.append(layer.weight)
    return found


def trained(
    student: nn.Module,
    parameters: list[nn.Parameter],
    lesson: Lesson,
    p: GradientParams,
    steps: int,
    rate: float,
    progress: Progress,
    cancel: threading.Event | None,
) -> tuple[Samples, Training]:
    """Train; the samples `loss` and `gradient_norm`."""
    training = Training(student, parameters, lesson, p, steps, rate)
    samples: Samples = {"loss": [], "gradient_norm": []}
    for index in range(steps):
        stop_if(cancel)
        done = training.step()
        samples["loss"].append(done.loss)
        samples["gradient_norm"].append(done.norm)
        progress.step(f"step {index + 1} of {steps}: {done.loss:.3f} nats")
    return samples, training


def quality(student: TrainableModel, ref: Reference, name: str) -> tuple[dict[str, float], np.ndarray]:
    """How far it is from the reference, in fp32, each figure `…_of_<name>`; and the KL of every scored token."""
    with torch.no_grad():  # all windows together: weights are rounded in every pass
        states = student(torch.tensor(ref.windows))
    of = {tuple(ids): each for ids, each in zip(ref.windows, states, strict=True)}
    divergences = compare(lambda ids: of[tuple(ids)] @ student.head.T, ref)
    found = divergences.summary()
    wanted = ("kl_mean", "kl_mean_se", "kl_p99", "top1", "ppl_ratio", "ppl_ratio_se")
    return {f"{each}_of_{name}": found[each] for each in wanted}, divergences.kl


def _times(student: nn.Module, training: Training, rounds: int, cancel: threading.Event | None) -> Samples:
    """Whole steps with rounding and without, in turns; nothing moves, since the schedule has run out."""
    samples: Samples = {"ms_per_step_rounded": [], "ms_per_step_plain": []}
    layers = [layer for layer in student.modules() if isinstance(layer, FakeQuantLinear)]
    for _ in range(rounds):
        for name, enabled in (("ms_per_step_rounded", True), ("ms_per_step_plain", False)):
            stop_if(cancel)
            for layer in layers:
                layer.enabled = enabled
            samples[name].append(training.step().ms)
    for layer in layers:
        layer.enabled = True
    return samples


def settings_of(p: GradientParams, ref: Reference, lesson: Lesson) -> dict[str, str | int]:
    """What held in all of it."""
    return {
        "reference": ref.name,
        "policy": policy_of(p),
        "products": str(lesson.products).removeprefix("torch."),
        "texts": f"{p.texts} of {p.text_tokens} tokens, written by the model at temperature 1",
    }
