"""Where weights come from: one GGUF file (or its shards), or a directory of safetensors.

Opening a source reads headers only, so that the configuration, the tokenizer and the memory it would take are known
before anything is allocated. `torch` pickles (.bin, .pt) are refused: reading one runs code.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanokit.errors import ModelFileError
from nanokit.gguf.reader import GGUFFile
from nanokit.model.config import ModelConfig, config_from_transformers
from nanokit.model.config_gguf import config_from_gguf
from nanokit.model.directory import read_json, refuse_gguf_folder, weight_files
from nanokit.model.tokenizer import Tokenizer
from nanokit.model.weights import GLOBAL_NAMES, Stored, TensorSource
from nanokit.quant.formats import FORMATS
from nanokit.quant.qtensor import QTensor

# The files of a model folder that configuration and tokenizer are read from.
DESCRIPTIONS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
                "special_tokens_map.json", "chat_template.jinja")  # fmt: skip
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class ModelSource(TensorSource, Protocol):
    """A model that has been opened but not read. name: the file's or folder's own; files: all that it is read from."""

    name: str
    files: tuple[Path, ...]
    config: ModelConfig

    @property
    def tokenizer(self) -> Tokenizer: ...

    def facts(self) -> dict[str, Any]:
        """What the model is beside its tensors, in plain JSON: what its configuration and tokenizer are read from."""
        ...


@dataclass(frozen=True)
class Footprint:
    """Bytes of a model's weights. dense: all of them in fp32. per_token_*: what one decoded token reads, as stored
    and in fp32: everything but the embedding table, of which it reads a row, unless the head is tied to it. mapped:
    what stays in memory when the layers are left in the file, with room for one of them at a time. stored: all of them
    as stored. matrix_bits: bits per weight of the layers' matrices as stored, their scales included."""

    dense: int
    mapped: int
    per_token_stored: int
    per_token_dense: int
    stored: int
    matrix_bits: float


def footprint(source: ModelSource) -> Footprint:
    """The bytes of an opened model."""
    skipped = "" if source.config.tied_head else GLOBAL_NAMES["embedding"][source.kind] + ".weight"
    dense = {name: 4 * math.prod(tensor.shape) for name, tensor in source.stored.items()}
    layered = {name: size for name, size in dense.items() if name.startswith(("blk.", "model.layers."))}
    matrices = [name for name in layered if len(source.stored[name].shape) == 2]
    return Footprint(
        dense=sum(dense.values()),
        mapped=sum(dense.values()) - sum(layered.values()) + 2 * max(layered.values(), default=0),
        per_token_stored=sum(tensor.nbytes for name, tensor in source.stored.items() if name != skipped),
        per_token_dense=sum(size for name, size in dense.items() if name != skipped),
        stored=sum(tensor.nbytes for tensor in source.stored.values()),
        matrix_bits=32 * sum(source.stored[name].nbytes for name in matrices) / sum(dense[name] for name in matrices),
    )


class GGUFSource:
    """A GGUF file. Llama files keep q and k permuted for interleaved rope; `tensor` undoes it, by head counts.

    The tokenizer is built when it is asked for, which raises TokenizerError or ModelFileError for a vocabulary that
    cannot be used: keys and tensors can be looked at without it. `open_model` asks at once."""

    kind = 0

    def __init__(self, path: Path, *, rope_base: float | None = None) -> None:
        self.file = GGUFFile.open(path)
        self.name, self.files = path.name, self.file.files
        infos = self.file.tensors
        if "token_embd.weight" not in infos:
            raise ModelFileError(
                f"{path.name} holds no token embedding",
                found=f"{len(infos)} tensors" if infos else "a vocabulary without weights",
                needed="a whole language model",
                do="name the file of the language model (a projector or a vocabulary is only a part)",
            )
        factors = self.file.tensor("rope_freqs.weight") if "rope_freqs.weight" in infos else None
        self.config = config_from_gguf(
            self.file.metadata,
            vocab_size=infos["token_embd.weight"].shape[0],
            tied_head="output.weight" not in infos,
            frequency_factors=None if factors is None else factors.reshape(-1).tolist(),
            rope_base=rope_base,
        )
        self.stored = {
            name: Stored(info.shape, info.nbytes, info.type, kind.coding if (kind := FORMATS.get(info.type)) else None)
            for name, info in infos.items()
        }

    @cached_property
    def tokenizer(self) -> Tokenizer:
        tokenizer = Tokenizer.from_gguf(self.file.metadata)
        check_vocabulary(self.name, tokenizer, self.config)
        tokenizer.pad_to(self.config.vocab_size)
        return tokenizer

    def facts(self) -> dict[str, Any]:
        return {"gguf": self.file.metadata}

    def tensor(self, name: str) -> Tensor:
        rows = torch.from_numpy(self.file.tensor(name))
        heads = interleaved_heads(self.config, name)
        return unpermute(rows, heads) if heads else rows

    def quantized(self, name: str, first: int, end: int) -> QTensor | None:
        heads = interleaved_heads(self.config, name)
        if not heads:
            return self.file.quantized(name, first, end)
        per_head = self.stored[name].shape[0] // heads
        begin, heads_read = first // per_head * per_head, -(-end // per_head) - first // per_head
        q = self.file.quantized(name, begin, begin + heads_read * per_head)
        if q is None:
            return None

        def in_order(rows: np.ndarray) -> np.ndarray:
            return unpermute(torch.from_numpy(rows), heads_read).numpy()

        minimums = None if q.minimums is None else in_order(q.minimums)
        q = replace(q, codes=in_order(q.codes), scales=in_order(q.scales), minimums=minimums)
        return q.rows(first - begin, end - begin)


