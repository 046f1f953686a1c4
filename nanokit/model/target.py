"""The file that a command is going to write: whatever can be refused of its place is refused before any work is done.

Found at the end, a folder that cannot be written costs the whole work; found never, a file of the model itself is lost.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from nanokit.errors import NanokitError, ParameterError
from nanokit.gguf.shards import NAME, shard_name
from nanokit.gguf.split import files_named
from nanokit.model.memory import parse_bytes
from nanokit.paths import scratch_name


def check_target(path: Path, *, suffixes: Sequence[str], force: bool, source_files: Iterable[Path] = ()) -> None:
    """Raise ParameterError for a name that does not end as one of `suffixes`, for a file that is there already (unless
    `force`), for a folder, and for one of `source_files`: what the new file is made from. Who does not know those yet
    calls `check_not_source` when they are known. Raises NanokitError for a name that no file can have."""
    if path.suffix not in suffixes:
        raise ParameterError(
            "the name of the new file says what it becomes",
            found=path.name,
            needed=" or ".join(f"…{suffix}" for suffix in suffixes),
        )
    _check_name(path)
    if path.exists() and (not force or path.is_dir()):
        raise ParameterError(
            f"{path.name} exists already", found=str(path), do="choose another name, or pass --force to replace a file"
        )
    check_not_source(path, source_files)


def check_shards(path: Path, size: int | str | None, *, force: bool) -> int | None:
    """Bytes of tensors in each file of a set that is going to be called `path`, None where it is one file. size: as
    `parse_bytes` takes it. Raises ParameterError for a size that is none, for a name that cannot be that of a set, and
    for files of the name that are there already (unless `force`)."""
    if size is None:
        return None
    nbytes = parse_bytes(size)
    if not nbytes:
        raise ParameterError("shards need a size", found=size, needed="such as 2GB")
    if path.suffix != ".gguf" or NAME.fullmatch(path.name):
        raise ParameterError(
            "this cannot be the name of a model in shards",
            found=path.name,
            needed="….gguf without numbers, which each file gets: name-00001-of-00003.gguf",
        )
    if (old := files_named(path)) and not force:
        raise ParameterError(
            f"{old[0].name} exists already", found=str(old[0]), do="choose another name, or pass --force to replace it"
        )
    return nbytes


def check_not_source(path: Path, source_files: Iterable[Path]) -> None:
    """Raise ParameterError for one of the files that the new one is made from."""
    if path.exists() and any(path.samefile(each) for each in source_files):
        raise ParameterError(
            f"{path.name} is a file of the model itself", found=str(path), do="write the new one under another name"
        )


def check_place(path: Path, *, sharded: bool = False) -> None:
    """Raise NanokitError where no file can be made. sharded: it may be a set of that name, whose files have longer
    ones."""
    _check_name(shard_name(path, 0, 1) if sharded else path)
    scratch = scratch_name(path)
    try:
        scratch.touch()
        scratch.unlink()
    except OSError as error:
        raise cannot_write(path, error.strerror or str(error)) from error


def _check_name(path: Path) -> None:
    """Raise NanokitError for a name that the file system does not take, such as one that is too long."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # ValueError: a zero byte
        raise cannot_write(path, str(getattr(error, "strerror", None) or error)) from error


def cannot_write(path: Path, found: str) -> NanokitError:
    """What is raised for a place where a file could not be made, or not be finished."""
    return NanokitError(
        f"{path.name} cannot be written", found=found, needed=f"a folder with room for it: {path.parent}",
        do="free space there, or choose another place",
    )  # fmt: skip
