"""From a name to an opened model: a GGUF file, a directory of safetensors, or `org/name` on the hub.

A path that exists wins over a hub name. What a hub repository offers is filtered before anything is fetched:
safetensors with their JSON files, never pickles, never code.
"""

import re
from pathlib import Path

from nanokit.errors import ModelFileError
from nanokit.model.source import GGUFSource, ModelSource, SafetensorsSource

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
HUB_FILES = ["*.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json",
             "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"]  # fmt: skip


def open_model(source: str | Path) -> ModelSource:
    """Open without reading weights. Raises ModelFileError for anything that is not a supported model."""
    path = Path(source).expanduser()
    if path.is_file():
        return GGUFSource(path)
    if path.is_dir():
        return SafetensorsSource(path)
    looks_like_file = path.is_absolute() or path.suffix == ".gguf" or str(source).startswith((".", "~"))
    if looks_like_file or not HUB_NAME.fullmatch(str(source)):
        raise ModelFileError(
            "there is no such model",
            found=f"no file or folder {source}",
            needed="a .gguf file, a folder of safetensors, or org/name on the hub",
            do="check the path; `nanokit model fetch` prints the path of the default model",
        )
    return SafetensorsSource(_from_hub(str(source)))


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelFileError(
            f"the hub model {name} could not be fetched",
            found=reason,
            needed="a repository with safetensors that this machine can reach",
            do="check the name and the network (HF_TOKEN for gated models), or pass a local path",
        ) from error
