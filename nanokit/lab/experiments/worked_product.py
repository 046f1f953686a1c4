"""One product by hand, small enough that every number can be followed: one row, two outputs, two steps of 32 columns.

    code of an input = rint(x * 127 / peak)      peak, scale = peak / 127: of 32 columns
    of each step     dot = sum of weight code * input code           whole numbers, exact
                     acc = fma(dot, weight scale * input scale, acc)      rounded to fp32 once
    with minimums    acc = fma(minimum, input scale * sum of input codes, acc)

`by_hand` does the arithmetic in fractions and rounds where the contract says so. It is written anew here and not taken
from a backend: what agrees with it in every bit was computed in this order.
"""

import threading
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import torch

from nanokit.kernels import activations
from nanokit.lab.experiments.kernel_params import KernelsParams
from nanokit.lab.lock import measuring
from nanokit.lab.oracle import bound, matrix
from nanokit.lab.progress import Progress
from nanokit.lab.result import Result
from nanokit.lab.sides import sides
from nanokit.lab.table import Table
from nanokit.quant.qtensor import QTensor

OUTPUTS, COLUMNS, STEP = 2, 64, 32
MODE = "a8g32"
SEED = 3
SHOWN = 6  # columns of a group that are printed


@dataclass(frozen=True)
class Step:
    """32 columns of one output. sums: of the input's codes; acc: after the step."""

    output: int
    step: int
    dot: int
    weight_scale: np.float32
    input_scale: np.float32
    minimum: np.float32 | None
    sums: int
    acc: np.float32


@dataclass(frozen=True)
class WorkedResult(Result):
    """x fp32 [64]; codes of the row int32 [64] and its scales fp32 [2]; weights [2, 64]; steps; what each backend
    says, fp32 [2]; exact: the product of the codes in fp64."""

    x: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    codes: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    scales: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    weights: QTensor | None = None
    steps: tuple[Step, ...] = ()
    said: dict[str, np.ndarray] = field(default_factory=dict)
    exact: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def inputs(self) -> Table:
        """The first columns of both groups: inputs, codes, scale, and the first output's weight codes."""
        assert self.weights is not None
        rows = []
        for step in range(COLUMNS // STEP):
            part = slice(step * STEP, step * STEP + SHOWN)
            first, last = step * STEP, step * STEP + STEP - 1
            for what, values, scale in (
                ("x", [f"{v:.3f}" for v in self.x[part]], ""),
                ("codes of x", map(str, self.codes[part]), f"{self.scales[step]:.6g}"),
                ("codes of w, output 0", map(str, self.weights.codes[0, part]), f"{self.weights.scales[0, step]:.6g}"),
            ):
                rows.append((f"{first} … {last}", what, " ".join(v.rjust(6) for v in values) + "  …", scale))
        return Table(("columns", "", f"the first {SHOWN}", "scale"), rows, right=("scale",))

    def arithmetic(self) -> Table:
        """Every step of both outputs."""
        with_minimums = any(each.minimum is not None for each in self.steps)
        rows = []
        for each in self.steps:
            cells = [str(each.output), f"{each.step * STEP} … {each.step * STEP + STEP - 1}", str(each.dot),
                     f"{each.weight_scale:.6g} * {each.input_scale:.6g}"]  # fmt: skip
            if with_minimums:
                cells.append(f"{each.minimum:.6g} * {each.sums}")
            rows.append((*cells, f"{each.acc:.9g}"))
        columns = ["output", "columns", "dot", "w scale * x scale", *(["minimum * sum"] * with_minimums), "acc"]
        return Table(columns, rows, right=columns[2:])

    def answers(self) -> Table:
        """What the backends say, digit by digit, beside the hand and fp64."""
        rows = [("by hand", *(f"{v:.9g}" for v in self.by_hand), "")]
        for name, values in self.said.items():
            same = "every bit" if np.array_equal(values, self.by_hand) else "not every bit"
            rows.append((name, *(f"{v:.9g}" for v in values), same))
        rows.append(("fp64", *(f"{v:.12g}" for v in self.exact), ""))
        return Table(("computed by", "output 0", "output 1", "as by hand in"), rows, right=("output 0", "output 1"))

    @property
    def within_bound(self) -> bool:
        """Whether every backend is as close to fp64 as the contract asks."""
        allowed = np.array([self.metrics[f"bound_of_output_{n}"] for n in range(OUTPUTS)])
        return all(bool((np.abs(values - self.exact) <= allowed).all()) for values in self.said.values())

    @property
    def by_hand(self) -> np.ndarray:
        """fp32 [2]: the accumulators after the last step."""
        return np.array([each.acc for each in self.steps if each.step == COLUMNS // STEP - 1], np.float32)


def worked_product(
    p: KernelsParams, *, progress: Progress | None = None, cancel: threading.Event | None = None
) -> WorkedResult:
    """Compute the example by hand and by every backend. Raises BusyError."""
    weights = matrix(p.example, OUTPUTS, COLUMNS)
    x = torch.from_numpy(np.random.default_rng(SEED).standard_normal((1, COLUMNS), np.float32))
    with measuring("an example"), torch.inference_mode():
        seen = activations.quantize(x, MODE)
        steps = by_hand(weights, seen.codes[0].numpy(), seen.scales[0].numpy())
        said = {side.name: side.multiply(x, MODE)[0].numpy() for side in sides(weights)}
        exact, allowed = bound(weights, x, MODE)
    metrics = {f"acc_of_output_{each.output}_step_{each.step}": float(each.acc) for each in steps}
    metrics |= {f"bound_of_output_{n}": float(value) for n, value in enumerate(allowed[0])}
    return WorkedResult(
        p, metrics, x=x[0].numpy(), codes=seen.codes[0].numpy().astype(np.int32), scales=seen.scales[0].numpy(),
        weights=weights, steps=tuple(steps), said=said, exact=exact[0].numpy(),
    )  # fmt: skip


def by_hand(weights: QTensor, codes: np.ndarray, scales: np.ndarray) -> list[Step]:
    """The steps of every output for one row of codes [columns] with a scale for each 32; weights in groups of 32."""
    steps = []
    for output in range(weights.shape[0]):
        acc = np.float32(0)
        for step in range(weights.shape[1] // STEP):
            part = slice(step * STEP, (step + 1) * STEP)
            dot = int(weights.codes[output, part].astype(int) @ codes[part].astype(int))
            sums = int(codes[part].astype(int).sum())
            weight_scale, input_scale = weights.scales[output, step], scales[step]
            minimum = None if weights.minimums is None else weights.minimums[output, step]
            acc = fma(np.float32(dot), weight_scale * input_scale, acc)
            if minimum is not None:
                acc = fma(minimum, input_scale * np.float32(sums), acc)
            steps.append(Step(output, step, dot, weight_scale, input_scale, minimum, sums, acc))
    return steps


def fma(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    """a * b + c, rounded once to fp32, to even; all finite. By way of fp64 it would be rounded twice."""
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    near = np.float32(float(exact))
    candidates = (np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf)))
    return min(candidates, key=lambda v: (abs(Fraction(float(v)) - exact), int(v.view(np.uint32)) & 1))