def interleaved_heads(config: ModelConfig, name: str) -> int:
    """Heads of a tensor (by its GGUF name) whose rows a llama file keeps in interleaved rope order; 0 for others."""
    if config.architecture == "llama":
        for part, heads in ((".attn_q.", config.num_heads), (".attn_k.", config.num_kv_heads)):
            if part in name:
                return heads
    return 0


def check_vocabulary(name: str, tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Raise ModelFileError for a token that has no row in the embedding."""
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelFileError(
            f"{name} has more tokens than its embedding has rows",
            found=f"{tokenizer.vocab_size} tokens, {config.vocab_size} rows",
            needed="a row for every token",
            do="convert the model again from its source",
        )


def unpermute(weight: Tensor, heads: int) -> Tensor:
    """From rows in interleaved rope order (pairs 2i, 2i+1, as llama GGUF files have them) to half-split order
    (pairs i, i + d/2, as transformers has them). weight: [heads * head_dim, …]; heads: key/value heads for k."""
    if weight.shape[0] % (2 * heads):
        raise ModelFileError(
            "q or k rows do not divide into rotary pairs",
            found=f"{weight.shape[0]} rows, {heads} heads",
            needed="an even number of rows for each head",
        )
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape)


class SafetensorsSource:
    """A transformers directory: config.json, tokenizer.json, model.safetensors or its shards with an index."""

    kind = 1

    def __init__(self, directory: Path, name: str | None = None, *, rope_base: float | None = None) -> None:
        """name: what the model is called in records and messages, the folder's own name if None."""
        self.name = name or directory.resolve().name
        self._directory = directory
        refuse_gguf_folder(directory)
        self.config = config_from_transformers(read_json(directory / "config.json"), rope_base)
        self.tokenizer = Tokenizer.from_directory(directory)
        self.tokenizer.pad_to(self.config.vocab_size)
        self.stored: dict[str, Stored] = {}
        self._places: dict[str, Path] = {}
        for path in weight_files(directory):
            self._scan(path)
        described = (directory / each for each in DESCRIPTIONS)
        self.files = (*dict.fromkeys(self._places.values()), *(each for each in described if each.is_file()))

    def facts(self) -> dict[str, Any]:
        found = (self._directory / name for name in DESCRIPTIONS)
        return {"files": {path.name: path.read_text("utf-8") for path in found if path.is_file()}}

    def _scan(self, path: Path) -> None:
        with _opened(path) as handle:
            for name in handle.keys():  # noqa: SIM118 (not a mapping)
                piece = handle.get_slice(name)
                if piece.get_dtype() not in FLOATS:
                    raise ModelFileError(
                        f"the tensor {name} in {path.name} has a type that cannot be loaded",
                        found=piece.get_dtype(),
                        needed="F32, F16 or BF16",
                        do="load the unquantized checkpoint, or a GGUF file of the same model",
                    )
                if name in self._places:
                    raise ModelFileError(
                        f"the tensor {name} stands in two files",
                        found=f"{self._places[name].name} and {path.name}",
                        needed="each tensor in one file",
                        do="keep the files of one checkpoint only",
                    )
                shape = tuple(piece.get_shape())
                self._places[name] = path
                nbytes = math.prod(shape) * FLOATS[piece.get_dtype()].itemsize
                self.stored[name] = Stored(shape, nbytes, piece.get_dtype())

    def tensor(self, name: str) -> Tensor:
        with _opened(self._places[name]) as handle:
            tensor: Tensor = handle.get_tensor(name).float()
        if not tensor.sum().isfinite() and not tensor.isfinite().all():
            raise ModelFileError(
                f"the tensor {name} holds infinities or NaN",
                found=f"{int((~tensor.isfinite()).sum())} of {tensor.numel()} values are not finite",
                needed="finite weights",
                do="the file is corrupt or was converted with overflow: download or convert it again",
            )
        return tensor

    def quantized(self, name: str, first: int, end: int) -> None:
        """None: a checkpoint of floats. (Quantized ones are refused when their config.json is read.)"""


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelFileError(
            f"{path.name} cannot be read as safetensors",
            found=str(error),
            needed="a complete safetensors file",
            do="download it again; a partial download and a Git LFS pointer look like this",
        ) from error
