"""`nanokit quantize`: a model in, a smaller one out.

The end of the target's name says what it becomes: `.safetensors`, which holds every format of the kit in one file
(nanokit/model/saved.py), or `.gguf`, for those that can be packed here as GGUF has them: a GGUF file is copied but for
what the policy changes, a folder of safetensors is converted on the way. There a matrix whose columns no block divides
becomes F16, as llama.cpp makes it, and is named; rejected was to refuse it, for no other format of GGUF would fit it
better. Nothing is half written: the file is renamed into place when it is complete.
"""

from dataclasses import dataclass
from math import prod
from pathlib import Path

from safetensors import SafetensorError

from nanokit.errors import ParameterError, naming
from nanokit.gguf.split import files_named, replacing_set, write_split
from nanokit.gguf.types import DEFAULT_ALIGNMENT
from nanokit.gguf.write import Entry, Key, rewritten
from nanokit.model import saved
from nanokit.model.calibrate import Progress, windows_in
from nanokit.model.export import counted, entry_of
from nanokit.model.export_model import gguf_names, gguf_parts
from nanokit.model.load import open_model
from nanokit.model.requantize import Requantized, requantized
from nanokit.model.source import GGUFSource, ModelSource, SafetensorsSource
from nanokit.model.target import cannot_write, check_not_source, check_place, check_shards, check_target
from nanokit.model.weights import find_weights
from nanokit.paths import replacing
from nanokit.quant.ggml import GGML_FORMATS, TERNARY_FORMATS
from nanokit.quant.policy import BY_TEXT, DEFAULT, FLOAT_HEAD, FLOAT_TYPES, Policy, parse_policy

IN_GGUF = (*GGML_FORMATS, "mxfp4", *TERNARY_FORMATS)
LEAST_TEXT = 64  # tokens of a calibration text


@dataclass(frozen=True)
class Written:
    """What was written. files: one, or the shards in order; path: the first; nbytes: of all. bits_before, bits_after:
    per weight of the matrices that the policy changed, as they are kept, scales included; before, after: what types
    they had, and have; misfits: those of them that became floats, for the format that was asked for has no block that
    divides their columns."""

    path: Path
    files: tuple[Path, ...]
    nbytes: int
    policy: str
    bits_before: float
    bits_after: float
    before: tuple[str, ...]
    after: tuple[str, ...]
    misfits: tuple[str, ...]


