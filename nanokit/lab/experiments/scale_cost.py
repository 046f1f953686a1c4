"""What finer scales cost: the time of a layer's products in C, by what shares a scale; and in bytes.

A scale for each row is no extra step: it is multiplied in where the codes of a group have been added up, and a row is
then one group. So is a scale for every 64 columns, in nine groups. All formats run through the same kernel, one row of
inputs, in turns. There is nothing to reshape: scales lie beside their codes in the order in which the product needs
them.
"""

import statistics
import threading
from dataclasses import dataclass

import torch

from nanokit.kernels.cpu.pack import Arena
from nanokit.lab.bench.timing import Rounds, Samples, Visit, in_turns
from nanokit.lab.experiments.gains import walk
from nanokit.lab.experiments.kernel_params import opened
from nanokit.lab.experiments.range_params import RangeParams, RangeResult
from nanokit.lab.experiments.spread import chosen_layers
from nanokit.lab.lock import measuring
from nanokit.lab.progress import Progress, Silent, stop_if
from nanokit.lab.sides import Compiled
from nanokit.lab.steadiness import remarks
from nanokit.lab.table import Table
from nanokit.quant.weight_format import weight_format

SCOPES = ("int4-sym-tensor", "int4-sym-channel", "int4-sym-g64", "int4-sym-g32")
# What has the same input: products of one width.
PLACES = {"attn": (("q", "k", "v"), ("o",)), "ffn": (("gate", "up"), ("down",))}
MODE = "a8g32"
BUDGET_S = {"smoke": 1.0, "quick": 4.0, "full": float("inf")}
WALKS = 3


@dataclass(frozen=True)
class CostResult(RangeResult):
    """Series `<place>_ms_<format>`: of one layer's products of one row; metrics: medians, `<place>_bytes_<format>`."""

    def table(self) -> Table:
        """By format: attention's and feed-forward's milliseconds, and bytes, of a layer."""
        m, rows = self.metrics, []
        for name in SCOPES:
            cells = []
            for place in PLACES:
                values = self.samples[f"{place}_ms_{name}"]
                cells += [f"{m[f'{place}_ms_{name}']:.4f}", f"{min(values):.4f}", f"{m[f'{place}_bytes_{name}']:,.0f}"]
            rows.append((name, *cells))
        columns = ["format"]
        for place in PLACES:
            columns += [f"{place}: ms a layer", f"{place}: fastest", f"{place}: bytes a layer"]
        return Table(columns, rows, right=columns[1:])

    def added_ms(self, finer: str, coarser: str, place: str) -> float:
        """What the finer scales add to a token's time, of all layers, by the fastest of the samples; it may be
        negative."""
        fastest = [min(self.samples[f"{place}_ms_{name}"]) for name in (finer, coarser)]
        return float((fastest[0] - fastest[1]) * self.settings["layers_of_the_model"])


def scale_cost(
    p: RangeParams, *, progress: Progress | None = None, cancel: threading.Event | None = None
) -> CostResult:
    """Pack the products of some layers in every format, and time them in turns.

    Raises NoKernelsError where there is no compiler, StoppedError when cancelled, BusyError, and what `nanokit.load`
    raises of a model file."""
    progress = progress or Silent()
    with measuring("the cost of scales"), torch.inference_mode():
        source, weights = opened(p.model)
        chosen = chosen_layers(len(weights.layers), p.layers)
        metrics: dict[str, float] = {}
        walks: dict[str, Visit] = {}
        progress.start(len(SCOPES), "packing")
        for name in SCOPES:
            arena, each = Arena(), weight_format(name)
            for place, inputs in PLACES.items():
                sides: list[list[Compiled]] = [[] for _ in inputs]
                for index in chosen:
                    stop_if(cancel)
                    for part, roles in zip(sides, inputs, strict=True):
                        for role in roles:
                            matrix = getattr(weights.layers[index], role).weight
                            part.append(Compiled(each.quantize(matrix.dense().numpy(), matrix.name), arena))
                metrics[f"{place}_bytes_{name}"] = sum(x.nbytes for part in sides for x in part) / len(chosen)
                walks[f"{place}_ms_{name}"] = _of_a_layer(f"{place}_ms_{name}", sides, len(chosen))
            progress.step(name)
        turns = Rounds(p.repeats, BUDGET_S[p.preset], progress=progress, cancel=cancel).run(walks)
    metrics |= {name: statistics.median(values) for name, values in turns.samples.items()}
    settings = {"model": source.name, "layers_of_the_model": len(weights.layers), "activations": MODE}
    said = [*turns.remarks, *remarks(turns.samples)[:1]]
    return CostResult(p, metrics, turns.samples, settings, remarks=said)


def _of_a_layer(name: str, sides: list[list[Compiled]], layers: int) -> Visit:
    walked = [(walk(part, MODE, 1), len(part) / layers) for part in sides]

    def once() -> float:
        return sum(each() * count for each, count in walked)

    def visit() -> Samples:
        once()
        return in_turns({name: once}, WALKS)

    return visit
