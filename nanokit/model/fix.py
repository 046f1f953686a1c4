"""`nanokit model verify --fix`: what can be put right in a GGUF file from the file alone, as a new file.

Three things can: a structure that the sizes of the tensors and of the file prove (gguf/mend.py), a number that is
stored in the wrong kind of value (mend_keys.py), and bytes that belong to no tensor. The new file is verified before it
gets its name: where its structure is still wrong, or a weight is no number (tensors were read from the wrong place),
nothing is written. Whatever else is wrong is said, and why it is left: its right value stands in the model's source.

Rejected: a usual value for what is missing, and rows or matrices put back in the order in which a text gets likelier.
Both give a file that passes, and perhaps another model.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from nanokit.errors import ModelFileError, ParameterError
from nanokit.gguf.cursor import HeaderError
from nanokit.gguf.mend import Mended, mend
from nanokit.gguf.write import write_gguf
from nanokit.model.calibrate import Progress
from nanokit.model.export import counted
from nanokit.model.mend_keys import mended_keys
from nanokit.model.source import ModelSource
from nanokit.model.target import cannot_write, check_place, check_target
from nanokit.model.verify import numbers, structure
from nanokit.model.verify.behaviour import LAYERS, ORDER, ROW_ORDER
from nanokit.model.verify.meaning import HEAD, ROPE_BASE, ROPE_SCALING
from nanokit.model.verify.report import NEEDS_SOURCE, Check, Report
from nanokit.model.verify.run import verify
from nanokit.paths import replacing

FROM_SOURCE = "nanokit model repair {} OUT.gguf --from SOURCE"
_ORDER = "a text can only hint at the right order, and the mistake that made the wrong one may have made others"
# Why a check that failed is left as it is.
LEFT = {
    "required keys": "a number that is not stated could be any",
    ROPE_BASE: "a base that is not stated as a number could be any, and all of them load",
    ROPE_SCALING: "a key that nobody knows may say that the model is scaled, or nothing",
    "head counts": "more than one pair of counts fits the rows",
    "gate, up and down": "which rows are the gate is written nowhere in the file",
    HEAD: "a matrix that is not there cannot be made from others",
    "finite weights": "the number that was there is lost",
    ROW_ORDER: _ORDER,
    ORDER: _ORDER,
    LAYERS: _ORDER,
}
_ELSE = "what it should be stands nowhere in the file"


@dataclass(frozen=True)
class Fixed:
    """said: a sentence for each change; left: one for each check that still fails, and why; report: of the new file."""

    path: Path
    said: tuple[str, ...]
    left: tuple[str, ...]
    report: Report


def fix(
    file: str | Path,
    target: str | Path,
    against: ModelSource | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Fixed:
    """Write `target`: the GGUF file with what can be mended without a source, and verify it, against one if there is.

    force: replace a target that is there. Raises ParameterError for a sound file and for a target that cannot be;
    ModelFileError, with the reasons, for a file in which nothing can be mended and for one whose structure or weights
    are still wrong afterwards; NanokitError for a place that cannot be written. Then nothing is written.
    """
    path, broken = Path(target).expanduser(), Path(file).expanduser()
    found = _structure(broken)
    check_target(path, suffixes=(".gguf",), force=force, source_files=[broken])
    keys, said = mended_keys(found.keys)
    said = [*found.said, *said]
    if not said:
        _refuse(verify(broken, against, progress=progress))
    said += [
        f"{name} is left out: an empty array, which cannot be written"
        for name, key in found.keys.items()
        if key.kind.type == "ARRAY" and not key.value
    ]
    check_place(path)
    try:
        with replacing(path) as scratch:
            write_gguf(scratch, found.keys | keys, counted(found.entries, progress))
            report = verify(scratch, against, name=path.name, progress=progress)
            _check(broken.name, report, repairable=not found.said)
    except OSError as error:
        raise cannot_write(path, str(error)) from error
    return Fixed(path, tuple(said), tuple(_why(check) for check in report.failed), report)


def _structure(path: Path) -> Mended:
    try:
        return mend(path)
    except HeaderError as error:
        do = f"{error.do}; nothing was written, for what belongs there stands nowhere else in the file"
        raise HeaderError(error.what, found=error.found, needed=error.needed, do=do, part=error.part) from error


def _check(name: str, report: Report, *, repairable: bool) -> None:
    """Raise ModelFileError for a mended file that still cannot be right. repairable: the broken one can be opened."""
    wrong = [check for check in report.failed if check.part in (structure.PART, numbers.PART)]
    if wrong:
        raise ModelFileError(
            f"{name} cannot be mended without its source",
            found="; ".join(_why(check) for check in wrong),
            needed="tensors whose places and numbers are known",
            do=f"{FROM_SOURCE.format(name) + ' --inject TENSOR' if repairable else 'convert the model again'}; "
            "nothing was written",
        )


def _refuse(report: Report) -> NoReturn:
    """Of a file in which nothing was put right: what is wrong with it, and why that is left."""
    if report.failed:
        raise ModelFileError(
            f"{report.name} cannot be mended without its source",
            found="; ".join(_why(check) for check in report.failed),
            needed="the model that it was made from",
            do=f"{FROM_SOURCE.format(report.name)} (for tensors with --inject TENSOR); nothing was written",
        )
    unseen = ", ".join(check.name for check in report.checks if NEEDS_SOURCE in check.said)
    raise ParameterError(
        f"nothing in {report.name} is to be mended",
        found="no check that fails" + (f"; only a source tells about {unseen}" if unseen else ""),
        do=f"nanokit model verify {report.name} --against SOURCE" if unseen else None,
    )


def _why(check: Check) -> str:
    return f"{check.name}: {check.said}. It is left so: {LEFT.get(check.name, _ELSE)}"
