"""Where the bytes of a model file lie: codes, scales, minimums, plain numbers, header and padding, tensor by tensor.

Files of one nominal width differ in size because of what is not codes: a head and an embedding that were left in 16
bits, a scale for every 16 weights or for every 128, a second copy of a tied head. An account sorts every byte of a file
under one of five kinds, so that the difference of two files has an address:

    codes      whole numbers that stand for weights          scales, minimums    what codes are multiplied by, added to
    plain      weights as numbers (F32, F16, BF16)           padding             bytes that say nothing
    (and the header: names, shapes, vocabulary)

and the sum is the file's size, to the byte. Only headers are read, torch is not imported, and a file that the kit does
not load (another architecture, a foreign quantization) has an account all the same.

Of a safetensors file a tensor's kind is told by its name, as the tools in use spell them (`weight_scale`, `qzeros`,
`absmax`, …), and by its type; whole numbers with no scales beside them are counted as plain.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from nanokit.errors import ModelFileError
from nanokit.gguf.header import TensorInfo
from nanokit.gguf.reader import GGUFFile
from nanokit.model.directory import weight_names
from nanokit.quant.formats import FORMATS, Format

KINDS = ("codes", "scales", "minimums", "plain", "padding")
ROLES = ("embedding", "head", "attention", "feed-forward", "norms", "other")
LONGEST_HEADER = 100_000_000  # of a safetensors file, as the format's own library allows
_FLOATS = {"F64", "F32", "F16", "BF16"}
_SCALES = re.compile(r"scale|absmax|::seconds|::mean|\.d$")
_MINIMUMS = re.compile(r"minimum|zero")
_CODES = re.compile(r"packed|qweight|codes|fifths")
_ROLE = (
    ("norms", re.compile(r"norm")),
    ("embedding", re.compile(r"token_embd|embed_tokens|tok_embeddings")),
    ("head", re.compile(r"^output\.|lm_head")),
    ("attention", re.compile(r"attn|attention")),
    ("feed-forward", re.compile(r"ffn|mlp|feed_forward|expert")),
)


@dataclass(frozen=True)
class TensorBytes:
    """One tensor of a file. type: as the file names it; shape: as stored, in numpy's order; weights: that it stands
    for, 0 for scales and the like. The bytes of the five kinds; padding: what follows until the next tensor."""

    name: str
    type: str
    shape: tuple[int, ...]
    role: str
    weights: int
    codes: int = 0
    scales: int = 0
    minimums: int = 0
    plain: int = 0
    padding: int = 0

    @property
    def nbytes(self) -> int:
        """All of it, padding too."""
        return sum(getattr(self, kind) for kind in KINDS)


@dataclass(frozen=True)
class Account:
    """A model's bytes. name: of the file or folder; header: bytes before the first tensor, of all files together;
    alignment: on which tensors begin, in bytes; metadata: the file's own, or that of the folder's config.json."""

    name: str
    form: str
    header: int
    alignment: int
    tensors: tuple[TensorBytes, ...]
    metadata: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        """The size of the file or files."""
        return self.header + sum(tensor.nbytes for tensor in self.tensors)

    @property
    def weights(self) -> int:
        return sum(tensor.weights for tensor in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        """Of everything but the header."""
        return 8 * (self.nbytes - self.header) / self.weights if self.weights else 0.0

    def of(self, kind: str, role: str | None = None) -> int:
        """Bytes of a kind, in all tensors or in those of a role."""
        return sum(getattr(each, kind) for each in self.tensors if role in (None, each.role))

    def role(self, role: str) -> "Account":
        """The tensors of one role alone, without the header."""
        return Account(
            self.name, self.form, 0, self.alignment, tuple(t for t in self.tensors if t.role == role), self.metadata
        )


def account(path: str | Path) -> Account:
    """The account of a GGUF file (with its shards), a safetensors file, or a folder of them.

    Raises ModelFileError for what is neither, and for files that are damaged or incomplete."""
    path = Path(path).expanduser()
    if path.is_dir():
        names = weight_names(path)
        return _of_safetensors(path, [path / name for name in names if (path / name).is_file()])
    if path.suffix == ".safetensors":
        if not path.is_file():
            raise ModelFileError(f"there is no file {path}", needed="a .gguf or .safetensors file, or a folder of them")
        return _of_safetensors(path, [path])
    return _of_gguf(GGUFFile.open(path))


# -- GGUF -------------------------------------------------------------------------------------------------------------


def _of_gguf(file: GGUFFile) -> Account:
    tensors, header = [], 0
    for path in file.files:
        size = path.stat().st_size
        infos = sorted((info for info in file.tensors.values() if info.file == path), key=lambda info: info.offset)
        starts = [info.offset for info in infos]
        header += starts[0] if starts else size
        for info, end in zip(infos, [*starts[1:], size][: len(infos)], strict=True):
            tensors.append(_gguf_tensor(info, end - info.offset - info.nbytes))
    return Account(file.path.name, "GGUF", header, file.alignment, tuple(tensors), file.metadata)


def _gguf_tensor(info: TensorInfo, padding: int) -> TensorBytes:
    stored = FORMATS.get(info.type)
    blocks = prod(info.shape) // stored.block_size if stored else 0
    parts = block_parts(stored) if stored else {"plain": info.nbytes}
    found = {kind: nbytes * (blocks if stored else 1) for kind, nbytes in parts.items()}
    return TensorBytes(info.name, info.type, info.shape, role_of(info.name), prod(info.shape), **found, padding=padding)


def block_parts(stored: Format) -> dict[str, int]:
    """Bytes of one block by kind. Of types that only the gguf library reads, whose grids and signs are no plain codes,
    everything counts as codes."""
    if stored.dtype is not None:
        return {"plain": stored.block_bytes}
    if stored.unpack is None:
        return {"codes": stored.block_bytes}
    lowest, highest = stored.code_range
    codes = stored.block_size * (highest - lowest).bit_length() // 8
    _, _, minimums = stored.unpack(np.zeros((1, stored.block_bytes), np.uint8))
    rest = stored.block_bytes - codes
    halves = rest // 2 if minimums is not None else 0  # in all types that have both, they take as much
    return {"codes": codes, "scales": rest - halves, "minimums": halves}


def role_of(name: str) -> str:
    """What a tensor is for, by its name in either naming."""
    return next((role for role, pattern in _ROLE if pattern.search(name)), "other")


# -- safetensors ------------------------------------------------------------------------------------------------------


def _of_safetensors(path: Path, files: list[Path]) -> Account:
    if not files:
        raise ModelFileError(
            f"{path.name} holds no safetensors weights",
            found=", ".join(sorted(each.name for each in path.iterdir())[:4]) or "an empty folder",
            needed="a .gguf file, a .safetensors file, or a folder of them",
        )
    header, tensors, metadata = 0, [], _folder_facts(files[0].parent)
    for file in files:
        before, entries, said = read_safetensors_header(file)
        header += before
        ours = _of_this_kit(said)
        metadata = {**said, **ours, **metadata}
        named = {name: str(entry["format"]) for name, entry in ours.get("entries", {}).items()}
        tensors += _safetensors_tensors(entries, file.stat().st_size - before, named)
    return Account(path.name, "safetensors", header, 8, tuple(tensors), metadata)


def read_safetensors_header(path: Path) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Bytes before the data, entries by tensor name ({dtype, shape, data_offsets}) and the file's own metadata.

    Raises ModelFileError. The library that reads such files keeps the offsets to itself, and padding is in them."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(LONGEST_HEADER, size - 8):
            raise _damaged(path, f"a header of {length} bytes in a file of {size}")
        text = file.read(length)
    try:
        entries = json.loads(text)
        said = entries.pop("__metadata__", {})
        ends = [entry["data_offsets"][1] for entry in entries.values()]
        lengths = [entry["data_offsets"][1] - entry["data_offsets"][0] for entry in entries.values()]
        [prod(entry["shape"]) for entry in entries.values() if entry["dtype"]]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise _damaged(path, f"{type(error).__name__} in the header") from error
    if max(ends, default=0) > size - 8 - length or min(lengths, default=0) < 0:
        raise _damaged(path, f"tensors up to byte {8 + length + max(ends)} in a file of {size}")
    return 8 + length, entries, said


def _damaged(path: Path, found: str) -> ModelFileError:
    return ModelFileError(
        f"{path.name} cannot be read as safetensors",
        found=found,
        needed="a complete safetensors file",
        do="download it again; a partial download and a Git LFS pointer look like this",
    )


def _folder_facts(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        return {}
    try:
        facts = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path.name} cannot be read", found=error, needed="a JSON object in UTF-8") from error
    return facts if isinstance(facts, dict) else {}


def _of_this_kit(said: Mapping[str, Any]) -> dict[str, Any]:
    """What the kit notes in the files that it writes (nanokit/model/saved.py): policy, source, the format of each
    matrix, and facts as the file had them that the model came from. {} for the files of others."""
    try:
        noted = json.loads(said.get("nanokit", "{}"))
        facts = noted.get("gguf") or json.loads(noted.get("files", {}).get("config.json", "{}"))
        return {**facts, **{key: noted[key] for key in ("policy", "source", "entries") if key in noted}}
    except (ValueError, TypeError, AttributeError):
        return {}


def _safetensors_tensors(entries: Mapping[str, Any], data: int, formats: Mapping[str, str]) -> list[TensorBytes]:
    """data: bytes after the header; formats: of matrices whose codes are called `<name>::codes`."""
    ordered = sorted(entries.items(), key=lambda item: item[1]["data_offsets"][0])
    ends = [*(entry["data_offsets"][0] for _, entry in ordered[1:]), data]
    bases = {_base(name) for name in entries if _SCALES.search(name)}
    tensors = []
    for (name, entry), end in zip(ordered, ends, strict=True):
        first, last = entry["data_offsets"]
        kind, each = _kind(name, entry["dtype"], _base(name) in bases)
        tensors.append(
            TensorBytes(
                name,
                formats.get(name.removesuffix("::codes"), entry["dtype"]),
                tuple(entry["shape"]),
                role_of(name),
                prod(entry["shape"]) * each,
                **{kind: last - first},
                padding=end - last,
            )
        )
    return tensors


def _base(name: str) -> str:
    """What codes, scales and zeros of one matrix have in common: the name up to its last dot."""
    return name.rpartition(".")[0]


def _kind(name: str, dtype: str, has_scales: bool) -> tuple[str, int]:
    """The kind of a tensor, and the weights that one element of it stands for."""
    last = name.rpartition(".")[2]
    if _SCALES.search(last):
        return "scales", 0
    if _MINIMUMS.search(last):
        return "minimums", 0
    if dtype in _FLOATS or not (has_scales or _CODES.search(last)):
        return "plain", 1
    if last == "fifths":  # the high bits of codes that are counted already
        return "codes", 0
    return "codes", {"U8": 2, "I32": 8}.get(dtype, 1)  # nibbles two or eight in a piece; INT8 and FP8 by themselves
