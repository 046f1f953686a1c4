"""What each backend promises of a product, checked over weight formats, activation modes and columns.

Bit for bit: codes of the inputs, the weights as packed, a row alone and among others. To a bound: the product itself,
against the product of the same codes in fp64. Nothing here is timed, so the interpreter's word counts as the GPU's.
All modes are checked at the first number of columns, and one of them at the others: wide matrices take the interpreter
longest, and what they add, the ranges that columns are cut into, does not depend on the mode.
"""

import threading
from dataclasses import dataclass, field
from itertools import product

import torch

from nanokit.lab.experiments.kernel_params import KernelsParams, KernelsResult
from nanokit.lab.lock import measuring
from nanokit.lab.oracle import bound, matrix, same_codes
from nanokit.lab.progress import Progress, Silent, stop_if
from nanokit.lab.sides import Side, Triton, interpreted, missing, sides, where
from nanokit.lab.table import Table
from nanokit.quant.qtensor import QTensor

OUTPUTS = 40  # that fill no whole panel of 16
ROWS, ALONE = 4, 2  # rows of a case, and the one that is computed again by itself
WIDENED = 7  # one row of so many is compared: the interpreter widens a row in milliseconds
PEAK = 2.5  # of static activations: some inputs lie beyond it
PROMISES = {
    "codes_equal": "codes of the inputs: the contract's bits",
    "weights_equal": "weights as packed: the file's bits",
    "alone_equal": "a row alone: the bits it has among others",
}


@dataclass(frozen=True)
class PromiseResult(KernelsResult):
    """Series `error_of_bound_<backend>_<format>`: the largest error of each case as a part of its bound."""

    def table(self) -> Table:
        """In how many cases each promise of bits was kept. The first two are by definition the reference's own."""
        m, names = self.metrics, [name for name in self.settings["backends"] if name != "reference"]
        rows = [
            (text, *(f"{m[f'{key}_{name}']:.0f} of {m[f'{key}_cases']:.0f}" for name in names))
            for key, text in PROMISES.items()
        ]
        return Table(("promise", *names), rows, right=names)

    def between(self) -> Table:
        """C and Triton, bit for bit, by the ranges that Triton cuts the columns into; empty unless both are here."""
        m = self.metrics
        found = sorted(int(name.split("_")[2]) for name in m if name.startswith("cases_in_"))
        rows = [(str(n), f"{m[f'c_is_triton_in_{n}_ranges']:.0f} of {m[f'cases_in_{n}_ranges']:.0f}") for n in found]
        columns = ("ranges in Triton", "cases where all outputs of C and Triton have the same bits")
        return Table(columns, rows, right=columns)


@dataclass
class _Tally:
    """metrics: how often something held; samples: errors, a series for each backend and format."""

    metrics: dict[str, float] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)

    def count(self, name: str, held: bool) -> None:
        self.metrics[name] = self.metrics.get(name, 0) + held


def promises(
    p: KernelsParams, *, progress: Progress | None = None, cancel: threading.Event | None = None
) -> PromiseResult:
    """Check every combination. Raises StoppedError when cancelled, and BusyError."""
    progress = progress or Silent()
    tally = _Tally()
    with measuring("promises"), torch.inference_mode():
        progress.start(len(p.weights) * len(p.columns), "checking")
        for name, columns in product(p.weights, p.columns):
            weights = matrix(name, OUTPUTS, columns)
            there = sides(weights)
            _check_weights(weights, there, tally)
            for mode in p.modes if columns == p.columns[0] else [p.activations]:
                stop_if(cancel)
                _check_product(weights, there, mode, tally)
            progress.step(f"{name}, {columns} columns")
    metrics = tally.metrics
    alone = metrics.pop("alone_equal_reference", 0) / max(1, metrics["alone_equal_cases"])
    metrics |= {name: max(values) for name, values in tally.samples.items()} | {"reference_alone_share": alone}
    settings = {
        "backends": [side.name for side in there],
        "missing": missing(),
        "triton_interpreted": interpreted(),
        "where": where(),
        "outputs": OUTPUTS,
        "rows": ROWS,
    }
    return PromiseResult(p, metrics, tally.samples, settings)


def _check_weights(weights: QTensor, there: list[Side], tally: _Tally) -> None:
    """Whether each backend has the matrix' weights, bit for bit."""
    rows = torch.arange(0, OUTPUTS, WIDENED)
    expected = torch.from_numpy(weights.dequantize())[rows]
    tally.count("weights_equal_cases", True)
    for side in there[1:]:
        tally.count(f"weights_equal_{side.name}", torch.equal(side.unpack(rows), expected))


def _check_product(weights: QTensor, there: list[Side], mode: str, tally: _Tally) -> None:
    """One case: codes, a row by itself, the distance from fp64, and C against Triton."""
    columns = weights.shape[1]
    noise = torch.Generator().manual_seed(columns)
    x = torch.randn(ROWS, columns, generator=noise) * 2 ** torch.randn(ROWS, 1, generator=noise)
    peak = PEAK if mode == "static" else None
    exact, allowed = bound(weights, x, mode, peak)
    tally.count("codes_equal_cases", True)
    tally.count("alone_equal_cases", mode != "tensor")  # whose scale is that of all rows, by its nature
    said = {}
    for side in there:
        said[side.name] = found = side.multiply(x, mode, peak)
        if side.name != "reference":
            tally.count(f"codes_equal_{side.name}", same_codes(side, x, mode, peak))
        alone = mode != "tensor" and torch.equal(side.multiply(x[ALONE : ALONE + 1], mode, peak)[0], found[ALONE])
        tally.count(f"alone_equal_{side.name}", alone)
        worst = float(((found - exact).abs() / allowed).max())
        tally.samples.setdefault(f"error_of_bound_{side.name}_{weights.format}", []).append(worst)
    if isinstance(there[-1], Triton) and "C" in said:
        ranges = there[-1].ranges
        tally.count(f"cases_in_{ranges}_ranges", True)
        tally.count(f"c_is_triton_in_{ranges}_ranges", torch.equal(said["C"], said["Triton"]))
