"""What each activation mode changes on a model's own weights and inputs, product by product; and its time in C.

A text runs through the reference with nothing rounded, and what every product sees of it is kept. Then each mode rounds
that input as a backend would, and the error at the product's output is the rounding's alone times the weights:

    y = W x        e = W (rounded x - x)        SQNR = 10 log10(|y|^2 / |e|^2)      dB, of each row

in fp32, where y - W(rounded x) would first cancel the digits in question. Rows are summed up by their median: a few
rows of a model (its first token above all) are a hundred times larger than the others, and a ratio of sums would be
about them alone. `static` is calibrated on the text that comes before the one measured. Errors do not add up over
layers here; what comes out of the whole model is the roofline notebook's section on activations.
"""

import statistics
import threading
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from nanokit.kernels import reference
from nanokit.kernels.activations import check_columns, no_peaks, note_peak, quantize
from nanokit.kernels.cpu.pack import Arena
from nanokit.kv.pages import BLOCK_SIZE, PagedKV
from nanokit.lab.bench.timing import Rounds, Samples, in_turns
from nanokit.lab.experiments.gains import WALKS, walk
from nanokit.lab.experiments.kernel_params import KINDS, KernelsParams, KernelsResult, coded, matrices, notes, opened
from nanokit.lab.lock import measuring
from nanokit.lab.progress import Progress, Silent, stop_if
from nanokit.lab.sides import Compiled, Side, missing
from nanokit.lab.steadiness import remarks
from nanokit.lab.table import Table
from nanokit.model.batch import Batch
from nanokit.model.source import ModelSource
from nanokit.model.weights import Weights
from nanokit.paths import data_dir

BUDGET_S = {"smoke": 1.0, "quick": 5.0, "full": float("inf")}
PLACE = {"q": 0, "k": 0, "v": 0, "o": 1, "gate": 2, "up": 2, "down": 3}  # of kernels.activations.PLACES
TIMED, TIMED_ROWS = "up", (1, 8)  # the product whose time is taken, a step of decoding and one of verification
TEXT = "texts/lighthouse.txt"


@dataclass(frozen=True)
class RoundingResult(KernelsResult):
    """Series `sqnr_db_<product>_<mode>`: a layer each, the median over the rows of the text; `<mode>_ms_at_<rows>`."""

    @property
    def modes(self) -> list[str]:
        return self.asked.modes

    def layers(self, kind: str, mode: str) -> list[float]:
        """SQNR of a product in every layer, dB."""
        return self.samples[f"sqnr_db_{kind}_{mode}"]

    def table(self) -> Table:
        """SQNR of each product, the median over layers; the lowest of all; and the time of one product in C."""
        m, lines = self.metrics, []
        for mode in self.modes:
            lowest = min(min(self.layers(kind, mode)) for kind in KINDS)
            times = [f"{m[f'{mode}_ms_at_{rows}']:.3f}" if f"{mode}_ms_at_{rows}" in m else "-" for rows in TIMED_ROWS]
            cells = [f"{m[f'sqnr_db_{kind}_{mode}']:.1f}" for kind in KINDS]
            lines.append((mode, *cells, f"{lowest:.1f}", *times))
        timed = [f"ms, {rows} row{'s' * (rows > 1)} of {TIMED} in C" for rows in TIMED_ROWS]
        columns = ("activations", *(f"{kind} (dB)" for kind in KINDS), "worst layer", *timed)
        return Table(columns, lines, right=columns[1:])


def rounding(
    p: KernelsParams, *, progress: Progress | None = None, cancel: threading.Event | None = None
) -> RoundingResult:
    """Round the inputs of every product, then time one product by mode.

    Raises StoppedError when cancelled, BusyError, ParameterError for a mode whose groups do not divide the columns, and
    what `nanokit.load` raises of a model file."""
    progress = progress or Silent()
    with measuring("rounding"), torch.inference_mode():
        source, weights = opened(p.model)
        deep = len(weights.layers)
        looked_at = [*range(min(p.layers, deep)), deep]  # the last is the head
        progress.start(len(looked_at), "running a text")
        inputs, peaks = _inputs(source, weights, p.text_tokens)
        samples: Samples = {}
        for layer in looked_at:
            stop_if(cancel)
            for kind in ("head",) if layer == deep else KINDS[:-1]:
                matrix = matrices(weights, kind, layer + 1)[-1]
                place = 4 * layer + PLACE.get(kind, 0)
                for mode in p.modes:
                    check_columns(matrix.name, matrix.shape[1], mode)
                found = _sqnr(matrix.dense(), inputs[place], p.modes, float(peaks[place]))
                for mode, value in found.items():
                    samples.setdefault(f"sqnr_db_{kind}_{mode}", []).append(value)
            progress.step(f"layer {layer + 1}")
        timed, said = _times(weights, p, progress, cancel)
    samples |= timed
    said = [*notes(matrices(weights, TIMED, p.layers)), *said, *remarks(timed)]
    metrics = {name: statistics.median(values) for name, values in samples.items()}
    settings = {"model": source.name, "text": TEXT, "missing": missing()}
    return RoundingResult(p, metrics, samples, settings, remarks=said)


def _inputs(source: ModelSource, weights: Weights, length: int) -> tuple[dict[int, Tensor], Tensor]:
    """What each product sees of a text, and the peaks of the text before it."""
    bound = reference.bind(source.config, weights)
    ids = source.tokenizer.encode((data_dir() / TEXT).read_text("utf-8"))
    ids = (ids * (2 * length // len(ids) + 1))[: 2 * length]
    blocks = list(range(-(-length // BLOCK_SIZE)))
    pages = PagedKV(source.config, len(blocks), "fp32")
    before, text = (
        bound.plan(Batch(part, [length], [length], [blocks]), pages) for part in (ids[:length], ids[length:])
    )
    peaks, last = no_peaks(source.config.num_layers), 4 * source.config.num_layers
    note_peak(peaks, last, bound.run(before, peaks))
    inputs: dict[int, Tensor] = {}
    hidden = bound.run(text, observe=inputs.__setitem__)
    return {**inputs, last: hidden}, peaks


def _sqnr(weight: Tensor, x: Tensor, modes: list[str], peak: float) -> dict[str, float]:
    """By mode: the median over the rows of x of signal over noise at the output, dB."""
    signal = linear(x, weight).square().sum(1)
    found = {}
    for mode in modes:
        rounded = quantize(x, mode, peak if mode == "static" else None).dequantize()
        noise = linear(rounded - x, weight).square().sum(1)
        found[mode] = float((10 * torch.log10(signal / noise)).median())
    return found


def _times(
    weights: Weights, p: KernelsParams, progress: Progress, cancel: threading.Event | None
) -> tuple[Samples, list[str]]:
    """Milliseconds of a product of all layers' matrices in C by mode, in turns; nothing where there are no kernels."""
    if "C" in missing():
        return {}, []
    arena = Arena()
    layers: list[Side] = [Compiled(coded(each), arena) for each in matrices(weights, TIMED, p.layers)]
    walks = {f"{mode}_ms_at_{rows}": walk(layers, mode, rows) for rows in TIMED_ROWS for mode in p.modes}

    def visit() -> Samples:
        for each in walks.values():
            each()
        return in_turns(walks, WALKS)

    turns = Rounds(p.repeats, BUDGET_S[p.preset], progress=progress, cancel=cancel).run({"modes in C": visit})
    return turns.samples, turns.remarks
