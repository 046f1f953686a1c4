"""Is it a sound GGUF file? What the reader checks, part by part, up to the first that fails.

Nothing after a broken part can be read: where it begins is not known. So those are "not checked", and that is all that
can honestly be said of them.
"""

from pathlib import Path

from nanokit.errors import ModelFileError
from nanokit.gguf.cursor import PARTS, START, HeaderError
from nanokit.gguf.reader import GGUFFile
from nanokit.model.verify.report import Check

PART = "structure"


def structure(path: Path) -> tuple[list[Check], GGUFFile | None]:
    """The checks, and the file where it could be opened. Raises ModelFileError for a path that leads to no file."""
    try:
        file = GGUFFile.open(path)
    except HeaderError as error:
        at = PARTS.index(error.part)
        good = [Check(PART, name, "ok", "") for name in PARTS[:at]]
        return [*good, _failed(path, error.part, error), *_unread(PARTS[at + 1 :])], None
    except ModelFileError as error:
        if not path.is_file():
            raise
        with path.open("rb") as begin:
            name = "shards" if begin.read(4) == b"GGUF" else START
        return [_failed(path, name, error), *_unread(PARTS[1:] if name == START else ())], None
    return [*_sound(file), *_rest(file)], file


def _failed(path: Path, name: str, error: ModelFileError) -> Check:
    what = error.what.removeprefix(f"{path}: ").removeprefix(f"{path} ")
    advice = f"; {error.do}" if error.do else ""
    return Check(PART, name, "failed", f"{what}; found {error.found}; needed {error.needed}{advice}")


def _unread(names: tuple[str, ...]) -> list[Check]:
    return [Check(PART, name, "not checked", "the header cannot be read so far") for name in names]


def _sound(file: GGUFFile) -> list[Check]:
    types = sorted({info.type for info in file.tensors.values()})
    arrays = sum(isinstance(value, list) for value in file.metadata.values())
    said = (
        "GGUF, little-endian" + (f", {len(file.files)} shards" if len(file.files) > 1 else ""),
        f"{len(file.tensors)} tensors, {len(file.metadata)} keys",
        f"none twice, strings in UTF-8, {arrays} arrays of their length",
        f"{file.alignment} bytes",
        f"none twice, types {', '.join(types)}, rows of whole blocks",
        f"aligned, without gap or overlap, from byte {min((i.offset for i in file.tensors.values()), default=0)} on",
    )
    return [Check(PART, name, "ok", each) for name, each in zip(PARTS[:-1], said, strict=True)]


def _rest(file: GGUFFile) -> list[Check]:
    """The last part: every tensor is in its file, and nothing else is behind them."""
    ends: dict[Path, int] = {}
    for info in file.tensors.values():
        ends[info.file] = max(ends.get(info.file, 0), info.offset + info.nbytes)
    surplus = {path: path.stat().st_size - end for path, end in ends.items()}
    beyond = {path.name: n for path, n in surplus.items() if n not in (0, -ends[path] % file.alignment)}
    if beyond:
        said = "; ".join(
            f"{n} bytes follow the last tensor of {name}, which nothing names" for name, n in beyond.items()
        )
        return [Check(PART, PARTS[-1], "warning", said)]
    total = sum(path.stat().st_size for path in file.files)
    return [Check(PART, PARTS[-1], "ok", f"{total:,} bytes: every tensor is there, and nothing follows the last")]
