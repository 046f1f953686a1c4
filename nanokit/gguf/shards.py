"""A model in several files, `name-00001-of-00003.gguf` and so on, as llama.cpp and gguf-py split them.

Each file is a sound GGUF file with its own tensors; the first carries the metadata; `split.count`,
`split.no` (from 0) and `split.tensors.count` (of all files together) tie them up. Any of them may be
opened: the siblings are found by name. A set is joined when every file is there and agrees, and refused by
name otherwise; joining what is there was rejected, for a missing layer would be noticed far from its cause.
"""

import re
from pathlib import Path
from typing import NoReturn

from nanokit.errors import ModelFileError
from nanokit.gguf.header import Header, TensorInfo, read_header

NAME = re.compile(r"(?P<stem>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def shard_name(target: Path, index: int, count: int) -> Path:
    """The name of one file of a set that is called `target`, by its number from 0."""
    return target.with_name(f"{target.stem}-{index + 1:05d}-of-{count:05d}.gguf")


def read_shards(path: Path) -> list[Header]:
    """The headers of all files of the model that `path` belongs to, in order; one for a model in one file.

    Raises ModelFileError, naming the file, when a shard is missing, renamed or does not agree with the
    others.
    """
    opened = read_header(path)
    count = _number(opened, "split.count", default=1)
    if count <= 1:
        return [opened]
    paths = _siblings(opened, count)
    for i, shard in enumerate(paths):
        if not shard.exists():
            _refuse(shard, f"shard {i + 1} of {count} is missing", "no such file", f"all {count} files", _FETCH)
    headers = [opened if shard == path else read_header(shard) for shard in paths]
    for i, header in enumerate(headers):
        _check(header, i, headers[0])
    _check_tensors(headers)
    return headers


_FETCH = "put all files of one download into one directory"


def _siblings(opened: Header, count: int) -> list[Path]:
    """The names of all shards, from the name of the one that was opened."""
    match = NAME.fullmatch(opened.path.name)
    number = _number(opened, "split.no", default=-1) + 1
    if match is None or int(match["count"]) != count or int(match["no"]) != number:
        _refuse(
            opened.path,
            f"the file is shard {number} of {count}, but its name does not say so",
            opened.path.name,
            f"a name that ends in -{number:05d}-of-{count:05d}.gguf",
            "give the file its own name back, or join the shards with llama-gguf-split --merge",
        )
    target = opened.path.with_name(f"{match['stem']}.gguf")
    return [shard_name(target, i, count) for i in range(count)]


def _check(header: Header, i: int, first: Header) -> None:
    """Refuse a shard of another set or another model."""
    wanted = {
        "split.count": first.metadata["split.count"],
        "split.no": i,
        "split.tensors.count": _number(first, "split.tensors.count"),
    }
    for key, value in wanted.items():
        if _number(header, key) != value:
            _refuse(header.path, f"{key} does not fit this shard", header.metadata[key], value, _FETCH)
    for key in header.metadata.keys() & first.metadata.keys() - wanted.keys() - {"general.alignment"}:
        if header.metadata[key] != first.metadata[key]:
            found, needed = repr(header.metadata[key])[:80], repr(first.metadata[key])[:80]
            _refuse(header.path, f"{key} differs from the first shard's", found, needed, _FETCH)


def _check_tensors(headers: list[Header]) -> None:
    """Every tensor in one file only, and as many as the set should have."""
    seen: dict[str, TensorInfo] = {}
    for header in headers:
        for name, info in header.tensors.items():
            if name in seen:
                what = f"tensor {name!r} is also in another shard"
                _refuse(header.path, what, seen[name].file.name, "each tensor in one file", _FETCH)
            seen[name] = info
    total = _number(headers[0], "split.tensors.count")
    if len(seen) != total:
        what = "the shards do not hold all tensors"
        _refuse(headers[0].path, what, f"{len(seen)} tensors", f"{total}", _FETCH)


def _number(header: Header, key: str, default: int | None = None) -> int:
    value = header.metadata.get(key, default)
    if not isinstance(value, int):
        _refuse(header.path, f"the shard has no usable {key}", repr(value), "a whole number", _FETCH)
    return value


def _refuse(path: Path, what: str, found: object, needed: object, do: str) -> NoReturn:
    raise ModelFileError(f"{path}: {what}", found=found, needed=needed, do=do)
