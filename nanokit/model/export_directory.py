"""`nanokit model convert FILE.gguf FOLDER`: a GGUF file back to a folder that transformers loads.

The tokenizer is the one that the kit reads from the file, splitting included, spelled out in tokenizer.json: what a
GGUF file keeps as a name, transformers does not know for every model. q and k get their rows in transformers' order.
Quantized weights become floats; vectors stay fp32, which costs nothing. The folder is filled beside its place, under
another name, one tensor in memory at a time; the file is then checked against it, as it would be against the folder
that it came from, and the folder takes its place only when it passes. So it is complete or absent.

A folder that is there is never written into. With `force` one that was made here is replaced, as a whole: every file
in it has to be one that is written here, and its weights have to say so.
"""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanokit.errors import ParameterError, naming
from nanokit.model.calibrate import Progress
from nanokit.model.convert import Converted
from nanokit.model.export_config import DTYPES, config_json, generation_json, tokenizer_json
from nanokit.model.export_model import transformers_names
from nanokit.model.load import open_model
from nanokit.model.requantize import narrowed
from nanokit.model.source import DESCRIPTIONS, FLOATS, GGUFSource, SafetensorsSource
from nanokit.model.target import cannot_write
from nanokit.model.tokenizer_gguf import PRE_TOKENIZERS
from nanokit.model.verify.run import verify
from nanokit.model.weights import Weights, find_weights
from nanokit.model.write_safetensors import INDEX, Planned, write_checkpoint

DEFAULT_TYPE = "f16"
SHARD_BYTES = 5_000_000_000
MARK = "nanokit model convert"


