"""What each backend gains: the time of a product by the number of rows, on a model's own matrices.

All layers' matrices of a kind are walked through one after the other, so that a cache does not serve the same one
again. In a forward the other kinds come between them: where one kind fits into the last cache and the model does not,
times here are those of the cache, and shorter. The backends take turns. Every product is a call from Python, which in a
model's step it is not: C makes one call of a whole step. `torch fp32` multiplies with unrounded inputs and dequantized
weights, what one would do without any of this; the reference rounds the inputs first and then does the same.
"""

import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from nanokit.kernels.cpu.pack import Arena
from nanokit.lab.bench.timing import PAUSE_S, Rounds, Samples, Visit, in_turns, milliseconds
from nanokit.lab.experiments.kernel_params import KernelsParams, KernelsResult, coded, matrices, notes, opened
from nanokit.lab.lock import measuring
from nanokit.lab.progress import Progress, Silent, stop_if
from nanokit.lab.sides import Side, interpreted, missing, sides
from nanokit.lab.steadiness import remarks
from nanokit.lab.table import Table

BUDGET_S = {"smoke": 2.0, "quick": 12.0, "full": float("inf")}
WALKS = 2  # of each in a round
DENSE = "torch fp32"  # the reference's copy of the weights, inputs not rounded
NO_SPEED = "interpreter: not a speed"


@dataclass(frozen=True)
class GainResult(KernelsResult):
    """Series `<backend>_ms_of_<product>_at_<rows>`: milliseconds of one product, the mean over a walk."""

    def timed(self) -> list[str]:
        """What was timed, in the order of the table."""
        return list(self.settings["timed"])

    def ms(self, name: str, kind: str, rows: int) -> float:
        return self.metrics[f"{name}_ms_of_{kind}_at_{rows}"]

    def table(self) -> Table:
        """Milliseconds of a product; of backends that pack also how many times as fast as the reference they are, and
        bytes of weights a second."""
        names, lines = self.timed(), []
        packed = [name for name in names if name not in (DENSE, "reference")]
        for kind in self.asked.products:
            for rows in self.asked.rows:
                ms = {name: self.ms(name, kind, rows) for name in names}
                cells = [f"{ms[name]:.3f}" for name in names]
                for name in packed:
                    speed = self.metrics[f"{name}_bytes_of_{kind}"] / ms[name] / 1e6
                    cells += [f"{ms['reference'] / ms[name]:.1f}", f"{speed:.1f}"]
                lines.append([kind, str(rows), *cells, *self._others().values()])
        ratios = [text for name in packed for text in (f"reference over {name}", f"{name} (GB/s)")]
        columns = ("product", "rows", *(f"{name} (ms)" for name in names), *ratios, *self._others())
        return Table(columns, lines, right=columns[1:])

    def _others(self) -> Mapping[str, str]:
        """Columns of backends without a time."""
        absent = dict.fromkeys(self.settings["missing"], "not here")
        return absent | ({"Triton": NO_SPEED} if self.settings["triton_interpreted"] else {})


def gains(p: KernelsParams, *, progress: Progress | None = None, cancel: threading.Event | None = None) -> GainResult:
    """Time the products. Raises StoppedError when cancelled, BusyError, and what `nanokit.load` raises of a file."""
    progress = progress or Silent()
    metrics: dict[str, float] = {}
    samples: Samples = {}
    with measuring("products"), torch.inference_mode():
        progress.start(1, "packing matrices")
        source, weights = opened(p.model)
        said = notes(each for kind in p.products for each in matrices(weights, kind, p.layers))
        for kind in p.products:
            layers, arena = [], Arena()
            for each in matrices(weights, kind, p.layers):
                stop_if(cancel)
                layers.append([side for side in sides(coded(each), arena) if side.timed])
            backends = {side.name: [layer[index] for layer in layers] for index, side in enumerate(layers[0])}
            metrics |= {f"{name}_bytes_of_{kind}": sum(s.nbytes for s in each) / len(each)
                        for name, each in backends.items()}  # fmt: skip
            metrics[f"{DENSE}_bytes_of_{kind}"] = metrics[f"reference_bytes_of_{kind}"]
            visits = {f"{kind}, {DENSE}": _visit(backends["reference"], DENSE, "fp32", kind, p.rows)}
            visits |= {f"{kind}, {name}": _visit(each, name, p.activations, kind, p.rows)
                       for name, each in backends.items()}  # fmt: skip
            budget = BUDGET_S[p.preset] / len(p.products)
            turns = Rounds(p.repeats, budget, PAUSE_S, progress=progress, cancel=cancel).run(visits)
            samples |= turns.samples
            said += turns.remarks
    metrics |= {name: statistics.median(values) for name, values in samples.items()}
    settings = {
        "model": source.name,
        "timed": [DENSE, *backends],
        "missing": missing(),
        "triton_interpreted": interpreted(),
        "threads": torch.get_num_threads(),
    }
    return GainResult(p, metrics, samples, settings, remarks=list(dict.fromkeys([*said, *remarks(samples)])))


def _visit(layers: Sequence[Side], name: str, mode: str, kind: str, rows: Sequence[int]) -> Visit:
    """One backend's walks at every number of rows. Backends are not mixed in a visit: see bench/timing.py on threads
    that go on spinning."""
    walks = {f"{name}_ms_of_{kind}_at_{count}": walk(layers, mode, count) for count in rows}

    def visit() -> Samples:
        for each in walks.values():
            each()
        return in_turns(walks, WALKS)

    return visit


def walk(layers: Sequence[Side], mode: str, rows: int) -> Callable[[], float]:
    """A function that multiplies with each of the matrices once and returns the milliseconds of one product."""
    columns = layers[0].unpack(torch.zeros(1, dtype=torch.int64)).shape[1]
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    peak = float(x.abs().max()) if mode == "static" else None
    products = [layer.product(x, mode, peak) for layer in layers]

    def all_of_them() -> None:
        for each in products:
            each()
        layers[0].finish()

    return lambda: milliseconds(all_of_them) / len(products)
