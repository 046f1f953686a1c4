"""`nanokit quantize`: a model in, a smaller one out.

The end of the target's name says what it becomes: `.safetensors`, which holds every format of the kit in one file
(nanokit/model/saved.py), or `.gguf`, for formats that GGUF has and models that came from a GGUF file. Nothing is half
written: the file is renamed into place when it is complete.
"""

from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch

from nanokit.errors import ParameterError
from nanokit.gguf.write import rewrite
from nanokit.model import saved
from nanokit.model.calibrate import Progress, windows_in
from nanokit.model.load import open_model
from nanokit.model.requantize import Requantized, requantized
from nanokit.model.source import GGUFSource, ModelSource
from nanokit.quant.ggml import GGML_FORMATS, to_blocks
from nanokit.quant.policy import parse_policy

Replaced = dict[str, tuple[str, np.ndarray]]
IN_GGUF = (*GGML_FORMATS, "mxfp4")


@dataclass(frozen=True)
class Written:
    """What was written. nbytes: of the file; bits_before, bits_after: per weight of the matrices that the policy
    changed, scales included; before: what types they had."""

    path: Path
    nbytes: int
    policy: str
    bits_before: float
    bits_after: float
    before: tuple[str, ...]


def quantize(
    model: str | Path,
    target: str | Path,
    policy: str,
    *,
    calibration: str | Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Written:
    """Quantize a model (whatever `nanokit.load` takes) into a new file.

    calibration: a text file that awq, gptq and auto look at; None is a text of the kit's own. force: replace a file
    that is there. Raises ParameterError for a policy, name or text that cannot be used, ModelFileError for a model that
    cannot be read, OSError for a place that cannot be written.
    """
    path, chosen = Path(target).expanduser(), parse_policy(policy)
    if path.suffix not in (".gguf", ".safetensors"):
        raise ParameterError(
            "the name of the new file says what it becomes", found=path.name, needed="….safetensors or ….gguf"
        )
    if not path.parent.is_dir():
        raise ParameterError("there is no such folder", found=str(path.parent), do="make it first")
    if path.exists() and (not force or path.is_dir() or (Path(model).exists() and path.samefile(model))):
        raise ParameterError(
            f"{path.name} exists already", found=str(path), do="choose another name, or pass --force to replace a file"
        )
    source = open_model(model)
    texts = None if calibration is None else _texts(source, Path(calibration))
    found = requantized(source, chosen, calibration=texts, progress=progress)
    assert isinstance(found, Requantized)
    if path.suffix == ".gguf":
        if not isinstance(source, GGUFSource):
            raise ParameterError(
                "only a GGUF file can be quantized into a GGUF file",
                found=source.name,
                needed="a model in a .gguf file",
                do="write a .safetensors file",
            )
        rewrite(source.file.path, path, _blocks(found, source))
    else:
        saved.write(found, path, found.policy.name)
    return _written(path, found, source)


def _texts(source: ModelSource, path: Path) -> list[list[int]]:
    try:
        return windows_in(source.tokenizer, path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(
            "the calibration text cannot be read", found=str(error), needed="a text file in UTF-8"
        ) from error


def _blocks(found: Requantized, source: GGUFSource) -> Replaced:
    """The tensors that are replaced, as GGUF keeps them. q and k go back into the row order of llama files."""
    strangers = {
        choice.format.name for choice in found.choices.values() if choice.format and choice.format.name not in IN_GGUF
    }
    if strangers:
        raise ParameterError(
            f"GGUF has no type for {', '.join(sorted(strangers))}",
            found=found.policy.name,
            needed=f"formats of GGUF: {', '.join(IN_GGUF)}",
            do="choose one of them, or write a .safetensors file",
        )
    replaced: Replaced = {}
    for name in found.choices:
        q = found.matrix(name)
        blocks = to_blocks(q).reshape(q.shape[0], -1)
        if heads := source.interleaved_heads(name):
            blocks = np.ascontiguousarray(interleaved(blocks, heads))
        replaced[name] = (q.format.upper(), blocks)
    for name, vector in found.vectors.items():
        replaced[name] = ("F32", vector.to(torch.float32).numpy())
    return replaced


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """From half-split to interleaved rope order: the inverse of `source.unpermute`. rows: [heads * head_dim, …]."""
    halves = rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _written(path: Path, found: Requantized, source: ModelSource) -> Written:
    names = list(found.choices)
    weights = sum(prod(source.stored[name].shape) for name in names) or 1
    before, after = (8 * sum(of.stored[name].nbytes for name in names) / weights for of in (source, found))
    types = tuple(sorted({source.stored[name].type for name in names}))
    return Written(path, path.stat().st_size, found.policy.name, before, after, types)
