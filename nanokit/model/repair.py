"""`nanokit model repair`: a GGUF file with wrong keys or tensors, put right from its source, as a new file.

Taken from the source are the rope parameters, sizes and counts that the file contradicts, and the tensors that are
asked for by name; everything else stays byte for byte, above all the quantization that somebody may have spent hours
on. The new file is verified against the source before it gets its name: where something is still wrong, nothing is
written and the report says what.

Rejected: mending the file in place (a crash would leave neither), and taking tensors that nobody asked for (a source
that is another model of the same shape would then replace the model).
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from nanokit.errors import ModelFileError, ParameterError
from nanokit.gguf.reader import GGUFFile
from nanokit.gguf.write import Entry, Key, copied, rewritten, write_gguf
from nanokit.model.calibrate import Progress
from nanokit.model.export import counted, entry_of
from nanokit.model.export_keys import frequency_entry, model_keys
from nanokit.model.export_model import gguf_names
from nanokit.model.load import open_model
from nanokit.model.requantize import Requantized
from nanokit.model.source import FLOATS, GGUFSource, ModelSource
from nanokit.model.target import cannot_write, check_not_source, check_place, check_target
from nanokit.model.verify.meaning import SIZES
from nanokit.model.verify.report import Report, listed
from nanokit.model.verify.run import verify
from nanokit.model.verify.source_tensors import TENSORS
from nanokit.model.weights import find_weights
from nanokit.paths import replacing
from nanokit.quant.ggml import GGML_FORMATS
from nanokit.quant.policy import Choice, parse_policy
from nanokit.quant.weight_format import weight_format

FREQUENCIES = "rope_freqs.weight"
# Keys that are left alone: how long a context may be is a choice, and the vocabulary is not looked at.
LEFT = ("context_length", "vocab_size")
REQUIRED = (*SIZES, "attention.layer_norm_rms_epsilon")
SUBSTITUTE = "q8_0"  # for types that cannot be written here
_LAYER = re.compile(r"^blk\.\d+\.")


@dataclass(frozen=True)
class Repaired:
    """What was put right. keys: a sentence each; tensors: the GGML type that each was written in; report: of the new
    file against the source."""

    path: Path
    keys: tuple[str, ...]
    tensors: dict[str, str]
    report: Report


def repair(
    file: str | Path,
    target: str | Path,
    source: str | Path,
    *,
    inject: Sequence[str] = (),
    force: bool = False,
    progress: Progress | None = None,
) -> Repaired:
    """Write `target`: the GGUF file with what is wrong in its keys, and the tensors `inject`, taken from `source`.

    source: whatever `open_model` takes, the same model. inject: GGUF names of tensors, or patterns such as
    "blk.*.ffn_up.weight"; a matrix is written in the type that it has in the file (a new one in that of its kind in
    other layers), Q8_0 where that type cannot be written. force: replace a target that is there.

    Raises ParameterError for names that the source does not have and for a target that cannot be; ModelFileError for a
    file whose structure is broken (nothing in it can be trusted), a source that does not load, and a result that does
    not pass its checks; NanokitError for a place that cannot be written.
    """
    path, broken = Path(target).expanduser(), Path(file).expanduser()
    check_target(path, suffixes=(".gguf",), force=force, source_files=[broken])
    opened = GGUFFile.open(broken)
    theirs = open_model(source)
    check_not_source(path, [*opened.files, *theirs.files])
    architecture = opened.metadata.get("general.architecture")
    if architecture != theirs.config.architecture:
        raise ModelFileError(
            f"{theirs.name} is not what {broken.name} was made from",
            found=f"architectures {architecture!r} and {theirs.config.architecture!r}",
            needed="the source of this file",
        )
    keys, said = _keys(opened, theirs)
    entries = _tensors(opened, theirs, inject)
    if not keys and not entries:
        raise ParameterError(
            f"nothing in {broken.name} is to be changed",
            found="no key that contradicts the source, and no --inject",
            do=f"see what is wrong: nanokit model verify {broken.name} --against {source}",
        )
    check_place(path)
    types = {name: each.type for name, each in entries.items() if each is not None}
    try:
        with replacing(path) as scratch:
            new_keys, kept = rewritten(opened, entries, keys)
            write_gguf(scratch, new_keys, counted(kept, progress))
            report = verify(scratch, theirs, name=path.name, progress=progress)
            _check_compared(report)
            report.raise_for("name what failed with --inject, or convert the model again; nothing was written")
    except OSError as error:
        raise cannot_write(path, str(error)) from error
    return Repaired(path, tuple(said), types, report)


def _check_compared(report: Report) -> None:
    """Raise ModelFileError for a file whose weights could not be held against the source: it would only be called
    repaired."""
    tensors = next((check for check in report.checks if check.name == TENSORS), None)
    if not report.failed and (tensors is None or tensors.verdict == "not checked"):
        raise ModelFileError(
            f"{report.name} cannot be compared with {report.against}",
            found="; ".join(f"{check.name}: {check.said}" for check in report.of("not checked")),
            needed="a model that nanokit runs",
            do="convert the model again with the tools of its makers; nothing was written",
        )


def _keys(file: GGUFFile, source: ModelSource) -> tuple[dict[str, Key | None], list[str]]:
    """The keys of the architecture that are missing, or that the source contradicts in value or kind, as it would be
    written; None drops one."""
    prefix = f"{source.config.architecture}."
    wanted = {
        name: key
        for name, key in model_keys(source.config, source.name, alignment=file.alignment, file_type=None).items()
        if name.startswith(prefix) and name.removeprefix(prefix) not in LEFT
    }
    scaling = f"{prefix}rope.scal"
    needed = {f"{prefix}{key}" for key in (*REQUIRED, "rope.freq_base")}
    keys: dict[str, Key | None] = {
        name: key
        for name, key in wanted.items()
        if (not _agrees(file, name, key) if name in file.metadata else name in needed or name.startswith(scaling))
    }
    stated = (name for name in file.metadata if name.startswith(scaling) and name not in wanted)
    if source.config.rope.linear_factor == 1.0:  # "none" says nothing; other rules of the file's own are no linear one
        keys |= {name: None for name in stated if file.metadata[name] != "none"}
    said = [f"{name}: {_shown(file, name)} -> {'gone' if key is None else key.value}" for name, key in keys.items()]
    return keys, said


def _agrees(file: GGUFFile, name: str, key: Key) -> bool:
    found, kind = file.metadata[name], file.kinds[name]
    if isinstance(found, list):  # one value a layer
        return kind.element == key.kind.type and all(each == key.value for each in found)
    if kind != key.kind:
        return False
    return math.isclose(found, key.value, rel_tol=1e-6) if isinstance(key.value, float) else bool(found == key.value)


def _shown(file: GGUFFile, name: str) -> str:
    return f"{file.metadata[name]!r:.40}" if name in file.metadata else "missing"


def _tensors(file: GGUFFile, source: ModelSource, inject: Sequence[str]) -> dict[str, Entry | None]:
    """The tensors that are asked for, and the frequencies where the source has others."""
    names = {gguf: own for own, gguf in gguf_names(find_weights(source.config, source))}
    chosen: dict[str, str] = {}
    for pattern in inject:
        found = [name for name in names if fnmatchcase(name, pattern)]
        if not found:
            raise ParameterError(
                "the source has no such tensor", found=pattern, needed=f"a name in a GGUF file, such as {listed(names)}"
            )
        chosen |= {name: names[name] for name in found}
    entries: dict[str, Entry | None] = dict(_injected(file, source, chosen))
    factors = frequency_entry(source.config)
    if not _same_frequencies(file, factors):
        entries[FREQUENCIES] = factors
    return entries


def _same_frequencies(file: GGUFFile, factors: Entry | None) -> bool:
    if factors is None or FREQUENCIES not in file.tensors:
        return factors is None and FREQUENCIES not in file.tensors
    ours = file.tensor(FREQUENCIES).reshape(-1)
    return ours.shape == factors.shape and np.allclose(ours, factors.make(), rtol=1e-5)


def _injected(file: GGUFFile, source: ModelSource, chosen: dict[str, str]) -> Iterator[tuple[str, Entry]]:
    types = {gguf: _type(file, gguf) for gguf in chosen}
    choices = {own: _choice(types[gguf]) for gguf, own in chosen.items() if len(source.stored[own].shape) == 2}
    rounded = Requantized(source, parse_policy("keep"), choices, None)
    raw = copied(source.file)[1] if isinstance(source, GGUFSource) else {}
    for gguf, own in chosen.items():
        as_it_is = gguf in raw and raw[gguf].type == types[gguf]
        yield gguf, raw[gguf] if as_it_is else entry_of(rounded, own, gguf)


def _type(file: GGUFFile, name: str) -> str:
    """The type of a tensor in the file, or of its like in other layers; without one, of most matrices of layers for one
    of those, and Q8_0 for embedding and head."""
    if name in file.tensors:
        return file.tensors[name].type
    part = _LAYER.sub("", name)
    like = [info.type for each, info in file.tensors.items() if _LAYER.sub("", each) == part]
    if not like and part != name:
        like = [info.type for each, info in file.tensors.items() if _LAYER.match(each) and len(info.shape) == 2]
    return Counter(like).most_common(1)[0][0] if like else SUBSTITUTE.upper()


def _choice(kind: str) -> Choice:
    if kind in FLOATS:
        return Choice(floats=kind.lower())
    return Choice(weight_format(kind if kind.lower() in GGML_FORMATS else SUBSTITUTE))
