"""A remedy for alignment that is passed on: write other values into the header of a GGUF file.

The account says that attention is aligned again after INT4 by "head count 32" and a rope base that is a string (claim
Q21). Alignment is a matter of where bytes lie. So both are written into a copy of the model's file, and two things are
looked at: whether tensors begin elsewhere in a cache line after it, and whether a loader that checks what it reads can
still run the model. A header of another length does move what comes after it, by whole steps of the file's own
alignment and whatever it says. But keys and values are in no file, and weights reach the kernels in buffers that the
packer puts on multiples of 64 bytes: nothing that attention reads is where a file has it.
"""

import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nanokit.errors import NanokitError, ParameterError
from nanokit.gguf.header import ValueKind, read_header
from nanokit.gguf.write import Key, rewrite
from nanokit.lab.experiments.alignment_params import LINE, AlignmentParams, AlignmentResult
from nanokit.lab.experiments.kernel_params import opened
from nanokit.lab.progress import Progress, Silent, stop_if
from nanokit.lab.table import Table
from nanokit.model.load import open_model
from nanokit.model.source import GGUFSource
from nanokit.model.weights import find_weights

UNCHANGED = "as it is"


@dataclass(frozen=True)
class RemedyResult(AlignmentResult):
    """Metrics: `moved_<copy>`, tensors that begin elsewhere in a cache line than in a copy without a change; `tensors`,
    how many there are; `opens_<copy>`, 1 or 0. said: by copy, what the loader said of it, "" where it opened."""

    said: Mapping[str, str] = field(default_factory=dict)

    def table(self) -> Table:
        """A copy a row."""
        rows = [(name, f"{self.metrics[f'moved_{name}']:.0f}", words or "opens") for name, words in self.said.items()]
        return Table(
            ("header", "tensors elsewhere in a cache line", "loader"), rows, right=("tensors that begin elsewhere",)
        )

    @property
    def verdict_q21(self) -> str:
        """Of the claim that such a header aligns attention again."""
        copies = [name for name in self.said if name != UNCHANGED]
        opening = [name for name in copies if self.metrics[f"opens_{name}"]]
        fate = f"{' and '.join(opening)} opens, as another model" if opening else "the loader refuses both files"
        moved = max(self.metrics[f"moved_{name}"] for name in copies)
        where = (
            f"up to {moved:.0f} of {self.metrics['tensors']:.0f} tensors begin elsewhere in a cache line, as behind "
            "any header of another length"
            if moved
            else "every tensor begins where it did in its cache line"
        )
        return f"does not hold: {fate}; {where}, and the kernels' buffers are on 64 bytes whatever a file says"


def header_remedy(
    p: AlignmentParams, *, progress: Progress | None = None, cancel: threading.Event | None = None
) -> RemedyResult:
    """Write the copies, look where their tensors begin, and open them.

    Raises StoppedError when cancelled, ParameterError for a model that is not one GGUF file, OSError where there is no
    room for a copy.
    """
    progress = progress or Silent()
    source = opened(p.model)[0]
    if not isinstance(source, GGUFSource) or len(source.files) != 1:
        raise ParameterError(
            "only one GGUF file has such a header", found=source.name, needed="a model in one .gguf file"
        )
    metrics: dict[str, float] = {}
    said: dict[str, str] = {}
    copies = _copies(source)
    progress.start(len(copies), "writing headers")
    begins: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, keys in copies.items():
            stop_if(cancel)
            progress.step(name)
            path = Path(folder) / "copy.gguf"
            rewrite(source.files[0], path, {}, keys)
            found = _begins(path)
            begins = begins or found
            metrics["tensors"] = len(begins)
            metrics[f"moved_{name}"] = sum(found[tensor] != at for tensor, at in begins.items())
            said[name] = _refusal(path)
            metrics[f"opens_{name}"] = float(not said[name])
    return RemedyResult(p, metrics, settings={"model": source.name}, said=said)


def _copies(source: GGUFSource) -> dict[str, dict[str, Key]]:
    """Keys to be written, by copy. Where the model has 32 heads already, it is 33: the point is another number."""
    name = source.file.metadata["general.architecture"]
    heads = 32 if source.config.num_heads != 32 else 33
    base = str(source.file.metadata.get(f"{name}.rope.freq_base", 10000.0))
    return {
        UNCHANGED: {},
        f"head count {heads}": {f"{name}.attention.head_count": Key(ValueKind("UINT32"), heads)},
        "rope base a string": {f"{name}.rope.freq_base": Key(ValueKind("STRING"), base)},
    }


def _begins(path: Path) -> dict[str, int]:
    """Of every tensor, where in a cache line it begins."""
    return {name: info.offset % LINE for name, info in read_header(path).tensors.items()}


def _refusal(path: Path) -> str:
    """What opening the model says, in a line; "" where it opens."""
    try:
        find_weights((source := open_model(path)).config, source)
    except NanokitError as error:
        return f"refused: {error.what.removeprefix(f'{path}: ').removeprefix(f'{path.name}: ')}; found {error.found}"
    return ""
