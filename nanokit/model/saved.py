"""A model that nanokit quantized, in one safetensors file: written here, and read here.

    <name>                 a tensor that was not quantized, in the number type that it had (fp32 where it was a block
                           type without codes)
    <name>::codes          the arrays of a quantized one (quant/storage.py): any reader of safetensors opens them
    <name>::scales …
    metadata "nanokit"     JSON: {"schema", "policy", "source", "entries": {name: format, shape, group, …}, and either
                           "gguf": metadata of the file it came from, or "files": the folder's config.json, …}

Names are those of the file that the model came from, and so are configuration and tokenizer, which are read again by
the very readers that read that file: a second description of a model would be a second thing to keep true. Rows of q
and k stand in transformers' order, whatever they came from. The file is complete or absent: it is written beside its
place and renamed. No pickle, no code.
"""

import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nanokit.errors import ModelFileError
from nanokit.model.calibrate import Progress
from nanokit.model.config import ModelConfig, config_from_transformers
from nanokit.model.config_gguf import config_from_gguf
from nanokit.model.source import DESCRIPTIONS, FLOATS, ModelSource, check_vocabulary
from nanokit.model.tokenizer import Tokenizer
from nanokit.model.weights import Stored
from nanokit.paths import replacing
from nanokit.quant.qtensor import QTensor
from nanokit.quant.storage import SCALE_KINDS, Entry, Parts, check_entry, entry_of, parts_of, restore

SCHEMA = "nanokit.model/1"
KINDS = {"gguf": 0, "files": 1}  # of tensor names, by what describes the model
MARK = "::"
PARTS = ("codes", "fifths", "scales", "minimums", "seconds", "mean")
ARRAYS = {"U8": 1, "I8": 1, "F16": 2, "F32": 4}  # number types of the parts, and their bytes
_DAMAGED = "quantize the model again"


def write(source: ModelSource, path: Path, policy: str, progress: Progress | None = None) -> None:
    """Write every tensor of `source` as it gives it. policy: what is noted of how it was quantized; progress: called
    as (done, in all, name) after each tensor. Raises ModelFileError for weights that are not finite, OSError for a
    place that cannot be written; an existing file is replaced at the end."""
    tensors: dict[str, Tensor] = {}
    entries: dict[str, Any] = {}
    for number, (name, stored) in enumerate(source.stored.items(), 1):
        q = source.quantized(name, 0, stored.shape[0]) if stored.coding else None
        if q is None:
            tensors[name] = _as_stored(source.tensor(name), stored.type)
        else:
            entries[name] = entry_of(q).to_json()
            for part, values in parts_of(q).items():
                tensors[name + MARK + part] = torch.from_numpy(np.ascontiguousarray(values))
        if progress is not None:
            progress(number, len(source.stored), name)
    header = {"schema": SCHEMA, "policy": policy, "source": source.name, "entries": entries, **source.facts()}
    with replacing(path) as scratch:
        scratch.touch()
        mode = scratch.stat().st_mode  # as any new file here; the library makes its own readable by the owner alone
        save_file(tensors, scratch, {"format": "pt", "nanokit": json.dumps(header)})
        scratch.chmod(mode)


def _as_stored(tensor: Tensor, kind: str) -> Tensor:
    """In the number type that it had, unless that rounds it: awq and smooth change norms and biases."""
    kept = tensor.to(FLOATS.get(kind, torch.float32)).contiguous()
    return kept if torch.equal(kept.float(), tensor) else tensor.contiguous()