def export_directory(
    file: str | Path,
    target: str | Path,
    kind: str = DEFAULT_TYPE,
    *,
    shard_bytes: int = SHARD_BYTES,
    force: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Make a transformers folder of a GGUF file (or of the first of its shards), and check the file against it.

    kind: of every matrix, f32, f16 or bf16. shard_bytes: of weights in one file. force: replaces a folder that this
    function made. progress: called as (done, in all, name) after each tensor. Raises ParameterError for what cannot be
    used and for a weight beyond the range of the type, ModelFileError for a file that cannot be read, that such a
    folder cannot describe, or that does not pass its checks, NanokitError for a place that cannot be written. All but
    weights and checks is refused before a weight is read.
    """
    path, kind = Path(target).expanduser().absolute(), kind.lower()
    if kind not in DTYPES:
        raise ParameterError("a folder cannot have this type", found=kind, needed=", ".join(DTYPES))
    if shard_bytes < 1:
        raise ParameterError("shards need a size", found=shard_bytes, needed="bytes of weights in one file")
    check_folder(path, force=force)
    source = _opened(file)
    with naming(source.name):
        weights = find_weights(source.config, source)
        described = _descriptions(source, weights, kind)
        tensors = _planned(source, weights, kind, progress)
        _warn_of_splitting(source)
        try:
            with _filled_beside(path) as folder:
                for name, text in described.items():
                    (folder / name).write_text(text, "utf-8")
                write_checkpoint(folder, tensors, shard_bytes, MARK)
                _verify(source, SafetensorsSource(folder, path.name), progress)
        except OSError as error:
            raise cannot_write(path, str(error)) from error
    types = [each.type for each in tensors]
    size = sum(each.stat().st_size for each in path.iterdir())
    return Converted(path, size, {each: types.count(each) for each in dict.fromkeys(types)}, ())


def check_folder(path: Path, *, force: bool) -> None:
    """Raise ParameterError unless a new folder can have this name: nothing is there, or an empty folder, or with
    `force` one that was made here."""
    if not path.exists():
        return
    if not path.is_dir():
        raise ParameterError(
            f"{path.name} exists already, and is no folder",
            found=str(path),
            needed="a new folder, or a name that ends in .gguf for a GGUF file",
        )
    inside = sorted(path.iterdir())
    foreign = next((each.name for each in inside if not _is_ours(each)), None)
    if foreign is not None:
        raise ParameterError(
            f"{path.name} holds files that were not exported here",
            found=foreign,
            needed="a new or an empty folder",
            do="choose another name",
        )
    if inside and not force:
        raise ParameterError(
            f"{path.name} exists already", found=str(path), do="choose another name, or pass --force to replace it"
        )


def _is_ours(path: Path) -> bool:
    if path.suffix != ".safetensors":
        return path.is_file() and path.name in (*DESCRIPTIONS, INDEX)
    try:
        with safe_open(path, framework="pt") as handle:
            return (handle.metadata() or {}).get("written_by") == MARK
    except (SafetensorError, OSError):
        return False


def _opened(file: str | Path) -> GGUFSource:
    source = open_model(file)
    if not isinstance(source, GGUFSource):
        raise ParameterError(
            f"{source.name} is no GGUF file, of which alone a folder is made",
            found=str(file),
            needed="FILE.gguf to make a folder of; or OUT.gguf as the name of the new file",
        )
    return source


def _descriptions(source: GGUFSource, weights: Weights, kind: str) -> dict[str, str]:
    """Every file but the weights, by name."""
    described: dict[str, dict[str, Any]] = {
        "config.json": config_json(source.config, weights, source.tokenizer, kind),
        "generation_config.json": generation_json(source.tokenizer),
        "tokenizer_config.json": tokenizer_json(source.tokenizer, source.config.max_context),
    }
    texts = {name: json.dumps(value, indent=2, ensure_ascii=False) + "\n" for name, value in described.items()}
    return {**texts, "tokenizer.json": source.tokenizer.parts.backend.to_str()}


def _warn_of_splitting(source: GGUFSource) -> None:
    """transformers 5 has a list of architectures whose folders it takes to name the wrong tokenizer: qwen2 is on it."""
    name = source.file.metadata.get("tokenizer.ggml.pre")
    if source.config.architecture == "qwen2" and PRE_TOKENIZERS.get(str(name)) != PRE_TOKENIZERS["qwen2"]:
        warnings.warn(
            f"AutoTokenizer of transformers 5 splits text as Qwen 2 does for every qwen2 model, and {source.name} says "
            f"{name!r}: load this folder's tokenizer with PreTrainedTokenizerFast",
            stacklevel=3,
        )


def _planned(source: GGUFSource, weights: Weights, kind: str, progress: Progress | None) -> list[Planned]:
    """Every tensor under its name in the folder."""
    names = list(transformers_names(weights))
    planned = []
    for number, (name, target) in enumerate(names, 1):
        shape = source.stored[name].shape
        stored_as = "F32" if len(shape) == 1 else kind.upper()

        def make(name: str = name, stored_as: str = stored_as, number: int = number) -> Tensor:
            values = source.tensor(name)
            kept = narrowed(name, values, kind)  # a vector too: transformers computes in one type
            if progress is not None:
                progress(number, len(names), name)
            return (values if stored_as == "F32" else kept).to(FLOATS[stored_as])

        planned.append(Planned(target, stored_as, shape, make))
    return planned


@contextmanager
def _filled_beside(path: Path) -> Iterator[Path]:
    """A new folder beside `path`, which takes its place at the end, or goes away with all that is in it where an error
    comes first. One that is there already is looked at again first: hours may have passed. Raises OSError."""
    with TemporaryDirectory(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent) as place:
        new, old = Path(place, "new"), Path(place, "old")
        new.mkdir()
        yield new
        check_folder(path, force=True)
        if not path.exists():
            new.rename(path)
            return
        path.rename(old)
        try:
            new.rename(path)
        except OSError:
            old.rename(path)
            raise


def _verify(source: GGUFSource, folder: SafetensorsSource, progress: Progress | None) -> None:
    """Raise ModelFileError, naming what failed, unless the file is what its folder is."""
    path = source.files[0]
    report = verify(path, folder, long=False, name=source.name, progress=progress)
    report.raise_for(f"if `nanokit model verify {path.name}` finds nothing wrong with the file alone, report this")
