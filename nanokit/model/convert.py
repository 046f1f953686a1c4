"""`nanokit model convert`: a directory of safetensors in, one GGUF file out.

A converted file that loads and talks nonsense is the trap: so the rope parameters are the directory's own and are
written even where readers have a default, the tokenizer is compared id by id before a weight is read, q and k change
their order only where the architecture wants it, gate, up and down stay three tensors and a tied head stays tied. The
file is verified against the directory while it still has a name of its own, and takes its place only then.

Rejected: rope options that win over the directory in silence, as they do elsewhere (a wrong base reads fine and costs
accuracy with length); a tensor that is left out because nobody knows its name.
"""

import math
import warnings
from dataclasses import dataclass
from pathlib import Path

from nanokit.errors import ParameterError, naming
from nanokit.gguf.split import replacing_set, write_split
from nanokit.model.calibrate import Progress
from nanokit.model.config import ModelConfig, override_rope
from nanokit.model.export import counted
from nanokit.model.export_model import gguf_parts
from nanokit.model.load import open_model
from nanokit.model.quantize import IN_GGUF
from nanokit.model.requantize import requantized
from nanokit.model.source import ModelSource, SafetensorsSource
from nanokit.model.target import cannot_write, check_not_source, check_place, check_shards, check_target
from nanokit.model.verify.run import verify
from nanokit.paths import replacing
from nanokit.quant.policy import FLOAT_TYPES

TYPES = (*FLOAT_TYPES, *IN_GGUF)
DEFAULT_TYPE, DEFAULT_ALIGNMENT = "q4_1", 32
LEAST_ALIGNMENT, MOST_ALIGNMENT = 8, 1 << 20
_CLOSE = 1e-6  # relative: what rope options may be off, typed in decimals


@dataclass(frozen=True)
class Converted:
    """What was written. path: the file, or the first of the shards, or the folder; nbytes: of all files; types: how
    many tensors have each; misfits: matrices that became F16, for the type that was asked for has no block that divides
    their columns; files: GGUF files, one or the shards in order."""

    path: Path
    nbytes: int
    types: dict[str, int]
    misfits: tuple[str, ...]
    files: tuple[Path, ...] = ()


def convert(
    directory: str | Path,
    target: str | Path,
    kind: str = DEFAULT_TYPE,
    *,
    alignment: int = DEFAULT_ALIGNMENT,
    rope_base: float | None = None,
    rope_scale: float | None = None,
    shard_size: int | str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Convert a folder of safetensors (or `org/name` on the hub) into a GGUF file, and verify that.

    kind: one of TYPES, of every matrix; head and embedding become Q8_0 where it is a quantized one, as they lose most.
    alignment: of each tensor in the file, bytes. rope_base, rope_scale (llama.cpp's, 1 / linear factor): what the
    directory says, or with `force` something else. shard_size: bytes of tensors, or "2GB", above which the file becomes
    a set of files. force: also replaces a file that is there (with a shard size also a set of that name). progress:
    called as (done, in all, name) after each tensor. Raises ParameterError for what cannot be used, ModelFileError for
    a model that cannot be read and a file that does not pass its checks, TokenizerError for a tokenizer that GGUF
    cannot say, NanokitError for a place that cannot be written. Whatever can be refused is before a weight is read.
    """
    path, kind = Path(target).expanduser(), kind.lower()
    _check_options(kind, alignment)
    check_target(path, suffixes=(".gguf",), force=force)
    shard_bytes = check_shards(path, shard_size, force=force)
    source = _opened(directory, rope_base if force else None)
    check_not_source(path, source.files)
    with naming(source.name):
        source.config = _with_rope(source.config, rope_base, rope_scale, force)
        rounded = requantized(source, kind, float_head="q8_0", misfit="f16")
        keys, entries = gguf_parts(rounded, alignment)
        check_place(path, sharded=shard_bytes is not None)
        try:
            with replacing_set(path) if shard_bytes else replacing(path) as scratch:
                made = write_split(scratch, keys, counted(entries, progress), shard_bytes)
                nbytes = sum(each.stat().st_size for each in made)
                _verify(made[0], path.name, source, progress)
        except OSError as error:
            raise cannot_write(path, str(error)) from error
    types = [each.type for each in entries]
    files = [path] if len(made) == 1 else [path.with_name(each.name) for each in made]
    return Converted(
        files[0],
        nbytes,
        {each: types.count(each) for each in dict.fromkeys(types)},
        tuple(name for name, choice in rounded.choices.items() if choice.misfit),
        tuple(files),
    )


def _check_options(kind: str, alignment: int) -> None:
    if kind not in TYPES:
        raise ParameterError("matrices cannot be written in this type", found=kind, needed=", ".join(TYPES))
    if alignment & (alignment - 1) or not LEAST_ALIGNMENT <= alignment <= MOST_ALIGNMENT:
        raise ParameterError(
            "the alignment is unusable",
            found=alignment,
            needed=f"a power of two, {LEAST_ALIGNMENT} to {MOST_ALIGNMENT} bytes",
        )


def _opened(directory: str | Path, rope_base: float | None) -> SafetensorsSource:
    source = open_model(directory, rope_base=rope_base)
    if not isinstance(source, SafetensorsSource):
        raise ParameterError(
            f"{source.name} is no folder of safetensors",
            found=str(directory),
            needed="a folder with config.json, tokenizer.json and safetensors weights, or org/name on the hub",
            do="quantize a GGUF file into another one with `nanokit quantize IN.gguf OUT.gguf --policy …`",
        )
    return source


def _with_rope(config: ModelConfig, base: float | None, scale: float | None, force: bool) -> ModelConfig:
    """The configuration with the rope options, which say nothing new or need `force`."""
    if base is not None and math.isclose(base, config.rope.base, rel_tol=_CLOSE):
        base = None
    if scale is not None and math.isclose(scale, 1 / config.rope.linear_factor, rel_tol=_CLOSE):
        scale = None
    forced = override_rope(config, base=base, scale=scale, force=force)
    for what, old, new in (
        ("base", config.rope.base, forced.rope.base),
        ("scale", 1 / config.rope.linear_factor, 1 / forced.rope.linear_factor),
    ):
        if old != new:
            warnings.warn(f"rope {what} {new:g} instead of the source's {old:g}, as --force wants it", stacklevel=3)
    return forced


def _verify(scratch: Path, name: str, source: ModelSource, progress: Progress | None) -> None:
    """Raise ModelFileError, naming what failed, unless the file is what its source is."""
    report = verify(scratch, source, long=False, name=name, progress=progress)
    report.raise_for("see whether the folder is sound in what is named here; if it is, report this. No file was left")