class QuantizedFile:
    """A source that reads such a file. header: the JSON object above."""

    def __init__(self, path: Path, *, rope_base: float | None = None) -> None:
        self.name = path.name
        self.files: tuple[Path, ...] = (path,)
        try:
            self._handle: Any = safe_open(path, framework="pt")
            metadata = self._handle.metadata() or {}
        except (SafetensorError, OSError) as error:
            raise ModelFileError(
                f"{path.name} cannot be read as safetensors", found=str(error), needed="a complete safetensors file"
            ) from error
        self.header = _header(metadata.get("nanokit"), path.name)
        self.policy = str(self.header.get("policy"))
        described = next((each for each in KINDS if isinstance(self.header.get(each), dict)), None)
        if described is None:
            raise _broken(path.name, "no description of the model", "gguf metadata, or the folder's files")
        self.kind = KINDS[described]
        self._entries = {name: _entry(name, entry) for name, entry in self.header["entries"].items()}
        self.stored = self._stored()
        self.config, self.tokenizer = self._described(rope_base)
        check_vocabulary(self.name, self.tokenizer, self.config)
        self.tokenizer.pad_to(self.config.vocab_size)

    def facts(self) -> dict[str, Any]:
        return {name: self.header[name] for name in KINDS if name in self.header}

    def tensor(self, name: str) -> Tensor:
        if name in self._entries:
            return torch.from_numpy(self._rows(name, 0, self._entries[name].shape[0]).dequantize())
        tensor: Tensor = self._handle.get_tensor(name).float()
        if not tensor.isfinite().all():
            raise ModelFileError(f"the tensor {name} holds infinities or NaN", needed="finite weights", do=_DAMAGED)
        return tensor

    def quantized(self, name: str, first: int, end: int) -> QTensor | None:
        return self._rows(name, first, end) if name in self._entries else None

    def _rows(self, name: str, first: int, end: int) -> QTensor:
        """Only these rows are read: a backend packs a large matrix some at a time."""
        entry = self._entries[name]
        parts: Parts = {}
        for key in self._parts[name]:
            piece = self._handle.get_slice(key)
            whole = piece.get_shape()[0] != entry.shape[0]  # one scale for all rows; or damage, which restore tells
            parts[key.split(MARK)[1]] = (piece[:] if whole else piece[first:end]).numpy()
        return restore(replace(entry, shape=(end - first, entry.shape[1])), parts, name, first, entry.shape[0])

    def _stored(self) -> dict[str, Stored]:
        stored: dict[str, Stored] = {}
        sizes: dict[str, int] = dict.fromkeys(self._entries, 0)
        self._parts: dict[str, list[str]] = {name: [] for name in self._entries}
        for key in self._handle.keys():  # noqa: SIM118 (not a mapping)
            piece = self._handle.get_slice(key)
            kind, shape = piece.get_dtype(), tuple(piece.get_shape())
            name, mark, part = key.partition(MARK)
            if mark and name in self._entries and part in PARTS and kind in ARRAYS:
                sizes[name] += math.prod(shape) * ARRAYS[kind]
                self._parts[name].append(key)
            elif mark or kind not in FLOATS or name in self._entries:
                raise _broken(self.name, f"{key} ({kind})", "arrays of its entries, and tensors of floats")
            else:
                stored[key] = Stored(shape, math.prod(shape) * FLOATS[kind].itemsize, kind)
        for name, entry in self._entries.items():
            stored[name] = Stored(entry.shape, sizes[name], entry.format, entry.coding)
        return stored

    def _described(self, rope_base: float | None) -> tuple[ModelConfig, Tokenizer]:
        if self.kind == 0:
            metadata: Mapping[str, Any] = self.header["gguf"]
            factors = self.tensor("rope_freqs.weight").tolist() if "rope_freqs.weight" in self.stored else None
            embedding = self.stored.get("token_embd.weight")
            if embedding is None:
                raise _broken(self.name, "no token_embd.weight", "a whole model")
            config = config_from_gguf(
                metadata, vocab_size=embedding.shape[0], tied_head="output.weight" not in self.stored,
                frequency_factors=factors, rope_base=rope_base,
            )  # fmt: skip
            return config, Tokenizer.from_gguf(metadata)
        files = self.header["files"]
        if not all(name in DESCRIPTIONS and isinstance(text, str) for name, text in files.items()):
            raise _broken(self.name, ", ".join(map(str, files))[:200], "no other files than " + ", ".join(DESCRIPTIONS))
        with tempfile.TemporaryDirectory() as folder:
            for name, text in files.items():
                Path(folder, name).write_text(text, "utf-8")
            return config_from_transformers(_object(files.get("config.json"), self.name), rope_base), (
                Tokenizer.from_directory(folder)
            )


def _header(text: str | None, name: str) -> dict[str, Any]:
    if text is None:
        raise ModelFileError(
            f"{name} is not a model of its own",
            found="safetensors without nanokit's header",
            needed="a file that nanokit quantize wrote, or the folder with config.json and tokenizer.json",
            do="name the folder that the file lies in",
        )
    header = _object(text, name)
    if header.get("schema") != SCHEMA or not isinstance(header.get("entries"), dict):
        raise _broken(name, f"schema {header.get('schema')!r}"[:80], SCHEMA)
    return header


def _object(text: str | None, name: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "")
    except (ValueError, RecursionError) as error:
        raise _broken(name, str(error), "JSON") from error
    if not isinstance(value, dict):
        raise _broken(name, type(value).__name__, "an object")
    return value


def _entry(name: str, entry: Any) -> Entry:
    """An entry that has been checked: later arithmetic may trust its numbers."""
    try:
        shape, code_range = tuple(entry["shape"]), tuple(entry["code_range"])
        found = Entry(entry["format"], shape, entry["group"], code_range, entry["scales"], float(entry["tensor_scale"]))
        whole = all(type(n) is int for n in (*shape, *code_range, found.group))
        sound = (
            whole and len(shape) == 2 and min(shape) > 0 and found.group > 0 and shape[1] % found.group == 0
            and len(code_range) == 2 and -128 <= code_range[0] < code_range[1] <= 127
            and found.scale_kind in SCALE_KINDS and 0 < found.tensor_scale < math.inf
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _broken(name, f"{entry!r}"[:120], "format, shape, group, code_range, scales, tensor_scale") from error
    if not sound or not isinstance(found.format, str):
        raise _broken(name, f"{entry!r}"[:120], "numbers that fit each other")
    check_entry(found, name)
    return found


def _broken(name: str, found: str, needed: str) -> ModelFileError:
    return ModelFileError(
        f"{name}: the header of the quantized model is damaged", found=found, needed=needed, do=_DAMAGED
    )
