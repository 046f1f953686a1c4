"""What packing does to a model's own weights: bytes in the file and in both packed forms, and how long it takes.

Codes are packed as the file has them, so that only what a form rounds up can add bytes: outputs to whole panels of 16,
columns to whole units, and scales to four bytes where fp16 does not hold all of them. Whether every weight comes out
again with the file's bits is checked for all of them in C, and in Triton for all on a GPU and for the last row of
each matrix in the interpreter, which takes milliseconds for a row.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from nanokit.kernels.cpu.pack import Arena
from nanokit.lab.bench.timing import milliseconds
from nanokit.lab.experiments.kernel_params import KINDS, KernelsParams, coded, matrices, notes, opened
from nanokit.lab.lock import measuring
from nanokit.lab.progress import Progress, Silent, stop_if
from nanokit.lab.result import Result
from nanokit.lab.sides import Compiled, Side, Triton, missing
from nanokit.lab.table import Table
from nanokit.quant.qtensor import QTensor


@dataclass(frozen=True)
class PackingResult(Result):
    """Bytes of all layers: `file_bytes_of_<product>`, `c_bytes_of_…`, `triton_bytes_of_…` and, without the parts that
    hold no weight, `needed_bytes_of_…`; totals without the suffix. `<backend>_pack_ms` is of the whole model."""

    def table(self) -> Table:
        """Bits a weight, by product."""
        m, names = self.metrics, self.settings["packed"]
        rows = []
        for kind in (*KINDS, ""):
            at = f"_of_{kind}" if kind else ""
            weights = m[f"weights{at}"]
            cells = [f"{8 * m[f'{name.lower()}_bytes{at}'] / weights:.3f}" for name in ("file", *names)]
            stored = self.settings["stored"].get(kind, "")
            rows.append((kind or "all", stored, f"{weights / 1e6:.2f}", *cells, self._parts(at)))
        columns = ("product", "in the file", "weights (1e6)", "file", *names, "codes + scales + minimums")
        return Table(columns, rows, right=columns[2:])

    def _parts(self, at: str) -> str:
        m = self.metrics
        return " + ".join(f"{8 * m[f'{part}_bytes{at}'] / m[f'weights{at}']:.3f}" for part in PARTS)

    @property
    def intact(self) -> bool:
        """Whether every row that was looked at came out again with the file's bits."""
        m, names = self.metrics, [name.lower() for name in self.settings["packed"]]
        return all(m[f"{name}_rows_equal"] == m[f"{name}_rows_checked"] for name in names)

    def checks(self) -> Table:
        """How long packing took and how many rows came out again with the file's bits."""
        m = self.metrics
        rows = [
            (name, f"{m[f'{name.lower()}_pack_ms'] / 1e3:.2f} s",
             f"{m[f'{name.lower()}_rows_equal']:.0f} of {m[f'{name.lower()}_rows_checked']:.0f}")
            for name in self.settings["packed"]
        ]  # fmt: skip
        return Table(("packed for", "time for these matrices", "rows with the file's bits"), rows)


PARTS = ("codes", "scales", "minimums")


def packing(
    p: KernelsParams, *, progress: Progress | None = None, cancel: threading.Event | None = None
) -> PackingResult:
    """Pack every matrix for every backend that packs and can run here.

    Raises StoppedError when cancelled, BusyError, and what `nanokit.load` raises of a model file."""
    progress = progress or Silent()
    tally: dict[str, float] = {}
    names = [name for name in ("C", "Triton") if name not in missing()]
    with measuring("packing"), torch.inference_mode():
        source, weights = opened(p.model)
        arena = Arena()  # of all matrices, as a bound model's
        progress.start(len(KINDS), "packing")
        for kind in KINDS:
            for matrix in matrices(weights, kind, p.layers):
                stop_if(cancel)
                found = coded(matrix)
                counted = {"file_bytes": source.stored[matrix.name].nbytes, "weights": found.codes.size}
                _add(tally, kind, counted | _needed(found))
                expected = torch.from_numpy(found.dequantize())
                for name in names:
                    _pack(tally, kind, name, found, arena, expected)
            progress.step(kind)
    stored = {kind: matrices(weights, kind, 1)[0].type for kind in KINDS}
    settings = {"model": source.name, "packed": names, "stored": stored, "missing": missing()}
    said = notes(each for kind in KINDS for each in matrices(weights, kind, p.layers))
    return PackingResult(p, tally, settings=settings, remarks=said)


def _add(tally: dict[str, float], kind: str, found: Mapping[str, float]) -> None:
    """To the product's sums and to the model's."""
    for name, value in found.items():
        for key in (name, f"{name}_of_{kind}"):
            tally[key] = tally.get(key, 0) + value


def _needed(q: QTensor) -> dict[str, float]:
    """Bytes of what a product needs and no more: codes of 4 or 8 bits, scales and minimums in fp16."""
    four = q.table is not None or (q.code_range[1] - q.code_range[0]) < 16
    return {
        "codes_bytes": q.codes.size / 2 if four else q.codes.size,
        "scales_bytes": 2 * q.scales.size,
        "minimums_bytes": 0 if q.minimums is None else 2 * q.minimums.size,
    }


def _pack(tally: dict[str, float], kind: str, name: str, found: QTensor, arena: Arena, expected: torch.Tensor) -> None:
    """Pack one matrix, and unpack it again off the clock. expected: the weights."""
    made: list[Side] = []

    def work() -> None:
        made.append(Compiled(found, arena) if name == "C" else Triton(found))
        made[0].finish()

    ms = milliseconds(work)
    [side] = made
    rows = torch.arange(found.shape[0])
    if not side.timed:
        rows = rows[-1:]
    equal = (side.unpack(rows) == expected[rows]).all(dim=1).sum()
    key = name.lower()
    _add(tally, kind, {f"{key}_bytes": side.nbytes})
    for suffix, value in (("pack_ms", ms), ("rows_equal", int(equal)), ("rows_checked", len(rows))):
        tally[f"{key}_{suffix}"] = tally.get(f"{key}_{suffix}", 0) + value
