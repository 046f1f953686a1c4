"""A folder of a Hugging Face checkpoint: which files hold the weights, and the JSON files beside them.

Names in an index are only names of files beside it, sizes are bounded before anything is parsed, and pickles are named
and left alone: reading one runs code.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanokit.errors import ModelFileError

JSON_LIMIT = 64 << 20


def refuse_gguf_folder(directory: Path) -> None:
    """Raise ModelFileError for a folder whose model is a GGUF file in it."""
    found = sorted(path.name for path in directory.glob("*.gguf"))
    if found and not (directory / "config.json").is_file():
        raise ModelFileError(
            f"{directory} is a folder of GGUF files",
            found=", ".join(found[:3]) + (" …" if len(found) > 3 else ""),
            needed="one model",
            do=f"name the file itself: {directory / found[0]}",
        )


def weight_names(directory: Path) -> list[str]:
    """The files that hold the weights: those that the index names, or model.safetensors. Raises ModelFileError for an
    index that is broken or points elsewhere; whether the files are there is not looked at."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return ["model.safetensors"]
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, Mapping) or not listed or not all(isinstance(v, str) for v in listed.values()):
        raise ModelFileError(
            f"{index.name} has no weight_map from tensor to file",
            found=f"{listed!r:.120}",
            needed="an object whose values are file names",
            do="download the index again",
        )
    names = sorted(set(listed.values()))
    outside = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
    if outside:
        raise ModelFileError(
            f"{index.name} points to something else than weights beside it",
            found=f"{outside[0]!r:.120}",
            needed="plain names of .safetensors files",
            do="use a safetensors checkpoint from a source that you trust",
        )
    return names


def weight_files(directory: Path) -> list[Path]:
    """Those that hold the weights. Raises ModelFileError for one that is missing, and for pickles."""
    names = weight_names(directory)
    missing = [name for name in names if not (directory / name).is_file()]
    if not missing:
        return [directory / name for name in names]
    if names != ["model.safetensors"]:
        raise ModelFileError(
            f"{len(missing)} of {len(names)} weight files are missing",
            found="no " + ", ".join(missing[:3]),
            needed="every file that model.safetensors.index.json names",
            do="finish the download",
        )
    pickles = sorted(path.name for path in directory.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
    raise ModelFileError(
        f"{directory.name} holds no safetensors weights",
        found="pickled weights: " + ", ".join(pickles[:3]) if pickles else "no weight file",
        needed="model.safetensors, or model.safetensors.index.json and its shards",
        do="use a safetensors checkpoint: a pickle runs code when it is read" if pickles else "finish the download",
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model folder, or ModelFileError naming the file."""
    try:
        if path.stat().st_size > JSON_LIMIT:
            raise ModelFileError(
                f"{path.name} is too large to be true",
                found=f"{path.stat().st_size} bytes",
                needed=f"at most {JSON_LIMIT}",
            )
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(
            f"{path.name} cannot be read",
            found=str(error),
            needed="a JSON object in UTF-8",
            do="point at a folder that holds config.json, tokenizer.json and safetensors weights",
        ) from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path.name} is not a JSON object", found=type(value).__name__, needed="an object")
    return value
