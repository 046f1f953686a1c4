"""One matrix alone, without a model: what weight format, rows, activation mode and caches make of a product.

Copies of one matrix of random weights lie in memory one after the other and are walked through again and again, as a
forward walks through its layers. A walk that is smaller than a cache never waits for memory, a large one does, and a
slider moves from one to the other. Walks of one row, of the rows asked for and of bare reading take turns.
"""

import statistics
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanokit.kernels import activations
from nanokit.kernels.cpu import NoKernelsError
from nanokit.kernels.cpu.library import library
from nanokit.kernels.cpu.ops import Linear
from nanokit.kernels.cpu.pack import Arena
from nanokit.lab.bench.timing import Rounds, Samples, in_turns, milliseconds
from nanokit.lab.experiments.reading import reader_of
from nanokit.lab.lock import measuring
from nanokit.lab.params import Params, experiment_params, knob
from nanokit.lab.progress import Progress, Silent, stop_if
from nanokit.lab.result import Result
from nanokit.lab.steadiness import remarks
from nanokit.quant.integer import integer_format
from nanokit.quant.qtensor import QTensor

BUDGET_S = {"smoke": 2.0, "quick": 5.0, "full": float("inf")}
SIDE = 2048  # rows and columns of the matrix: the size of a projection in a model of 1 to 2 billion parameters
WALKS = 3  # of each in a round
FORMATS = ("int4-sym-g32", "int4-asym-g32", "int8-sym-g32", "int8-asym-g32")


@experiment_params
class ProductParams(Params):
    """A product, and how many bytes of matrices lie between two uses of the same one."""

    weights: str = knob("int4-asym-g32", "weight format", choices=FORMATS)
    rows: int = knob(8, "rows of activations", unit="rows", low=1, high=64)
    activations: str = knob("a8g32", "activation mode", choices=activations.MODES[1:])
    walk: int = knob(
        0, "bytes of matrices before the first comes again", unit="MiB", low=1, high=512,
        by_preset={"smoke": 8, "quick": 96, "full": 256},
    )  # fmt: skip
    repeats: int = knob(0, "rounds", low=2, high=50, by_preset={"smoke": 2, "quick": 5, "full": 15})


@dataclass(frozen=True)
class ProductResult(Result):
    """Series `one_row_gb_s`, `rows_gb_s` (bytes of weights) and `stream_gb_s`."""


class TorchLinear:
    """The reference's product, where there are no kernels: dequantized weights times dequantized activations."""

    def __init__(self, weights: QTensor) -> None:
        self._weights = torch.from_numpy(weights.dequantize())
        self.nbytes = self._weights.nbytes

    def __call__(self, x: Tensor, mode: str, peak: float | None = None) -> Tensor:
        if mode != "fp32":
            x = activations.quantize(x, mode, peak).dequantize()
        return torch.nn.functional.linear(x, self._weights)

    def read(self) -> object:
        """Touch every weight once."""
        return self._weights.sum()


def random_weights(name: str, rows: int, columns: int) -> QTensor:
    """Normal weights in one of `FORMATS`."""
    return integer_format(name).quantize(np.random.default_rng(0).standard_normal((rows, columns), np.float32))


def product(
    p: ProductParams, *, progress: Progress | None = None, cancel: threading.Event | None = None
) -> ProductResult:
    """Time walks through copies of the matrix. Raises StoppedError when cancelled, and BusyError."""
    progress = progress or Silent()
    with measuring("a product"), torch.inference_mode():
        progress.start(1, "making matrices")
        weights = random_weights(p.weights, SIDE, SIDE)
        matrices, read, size = _matrices(weights, p, cancel)
        x = torch.randn(p.rows, SIDE, generator=torch.Generator().manual_seed(0))

        def walk(rows: int) -> Callable[[], float]:
            def speed() -> float:
                part = x[:rows]
                peak = float(part.abs().max())
                return size / milliseconds(lambda: [each(part, p.activations, peak) for each in matrices]) / 1e6

            return speed

        actions = {
            "one_row_gb_s": walk(1),
            "rows_gb_s": walk(p.rows),
            "stream_gb_s": lambda: size / milliseconds(read) / 1e6,
        }

        def visit() -> Samples:
            for action in actions.values():
                action()
            return in_turns(actions, WALKS)

        rounds = Rounds(p.repeats, BUDGET_S[p.preset], progress=progress, cancel=cancel)
        turns = rounds.run({f"{p.rows} rows": visit})
    median = {name: statistics.median(values) for name, values in turns.samples.items()}
    operations = 2 * SIDE * SIDE * len(matrices) / size
    metrics = {
        **median,
        "walk_bytes": size,
        "rows_gop_per_s": operations * p.rows * median["rows_gb_s"],
        "one_row_share": median["one_row_gb_s"] / median["stream_gb_s"],
        "v_ratio": median["one_row_gb_s"] / median["rows_gb_s"],
    }
    settings = {"matrix": [SIDE, SIDE], "copies": len(matrices), "compiled": isinstance(matrices[0], Linear)}
    return ProductResult(p, metrics, turns.samples, settings, remarks=[*turns.remarks, *remarks(turns.samples)])


def _matrices(
    weights: QTensor, p: ProductParams, cancel: threading.Event | None
) -> tuple[list[Linear] | list[TorchLinear], Callable[[], object], int]:
    """Copies that fill p.walk (at least one), a function that reads all of them, and their bytes."""
    try:
        library()
    except NoKernelsError:
        plain = [TorchLinear(weights)]
        plain += [TorchLinear(weights) for _ in range(_copies(p, plain[0].nbytes) - 1)]
        return plain, lambda: [each.read() for each in plain], sum(each.nbytes for each in plain)
    arena = Arena()
    packed = [Linear(weights, arena=arena)]
    for _ in range(_copies(p, packed[0].packed.nbytes) - 1):
        stop_if(cancel)
        packed.append(Linear(weights, arena=arena))
    read = reader_of([array for each in packed for array in each.packed.arrays])
    return packed, read, sum(each.packed.nbytes for each in packed)


def _copies(p: ProductParams, size: int) -> int:
    return max(1, round((p.walk << 20) / size))
