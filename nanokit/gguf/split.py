"""Writing a model in several files, `name-00001-of-00003.gguf` and so on, as llama.cpp and gguf-py name and mark them.

A set is complete or absent. Its files are written in a folder of their own and take their places when all are there,
the first one last: a set without its first file is one that no reader takes. An old set of the name goes aside before,
and comes back where something fails.

The gguf library can split too. That was rejected: it says the alignment in the first file only, so that every other
alignment than 32 makes files whose tensors no reader can place; and it keeps all files open at once.
"""

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from nanokit.errors import ParameterError
from nanokit.gguf.shards import NAME, shard_name
from nanokit.gguf.values import ValueKind
from nanokit.gguf.write import Entry, Key, write_gguf
from nanokit.paths import scratch_name

EVERYWHERE = ("general.architecture", "general.alignment")  # in all files of a set
MOST = (1 << 16) - 1  # files, as split.count is stored


def write_split(
    target: Path, keys: Mapping[str, Key], entries: Iterable[Entry], shard_bytes: int | None = None
) -> list[Path]:
    """Write `target`, or, where its tensors have more than `shard_bytes` bytes (None: any number is fine), a set of
    files of that name; what had the name before is replaced at the end. Returns the files, in order.

    No file has more bytes of tensors, unless it is one larger tensor. Metadata are in the first one. Raises
    ParameterError for more files than a set can have, otherwise as `write_gguf`.
    """
    entries = list(entries)
    if shard_bytes is None:
        write_gguf(target, keys, entries)
        return [target]
    parts = list(_parts(entries, shard_bytes))
    if len(parts) > MOST:
        raise ParameterError(
            "the shards are too small", found=f"{len(parts)} files of {shard_bytes} bytes", needed=f"at most {MOST}"
        )
    with replacing_set(target) as scratch:
        if len(parts) == 1:
            write_gguf(scratch, keys, entries)
            return [target]
        names = [shard_name(scratch, i, len(parts)) for i in range(len(parts))]
        everywhere = {name: key for name, key in keys.items() if name in EVERYWHERE}
        for i, (name, part) in enumerate(zip(names, parts, strict=True)):
            write_gguf(name, {**(everywhere if i else keys), **_ties(i, len(parts), len(entries))}, part)
    return [target.with_name(name.name) for name in names]


def _parts(entries: list[Entry], shard_bytes: int) -> Iterator[list[Entry]]:
    """Tensors in order, as many in a file as fit."""
    part: list[Entry] = []
    held = 0
    for each in entries:
        if part and held + each.nbytes > shard_bytes:
            yield part
            part, held = [], 0
        part.append(each)
        held += each.nbytes
    yield part


def _ties(number: int, count: int, tensors: int) -> dict[str, Key]:
    """What makes files a set, in the kinds of value that the gguf library gives it."""
    return {
        "split.no": Key(ValueKind("UINT16"), number),
        "split.count": Key(ValueKind("UINT16"), count),
        "split.tensors.count": Key(ValueKind("INT32"), tensors),
    }


def files_named(target: Path) -> list[Path]:
    """What is there under the name: the file `target`, and the files of sets, of whatever number."""
    if not target.parent.is_dir():
        return []
    found = ((path, NAME.fullmatch(path.name)) for path in target.parent.iterdir())
    sets = sorted(path for path, match in found if match is not None and match["stem"] == target.stem)
    return [*([target] if target.exists() else []), *sets]


@contextmanager
def replacing_set(target: Path) -> Iterator[Path]:
    """A name in a scratch folder beside `target`, to write a file or a set to. At the end they take the place of
    whatever had the name; where an error comes first, everything is as it was. A process that is killed leaves the
    folder, with what was in it. Raises OSError."""
    folder = scratch_name(target)
    folder.mkdir()
    try:
        yield folder / target.name
        new = sorted(folder.iterdir(), reverse=True)
        with ExitStack() as undo:
            (folder / "old").mkdir()
            for each in files_named(target):
                _move(each, folder / "old" / each.name, undo)
            for each in new:
                _move(each, target.with_name(each.name), undo)
            undo.pop_all()
    finally:
        shutil.rmtree(folder)


def _move(path: Path, place: Path, undo: ExitStack) -> None:
    path.rename(place)
    undo.callback(place.rename, path)
