"""Are the weights numbers that a trained model could have?

Every tensor is read once. A scale or weight that is no number is a fault. Rows that are all zero, and rows hundreds of
times larger than their neighbours, are said and not judged: pruned models have the first, and nobody knows every model.
"""

from collections.abc import Iterator

import numpy as np

from nanokit.errors import ModelFileError
from nanokit.gguf.reader import GGUFFile
from nanokit.model.calibrate import Progress
from nanokit.model.verify.report import Check, Verdict, listed
from nanokit.quant.formats import FORMATS

PART = "numbers"
HUGE = 1000.0  # times the median row of its matrix
EMBEDDING = ("token_embd.weight", "output.weight")  # rows of tokens that never came up may be anything


def numbers(file: GGUFFile, progress: Progress | None = None) -> list[Check]:
    """The checks of all tensors that hold weights."""
    broken: list[str] = []
    dead: list[str] = []
    huge: list[str] = []
    weights = {name: info for name, info in file.tensors.items() if info.type in FORMATS}
    for at, (name, info) in enumerate(weights.items()):
        if progress is not None:
            progress(at, len(weights), "reading the weights")
        try:
            values = file.tensor(name)
        except ModelFileError as error:
            broken.append(f"{name}: {error.found}")
            continue
        if len(info.shape) == 2 and name not in EMBEDDING:
            reach = np.maximum(values.max(axis=1), -values.min(axis=1))
            if zeros := int((reach == 0).sum()):
                dead.append(f"{name}: {zeros} of {len(reach)} rows are all zero")
            usual = float(np.median(reach))
            if usual > 0 and reach.max() > HUGE * usual:
                huge.append(f"{name}: {reach.max():g} in row {reach.argmax()}, where rows reach {usual:g}")
    return list(_checks(len(weights), broken, dead, huge))


def _checks(count: int, broken: list[str], dead: list[str], huge: list[str]) -> Iterator[Check]:
    found: tuple[tuple[str, list[str], Verdict, str], ...] = (
        ("finite weights", broken, "failed", f"in all {count} tensors of weights, scales included"),
        ("dead rows", dead, "warning", "no row of a matrix is all zero"),
        ("magnitudes", huge, "warning", f"no row is {HUGE:g} times as large as its matrix's median row"),
    )
    for name, faults, verdict, said in found:
        if faults:
            yield Check(PART, name, verdict, listed(faults))
        else:
            yield Check(PART, name, "ok", said)
