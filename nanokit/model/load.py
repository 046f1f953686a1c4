"""From a name to an opened model: a GGUF file, a directory of safetensors, or `org/name` on the hub.

A path that exists wins over a hub name. Of a hub repository the JSON files come first: an architecture or a
quantization that cannot run is refused before its gigabytes are fetched, and of the weights only those that the model
loads are (repositories hold the same weights several times over). Never pickles, never code.
"""

import re
from pathlib import Path
from typing import Any

from nanokit.errors import ModelFileError, naming
from nanokit.model.config import config_from_transformers
from nanokit.model.directory import read_json, weight_names
from nanokit.model.source import DESCRIPTIONS, GGUFSource, ModelSource, SafetensorsSource

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
HUB_JSON = ["model.safetensors.index.json", *DESCRIPTIONS]


def open_model(source: str | Path, *, rope_base: float | None = None) -> ModelSource:
    """Open without reading weights. Raises ModelFileError for anything that is not a supported model.

    rope_base: what the caller vouches for where the model states none; never a default.
    """
    path = Path(source).expanduser()
    try:
        if path.is_file():
            with naming(path.name):
                if path.suffix == ".safetensors":
                    from nanokit.model.saved import QuantizedFile

                    return QuantizedFile(path, rope_base=rope_base)
                opened = GGUFSource(path, rope_base=rope_base)
                _ = opened.tokenizer  # refused here, and not in the middle of what comes
                return opened
        if path.is_dir():
            with naming(path.resolve().name):
                return SafetensorsSource(path, rope_base=rope_base)
    except OSError as error:  # what the system does not take as a path; files are opened further down
        raise _no_such_model(error.strerror) from error
    looks_like_file = (
        path.is_absolute() or path.suffix in (".gguf", ".safetensors") or str(source).startswith((".", "~"))
    )
    if looks_like_file or not HUB_NAME.fullmatch(str(source)):
        raise _no_such_model(f"no file or folder {source}")
    name = str(source)
    with naming(name):
        return SafetensorsSource(_from_hub(name, rope_base), name=name, rope_base=rope_base)


def _no_such_model(found: str | None) -> ModelFileError:
    return ModelFileError(
        "there is no such model",
        found=found,
        needed="a .gguf file, a folder of safetensors, a file of nanokit quantize, or org/name on the hub",
        do="check the path; `nanokit model fetch` prints the path of the default model",
    )


def _from_hub(name: str, rope_base: float | None) -> Path:
    """The folder of the snapshot, with everything that loading reads."""
    folder = _download(name, HUB_JSON, revision=None)
    if not (folder / "config.json").is_file():
        raise _no_weights(name, "no config.json")
    config_from_transformers(read_json(folder / "config.json"), rope_base)
    weights = weight_names(folder)
    commit = folder.name  # the same one, whatever is pushed meanwhile
    _download(name, [*HUB_JSON, *weights], revision=commit)
    if not any((folder / weight).is_file() for weight in weights):
        raise _no_weights(name, "none of " + ", ".join(weights[:3]))
    return folder


def _no_weights(name: str, found: str) -> ModelFileError:
    return ModelFileError(
        f"the hub model {name} holds no safetensors weights",
        found=found,
        needed="config.json with model.safetensors, or with model.safetensors.index.json and its shards",
        do="choose a repository with safetensors; a .gguf file can be downloaded and loaded by its path",
    )


def _download(name: str, files: list[str], revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    # The transport's errors are kin of the hub's first base, whichever HTTP library this version of the hub uses.
    transport: Any = HfHubHTTPError.__bases__[0]
    try:
        return Path(snapshot_download(name, allow_patterns=files, revision=revision))
    except (transport, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelFileError(
            f"the hub model {name} could not be fetched",
            found=reason,
            needed="a repository with safetensors that this machine can reach",
            do="check the name and the network (HF_TOKEN for gated models), or pass a local path",
        ) from error
