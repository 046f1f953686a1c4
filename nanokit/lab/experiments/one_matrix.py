"""One matrix and one format: where the weights lie, where the levels are, and what is lost. Arithmetic, no model run.

The levels drawn are those of one group (that of the largest weight), since each group has its own; of a scale for the
whole matrix there is one set. Small enough to redraw while a slider moves.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import plotly.graph_objects as go

from nanokit.lab import plots
from nanokit.lab.experiments.kernel_params import opened
from nanokit.lab.experiments.range_params import ROLES
from nanokit.lab.experiments.spread import NORMAL, SEED, of_rounding
from nanokit.lab.params import Params, experiment_params, knob
from nanokit.lab.progress import Progress
from nanokit.lab.result import Result
from nanokit.quant.integer import fitting_groups
from nanokit.quant.storage import nominal_bits
from nanokit.quant.weight_format import weight_format

KINDS = ("int4-sym", "int4-asym", "int8-sym", "nvfp4", "mxfp4", "nf4", "q4_0")
GROUPS = ("g16", "g32", "g64", "g96", "g192", "channel", "tensor")
BINS = 121
ROWS = 192  # of a matrix that are looked at, at most: a histogram needs no more, and a slider no longer


@experiment_params
class MatrixParams(Params):
    """Which matrix, and how it is rounded."""

    model: str = knob("", "GGUF file, folder of safetensors or hub name; empty is the default model")
    tensor: str = knob("down", "which matrix; normal is random numbers", choices=(*ROLES, "normal"))
    layer: int = knob(0, "which layer; the last one where there are fewer", low=0, high=199)
    kind: str = knob("int4-sym", "format", choices=KINDS)
    group: str = knob("tensor", "what shares a scale, of the integer formats", choices=GROUPS)


@dataclass(frozen=True)
class MatrixResult(Result):
    """Metrics: see `spread.of_rounding`. centres: of the histogram's bins; before, after: shares of weights in them;
    levels: of the group with the largest weight."""

    centres: Sequence[float] = field(default_factory=tuple)
    before: Sequence[float] = field(default_factory=tuple)
    after: Sequence[float] = field(default_factory=tuple)
    levels: Sequence[float] = field(default_factory=tuple)


def one_matrix(
    p: MatrixParams, *, progress: Progress | None = None, cancel: threading.Event | None = None
) -> MatrixResult:
    """Round some rows of a matrix. Raises ParameterError for a group that does not divide the columns, and what
    `nanokit.load` raises of a model file."""
    w = _rows(p.model, p.tensor, p.layer)
    name = f"{p.kind}-{p.group}" if p.kind.startswith("int") else p.kind
    q = weight_format(name).quantize(w, f"{p.tensor} of layer {p.layer}")
    both = w, q.dequantize()
    reach = [1.02 * float(extreme([extreme(each) for each in both])) for extreme in (np.min, np.max)]
    edges = np.linspace(reach[0], reach[1], BINS + 1)
    counts = [np.histogram(each, edges)[0] / w.size for each in both]
    place = np.unravel_index(np.abs(w).argmax(), w.shape)
    group = (place[0], place[1] // q.group)
    codes = np.arange(q.code_range[0], q.code_range[1] + 1) if q.table is None else np.unique(q.table)
    levels = codes * q.scales[group] + (0.0 if q.minimums is None else q.minimums[group])
    metrics = of_rounding(w, q) | {
        "width": nominal_bits(weight_format(name), w.shape),
        "largest": float(np.abs(w).max()),
    }
    metrics["std"] = float(w.std())
    fitting = fitting_groups(w.shape[1])
    return MatrixResult(
        p, metrics, settings={"format": name, "columns": w.shape[1], "groups": fitting},
        centres=((edges[1:] + edges[:-1]) / 2).tolist(), before=counts[0].tolist(), after=counts[1].tolist(),
        levels=levels.tolist(),
    )  # fmt: skip


def matrix_figure(p: MatrixParams) -> go.Figure:
    """What a panel redraws while a slider moves."""
    return plots.one_matrix(one_matrix(p))


@lru_cache(maxsize=8)
def _rows(model: str, tensor: str, layer: int) -> np.ndarray:
    if tensor == "normal":
        return np.random.default_rng(SEED).standard_normal((ROWS, NORMAL[1]), np.float32)
    _, weights = opened(model)
    matrix = getattr(weights.layers[min(layer, len(weights.layers) - 1)], tensor).weight
    rows: np.ndarray = matrix.dense().numpy()[:ROWS]
    return rows
