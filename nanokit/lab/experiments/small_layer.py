"""A small layer that trains on a format's grid, with three derivatives for rounding: what each of them does.

    passes at the bound    1 inside and at the outermost codes, 0 beyond: the straight-through estimator
    dies at the bound      1 inside, 0 at the outermost codes: what a library's clamp may take, and once took
    rounding's own         0 everywhere: a step function is flat

One linear layer without a bias, integer weights, normal inputs; it has to imitate another one, whose weights are
smaller and shifted. Everything is in fp32 and takes milliseconds, so that a slider can steer it. Where the scale comes
from the weights, every group has a weight at a bound: its peak. It has to move, or the scale stays what it is for ever.
"""

import threading
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanokit.kernels.fake_quant import fake_quantize, ranges
from nanokit.lab.bench.timing import Samples
from nanokit.lab.params import Params, experiment_params, knob
from nanokit.lab.progress import Progress, Silent, stop_if
from nanokit.lab.result import Result
from nanokit.lab.table import Table
from nanokit.quant.integer import IntegerFormat, integer_format

OUTPUTS, COLUMNS, ROWS = 48, 64, 256
ESTIMATORS = ("passes at the bound", "dies at the bound", "rounding's own")
SHRINK, SHIFT = 0.6, 0.3  # how the layer to imitate differs from the start: all weights smaller, and moved


@experiment_params
class SmallLayerParams(Params):
    """The format of the layer, and how it trains."""

    weights: str = knob(
        "int4-sym-g16", "weight format of the layer",
        choices=("int4-sym-g16", "int4-sym-g64", "int4-sym-channel", "int4-asym-g16", "int8-sym-g64"),
    )  # fmt: skip
    learning_rate: float = knob(0.02, "learning rate of plain gradient descent", low=0.001, high=0.2, step=0.001)
    steps: int = knob(
        0, "training steps", unit="steps", low=10, high=2000, by_preset={"smoke": 60, "quick": 200, "full": 400}
    )
    seed: int = knob(0, "seed of weights and inputs", low=0, high=2**31 - 1)


@dataclass(frozen=True)
class SmallLayerResult(Result):
    """Samples: `error_<estimator>`, the mean square of the output's error after each step, as a part of plain
    rounding's, with spaces and quotes left out of the name. Metrics: `gradient_norm_<estimator>` of the first step,
    `moved_rate_<estimator>` of all weights and `bound_moved_rate_<estimator>` of those that began at a bound."""

    @property
    def asked(self) -> SmallLayerParams:
        assert isinstance(self.params, SmallLayerParams)
        return self.params

    def errors(self, estimator: str) -> list[float]:
        return self.samples[f"error_{key_of(estimator)}"]

    def table(self) -> Table:
        """One row an estimator."""
        m, rows = self.metrics, []
        for each in ESTIMATORS:
            key = key_of(each)
            rows.append((
                each, f"{m[f'gradient_norm_{key}']:.3g}", f"{m[f'moved_rate_{key}']:.0%}",
                f"{m[f'bound_moved_rate_{key}']:.0%}", f"{self.errors(each)[-1]:.2f}",
            ))  # fmt: skip
        columns = ("derivative of rounding", "gradient norm", "weights moved", "of those at a bound", "error left")
        return Table(columns, rows, right=columns[1:])


def key_of(estimator: str) -> str:
    """Its part of a metric's name."""
    return "_".join(estimator.replace("'", "").split())


def small_layer(
    p: SmallLayerParams, *, progress: Progress | None = None, cancel: threading.Event | None = None
) -> SmallLayerResult:
    """Train the layer with each derivative. Raises StoppedError when cancelled."""
    progress = progress or Silent()
    progress.start(len(ESTIMATORS), "training a small layer")
    fmt = integer_format(p.weights)
    numbers = np.random.default_rng(p.seed)
    start, drift, x = (
        torch.from_numpy(numbers.standard_normal(shape, np.float32))
        for shape in ((OUTPUTS, COLUMNS), (OUTPUTS, COLUMNS), (ROWS, COLUMNS))
    )
    target = x @ (SHRINK * start + SHIFT * drift).T
    samples: Samples = {}
    metrics: dict[str, float] = {}
    for estimator in ESTIMATORS:
        stop_if(cancel)
        errors, norm, moved, at_bound = _train(estimator, start, x, target, fmt, p)
        key = key_of(estimator)
        samples[f"error_{key}"] = errors
        metrics |= {
            f"gradient_norm_{key}": norm,
            f"moved_rate_{key}": moved.float().mean().item(),
            f"bound_moved_rate_{key}": moved[at_bound].float().mean().item(),
        }
        progress.step()
    return SmallLayerResult(p, metrics, samples)


def _train(
    estimator: str, start: Tensor, x: Tensor, target: Tensor, fmt: IntegerFormat, p: SmallLayerParams
) -> tuple[list[float], float, Tensor, Tensor]:
    """Errors by step, the first gradient's norm, which weights moved, and which began at a bound."""
    w = start.clone().requires_grad_()
    at_bound = _at_bound(start, fmt)
    errors, norm = [], 0.0
    for step in range(p.steps):
        rounded = fake_quantize(w, fmt)
        error = (x @ rounded.T - target).square().mean()
        errors.append(error.item())
        (gradient,) = torch.autograd.grad(error * OUTPUTS, w)
        if estimator == "dies at the bound":
            gradient = gradient.masked_fill(_at_bound(w.detach(), fmt), 0.0)
        elif estimator == "rounding's own":
            gradient = torch.autograd.grad((x @ _flat(w, fmt).T - target).square().mean(), w)[0]
        if step == 0:
            norm = gradient.norm().item()
        with torch.no_grad():
            w -= p.learning_rate * gradient
    return [each / errors[0] for each in errors], norm, w.detach() != start, at_bound


def _at_bound(w: Tensor, fmt: IntegerFormat) -> Tensor:
    """Which weights have the lowest or the highest code."""
    codes = fmt.quantize(w.numpy()).codes
    lowest, highest = fmt.code_range
    return torch.from_numpy((codes == lowest) | (codes == highest))


def _flat(w: Tensor, fmt: IntegerFormat) -> Tensor:
    """Rounded as autograd rounds: torch.round has the derivative 0. Scales and minimums are constants here too."""
    scales, minimums = (each[..., None] for each in ranges(w, fmt))
    steps = (w.unflatten(1, (scales.shape[1], -1)) - minimums) / scales
    return (steps.round() * scales + minimums).flatten(1)