def quantize(
    model: str | Path,
    target: str | Path,
    policy: str = DEFAULT,
    *,
    calibration: str | Path | None = None,
    shard_size: int | str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Written:
    """Quantize a model (whatever `nanokit.load` takes) into a new file, and open that file again.

    calibration: a text file that awq, gptq, smooth and auto look at; None is a text of the kit's own. shard_size: bytes
    of tensors, or "2GB", above which a GGUF file becomes a set of files. force: replace a file that is there (with a
    shard size also a set of that name). progress: called as (done, in all, what) while a text runs, and after each
    tensor that is written. Raises ParameterError for a policy, name or text that cannot be used,
    ModelFileError for a model that cannot be read, TokenizerError for a tokenizer that GGUF cannot say, NanokitError
    for a place that cannot be written. Whatever can be refused is before a weight is read.
    """
    path, chosen = Path(target).expanduser(), parse_policy(policy)
    check_target(path, suffixes=(".safetensors", ".gguf"), force=force)
    shard_bytes = check_shards(path, shard_size, force=force)
    source = open_model(model)
    for each in files_named(path) if shard_bytes else [path]:
        check_not_source(each, source.files)
    in_gguf = path.suffix == ".gguf"
    if in_gguf:
        _check_gguf(source, chosen)
    texts = None if calibration is None else _texts(source, Path(calibration), chosen)
    check_place(path, sharded=shard_bytes is not None)
    found = requantized(
        source,
        chosen,
        calibration=texts,
        progress=progress,
        float_head="q8_0" if in_gguf else FLOAT_HEAD,
        misfit="f16" if in_gguf else "",
    )
    try:
        with replacing_set(path) if shard_bytes else replacing(path) as scratch:
            if in_gguf:
                keys, entries = _gguf(found)
                made = write_split(scratch, keys, counted(entries, progress), shard_bytes)
            else:
                saved.write(found, scratch, found.policy.name, progress)
                made = [scratch]
            return _written(path, made, found)
    except (SafetensorError, OSError) as error:
        raise cannot_write(path, str(error)) from error


def _gguf(found: Requantized) -> tuple[dict[str, Key], list[Entry]]:
    """Metadata and tensors of the new file."""
    if isinstance(found.base, GGUFSource):
        changed = [*found.choices, *found.made.vectors]
        return rewritten(found.base.file, {name: entry_of(found, name, name) for name in changed})
    with naming(found.base.name):
        return gguf_parts(found, DEFAULT_ALIGNMENT)


def _check_gguf(source: ModelSource, policy: Policy) -> None:
    """Raise ParameterError for what cannot become a GGUF file."""
    if not isinstance(source, GGUFSource | SafetensorsSource):
        raise ParameterError(
            "a file of nanokit quantize cannot become a GGUF file",
            found=source.name,
            needed="a .gguf file, or a folder of safetensors",
            do="quantize the model that it was made from, or write a .safetensors file",
        )
    names = {rule.choice.format.name for rule in policy.rules if rule.choice.format}
    strangers = sorted(names - set(IN_GGUF)) or ([policy.name] if policy.auto_bits is not None else [])
    if strangers:
        raise ParameterError(
            f"{', '.join(strangers)} cannot be written into a GGUF file here",
            found=policy.name,
            needed=f"formats that can: {', '.join((*IN_GGUF, *FLOAT_TYPES))}",
            do="name one of them with --policy, such as --policy q4_0, or write a .safetensors file",
        )


def _texts(source: ModelSource, path: Path, policy: Policy) -> list[list[int]]:
    if policy.auto_bits is None and not policy.methods & BY_TEXT:
        raise ParameterError(
            f"{policy.name} looks at no text",
            found=f"--calibration {path}",
            needed="+awq, +gptq, +smooth or auto",
            do="leave it out",
        )
    try:
        windows = windows_in(source.tokenizer, path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(
            "the calibration text cannot be read", found=str(error), needed="a text file in UTF-8"
        ) from error
    if len(windows[0]) < min(LEAST_TEXT, source.config.max_context):
        raise ParameterError(
            f"{path.name} is too short to calibrate on", found=f"{len(windows[0])} tokens",
            needed=f"at least {LEAST_TEXT}, better thousands, like the texts that the model is going to see",
        )  # fmt: skip
    return windows


def _written(path: Path, made: list[Path], found: Requantized) -> Written:
    """What was written, read from the files while they still have names of their own: what cannot be opened never gets
    the name `path`."""
    new = _reopened(made[0], path)
    renamed = {} if new.kind == found.kind else dict(gguf_names(find_weights(found.config, found)))
    old_of = [found.base.stored[name] for name in found.choices]
    new_of = [new.stored[renamed.get(name, name)] for name in found.choices]
    weights = sum(prod(stored.shape) for stored in old_of)
    before, after = (8 * sum(each.nbytes for each in of) / weights if weights else 0.0 for of in (old_of, new_of))
    types, now = (tuple(sorted({each.type for each in of})) for of in (old_of, new_of))
    misfits = tuple(name for name, choice in found.choices.items() if choice.misfit)
    nbytes = sum(each.stat().st_size for each in made)
    files = [path] if len(made) == 1 else [path.with_name(each.name) for each in made]
    return Written(files[0], tuple(files), nbytes, found.policy.name, before, after, types, now, misfits)


def _reopened(file: Path, path: Path) -> ModelSource:
    """A file under its scratch name, which does not end as `path` does."""
    with naming(path.name):
        if path.suffix == ".safetensors":
            return saved.QuantizedFile(file)
        opened = GGUFSource(file)
        _ = opened.tokenizer
        return opened
