"""Broken copies of a model, on demand: what converters, copiers and editors have done to GGUF files, one fault a copy.

They are what a verifier is tried on, and what a notebook shows. A fault is put into any whole model, so that what it
costs is seen on weights that mean something; a collection of broken files was rejected, for it would show one model of
one type, and nobody could tell what else is odd about it. Rows move as raw bytes (a row of a quantized matrix is a
whole number of blocks), so no weight is rounded, and all that a fault does not name stays byte for byte.

Faults of keys and tensors are written by `gguf.write`; what no writer writes (a file cut short, an offset or an
alignment that cannot be) is then patched in, at places computed from the header.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from nanokit.errors import ParameterError
from nanokit.gguf import fault_kinds as kinds
from nanokit.gguf.fault_kinds import Change
from nanokit.gguf.header import ValueKind
from nanokit.gguf.reader import GGUFFile
from nanokit.gguf.write import Key, copied, write_gguf
from nanokit.paths import replacing


class Fault(NamedTuple):
    """what: one sentence of what a converter, a copier or an editor did. place: where it shows: "file" (no reader
    should open it), "keys" or "tensors". needs_source: nothing in the file tells it from a sound one. make: see
    `inject`, which calls it."""

    name: str
    what: str
    place: str
    make: Callable[[GGUFFile], Change]
    needs_source: bool = False


@dataclass(frozen=True)
class Injected:
    """What is wrong in a copy. keys, tensors: those that differ from the source's or are gone; of a file that is cut
    short, the first that is not whole. said: the change in one sentence, with its numbers."""

    fault: Fault
    keys: tuple[str, ...]
    tensors: tuple[str, ...]
    said: str


def inject(name: str, source: Path, target: Path, *, layer: int | None = None) -> Injected:
    """Write `target`: the model of `source`, a sound file, with the fault `name` (of FAULTS) and no other.

    layer: of the fault of one layer, the middle one if None. The same file always gives the same copy. Raises
    ParameterError for a fault that there is not or that this model cannot have, for a model in several shards and for a
    target that is the source; ModelFileError for a source that is damaged; OSError for a target that cannot be written.
    """
    if name not in FAULTS:
        raise ParameterError("there is no such fault", found=repr(name), needed="one of " + ", ".join(FAULTS))
    if layer is not None and name != "gate-up-swapped-one":
        raise ParameterError("only gate-up-swapped-one is a fault of one layer", found=name, needed="no layer")
    if target.resolve() == source.resolve():
        raise ParameterError("a fault is put into a copy only", found=target, needed="another file than the model")
    file, fault = GGUFFile.open(source), FAULTS[name]
    if len(file.files) > 1:
        found = f"{source.name}, one of {len(file.files)} shards"
        raise ParameterError("a fault is put into a model of one file", found=found, needed="the shards joined")
    change = fault.make(file) if layer is None else kinds.swapped_one(file, layer)
    with replacing(target) as scratch:
        if change.keys or change.tensors:
            keys, entries = copied(file)
            kept = {k: v for k, v in {**keys, **change.keys}.items() if v}
            write_gguf(scratch, kept, [each for each in {**entries, **change.tensors}.values() if each])
        else:
            shutil.copyfile(source, scratch)
        if change.edit is not None:
            at, new = change.edit(GGUFFile.open(scratch))
            with scratch.open("r+b") as copy:
                copy.seek(at)
                copy.write(new or b"")
                if new is None:
                    copy.truncate()
    broken = (*change.keys, *change.tensors, *filter(None, [change.edited]))
    tensors = tuple(each for each in dict.fromkeys(broken) if each in file.tensors)
    return Injected(fault, tuple(each for each in dict.fromkeys(broken) if each not in tensors), tensors, change.said)


_FLOAT, _TEXT = ValueKind("FLOAT32"), ValueKind("STRING")

FAULTS: dict[str, Fault] = {
    each.name: each
    for each in (
        Fault(
            "rope-base-10000",
            "a converter looked for the rope base under another name and wrote the usual 10,000",
            "keys",
            lambda file: kinds.rope_base(file, lambda base: Key(_FLOAT, 10000.0), "10000"),
            needs_source=True,
        ),
        Fault(
            "rope-base-missing",
            "a converter left the rope base out where it did not find it, and readers take 10,000",
            "keys",
            lambda file: kinds.rope_base(file, lambda base: None, "not there"),
        ),
        Fault(
            "rope-base-text",
            "an editor stored the rope base as a text",
            "keys",
            lambda file: kinds.rope_base(file, lambda base: Key(_TEXT, str(base)), "a text"),
        ),
        Fault(
            "frequency-scale-half",
            "a converter wrote linear rope scaling by 2 for a model that was not trained with it",
            "keys",
            kinds.half_scale,
            needs_source=True,
        ),
        Fault(
            "gate-up-swapped-one",
            "an editor that put a layer together from parts took gate for up, and up for gate",
            "tensors",
            kinds.swapped_one,
            needs_source=True,
        ),
        Fault(
            "gate-up-swapped-all",
            "a converter split a fused matrix of gate and up in the wrong order",
            "tensors",
            kinds.swapped_all,
        ),
        Fault(
            "gate-up-fused",
            "a converter left gate and up in one matrix under the name of up, as another architecture has them",
            "tensors",
            kinds.fused,
        ),
        Fault(
            "q-k-permuted",
            "a converter left q and k in the order of rows that is right for another architecture",
            "tensors",
            kinds.permuted,
        ),
        Fault(
            "k-wrong-heads",
            "a converter put the rows of k into order with a head count that is not that of the key/value heads",
            "tensors",
            kinds.wrong_heads,
        ),
        Fault(
            "head-count-32",
            "a converter wrote the head count of another model of the family",
            "keys",
            kinds.other_head_count,
        ),
        Fault("truncated-magic", "a download stopped in the first bytes", "file", kinds.cut_magic),
        Fault("truncated-keys", "a download stopped inside the metadata", "file", kinds.cut_keys),
        Fault("truncated-table", "a download stopped inside the table of tensors", "file", kinds.cut_table),
        Fault(
            "truncated-first", "a download stopped inside the first tensor", "file", partial(kinds.cut_data, index=0)
        ),
        Fault(
            "truncated-middle", "a copy stopped in the middle of the data", "file", partial(kinds.cut_data, index=None)
        ),
        Fault(
            "truncated-last",
            "a copy lost its last four bytes of data",
            "file",
            partial(kinds.cut_data, index=-1, last=4),
        ),
        Fault(
            "tensor-misaligned",
            "a writer forgot the padding rule, and the second tensor begins three bytes late",
            "file",
            partial(kinds.moved, place=lambda own: own + 3),
        ),
        Fault(
            "tensors-overlapping",
            "a writer counted offsets anew, and the second tensor lies on the first",
            "file",
            partial(kinds.moved, place=lambda own: 0),
        ),
        Fault("alignment-0", "an editor set the alignment to 0", "file", partial(kinds.alignment, value=0)),
        Fault("alignment-13", "an editor set the alignment to 13", "file", partial(kinds.alignment, value=13)),
        Fault("alignment-2-31", "an editor set the alignment to 2^31", "file", partial(kinds.alignment, value=1 << 31)),
        Fault(
            "tied-head-dropped",
            "a converter dropped the matrix of the head, taking it for a copy of the embedding or the reverse",
            "tensors",
            kinds.head_dropped,
        ),
        Fault("nan-scale", "an overflow in the quantizer left a scale that is no number", "tensors", kinds.nan),
    )
}
"""All faults, in the order in which they are shown."""
