"""How each fault of `gguf.faults` changes a model: keys, rows of tensors, or bytes of the written file.

Each function looks at a sound file and gives a `Change`, or raises ParameterError where the model cannot have the
fault (a rope base that is 10,000 already). Nothing is read from tensors before the copy is written.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import numpy as np

from nanokit.errors import ParameterError
from nanokit.gguf import types
from nanokit.gguf.header import TensorInfo, ValueKind
from nanokit.gguf.reader import GGUFFile
from nanokit.gguf.write import Entry, Key, copied

# Bytes before the first key (magic, version, two counts), of a length, and of a tensor's entry beside name and sizes.
_START, _LENGTH, _INFO = 24, 8, 24
# Where a block keeps its scale (a float type: a weight), and bytes that make it no number.
_NAN = {
    "F32": (0, b"\0\0\xc0\x7f"), "F16": (0, b"\0\x7e"), "BF16": (0, b"\xc0\x7f"), "MXFP4": (0, b"\xff"),
    **dict.fromkeys(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "IQ4_NL", "IQ4_XS"), (0, b"\0\x7e")),
    "Q2_K": (80, b"\0\x7e"), "Q3_K": (108, b"\0\x7e"), "Q6_K": (208, b"\0\x7e"),
}  # fmt: skip
_FLOAT, _TEXT, _U32 = ValueKind("FLOAT32"), ValueKind("STRING"), ValueKind("UINT32")


@dataclass(frozen=True)
class Change:
    """said: the change in one sentence, with its numbers. keys, tensors: in place of the source's own, None leaves one
    out. edit: given the copy with these in place, where bytes are to be put, and which; None for them: the file ends
    there. edited: the key or tensor that this breaks."""

    said: str
    keys: Mapping[str, Key | None] = field(default_factory=dict)
    tensors: Mapping[str, Entry | None] = field(default_factory=dict)
    edit: Callable[[GGUFFile], tuple[int, bytes | None]] | None = None
    edited: str = ""


def _impossible(found: object, needed: str) -> NoReturn:
    raise ParameterError("this model cannot have the fault", found=found, needed=needed)


def _key(file: GGUFFile, name: str) -> str:
    """The full name of a key that is called after the architecture."""
    return f"{file.metadata.get('general.architecture')}.{name}"


def _number(file: GGUFFile, name: str, default: float | None = None) -> Any:
    value = file.metadata.get(_key(file, name), default)
    if isinstance(value, list) and len(set(value)) == 1:
        value = value[0]  # one value a layer, all the same
    if isinstance(value, bool) or not isinstance(value, int | float):
        _impossible(f"{_key(file, name)} = {value!r:.80}", "a number")
    return value


def _layers(file: GGUFFile, part: str) -> list[int]:
    """The layers with a matrix of this name, in order; at least one."""
    found = [int(m[1]) for name in file.tensors if (m := re.fullmatch(rf"blk\.(\d+)\.{part}\.weight", name))]
    return sorted(found) or _impossible(f"no tensors blk.N.{part}.weight", "a model of the llama kind")


# -- keys -------------------------------------------------------------------------------------------------------------


def rope_base(file: GGUFFile, new: Callable[[float], Key | None], said: str) -> Change:
    base = _number(file, "rope.freq_base")
    changed = new(base)
    if changed is not None and changed.value == base:
        _impossible(f"rope base {base:g}", "another one")
    return Change(
        f"{_key(file, 'rope.freq_base')} is {said}, in place of {base:g}", {_key(file, "rope.freq_base"): changed}
    )


def half_scale(file: GGUFFile) -> Change:
    kind, factor = _key(file, "rope.scaling.type"), _key(file, "rope.scaling.factor")
    now = _number(file, "rope.scaling.factor", _number(file, "rope.scale_linear", 1.0))
    new = {} if file.metadata.get(kind) == "linear" else {kind: Key(_TEXT, "linear")}
    said = f"rope frequencies are divided by {2 * now:g}, in place of {now:g}"
    return Change(said, {**new, factor: Key(_FLOAT, 2.0 * now)})


def other_head_count(file: GGUFFile) -> Change:
    key, heads = _key(file, "attention.head_count"), _number(file, "attention.head_count")
    new = 33 if heads == 32 else 32
    return Change(f"{key} is {new}, in place of {heads}", {key: Key(_U32, new)})


# -- tensors ----------------------------------------------------------------------------------------------------------


def _swapped(file: GGUFFile, layers: list[int]) -> Change:
    _, entries = copied(file)
    changed: dict[str, Entry | None] = {}
    for i in layers:
        gate, up = f"blk.{i}.ffn_gate.weight", f"blk.{i}.ffn_up.weight"
        changed |= {gate: replace(entries[up], name=gate), up: replace(entries[gate], name=up)}
    which = f"layer {layers[0]}" if len(layers) == 1 else f"all {len(layers)} layers"
    return Change(f"gate and up of {which} have changed places", tensors=changed)


def swapped_all(file: GGUFFile) -> Change:
    return _swapped(file, _layers(file, "ffn_gate"))


def swapped_one(file: GGUFFile, layer: int | None = None) -> Change:
    layers = _layers(file, "ffn_gate")
    chosen = layers[len(layers) // 2] if layer is None else layer
    if chosen not in layers:
        raise ParameterError("the model has no such layer", found=layer, needed=f"{layers[0]} to {layers[-1]}")
    return _swapped(file, [chosen])


def fused(file: GGUFFile) -> Change:
    changed: dict[str, Entry | None] = {}
    layers = _layers(file, "ffn_gate")
    for i in layers:
        gate, up = (file.info(f"blk.{i}.{part}.weight") for part in ("ffn_gate", "ffn_up"))
        if gate.type != up.type:
            _impossible(f"{gate.name} in {gate.type}, {up.name} in {up.type}", "one type, to be one matrix")
        shape = (gate.shape[0] + up.shape[0], *up.shape[1:])
        rows = partial(_stacked, file, gate.name, up.name)
        changed |= {gate.name: None, up.name: Entry(up.name, up.type, shape, rows)}
    return Change(f"gate and up of all {len(layers)} layers are one matrix, named ffn_up", tensors=changed)


def _stacked(file: GGUFFile, *names: str) -> np.ndarray:
    return np.concatenate([file.raw(name) for name in names])


def _rows(file: GGUFFile, name: str, *orders: tuple[int, bool]) -> np.ndarray:
    """Bytes of a tensor whose rows are put into each order (heads, interleaved) in turn: from half-split rope order to
    interleaved, or back."""
    rows = file.raw(name).reshape(file.info(name).shape[0], -1)
    for heads, interleaved in orders:
        parts = (heads, 2, -1) if interleaved else (heads, len(rows) // heads // 2, 2)
        rows = rows.reshape(*parts, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)
    return rows


def _reordered(file: GGUFFile, part: str, heads: int, *orders: tuple[int, bool]) -> dict[str, Entry | None]:
    """q or k of all layers, biases too. heads: that the file's own order is of."""
    changed: dict[str, Entry | None] = {}
    for i in _layers(file, part):
        for name in (f"blk.{i}.{part}.weight", f"blk.{i}.{part}.bias"):
            if (info := file.tensors.get(name)) is not None:
                if info.shape[0] % (2 * heads):
                    _impossible(f"{info.shape[0]} rows of {name} for {heads} heads", "pairs of rows for every head")
                changed[name] = Entry(name, info.type, info.shape, partial(_rows, file, name, *orders))
    return changed


def permuted(file: GGUFFile) -> Change:
    heads = _number(file, "attention.head_count")
    counts = {"attn_q": heads, "attn_k": _number(file, "attention.head_count_kv", heads)}
    interleave = file.metadata.get("general.architecture") != "llama"  # whose files have them interleaved
    changed: dict[str, Entry | None] = {}
    for part, count in counts.items():
        changed |= _reordered(file, part, count, (count, interleave))
    return Change(f"rows of q and k are {'interleaved' if interleave else 'half-split'}", tensors=changed)


def wrong_heads(file: GGUFFile) -> Change:
    if (architecture := file.metadata.get("general.architecture")) != "llama":
        _impossible(f"architecture {architecture}, whose k has its rows as they are", "llama")
    heads = _number(file, "attention.head_count")
    own = _number(file, "attention.head_count_kv", heads)
    rows = file.info(f"blk.{_layers(file, 'attn_k')[0]}.attn_k.weight").shape[0]
    usable = [n for n in range(heads, 0, -1) if n != own and rows % (2 * n) == 0 and rows > 2 * n]
    if not usable:
        _impossible(f"{rows} rows of k, {own} heads", "rows that divide into pairs for another number of heads")
    changed = _reordered(file, "attn_k", own, (own, False), (usable[0], True))
    return Change(f"rows of k are interleaved for {usable[0]} heads, in place of {own}", tensors=changed)


def head_dropped(file: GGUFFile) -> Change:
    name = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
    return Change(f"{name}, the head{'' if name[0] == 'o' else ' and the embedding'}, is gone", tensors={name: None})


def nan(file: GGUFFile) -> Change:
    usable = [info for info in file.tensors.values() if len(info.shape) == 2 and info.type in _NAN]
    if not usable:
        _impossible("no matrix of a known type", "one of " + ", ".join(_NAN))
    info = usable[len(usable) // 2]
    changed = Entry(info.name, info.type, info.shape, partial(_with_nan, file, info))
    what = "weight" if info.type in ("F32", "F16", "BF16") else "scale"
    return Change(f"a {what} of {info.name} ({info.type}) is no number", tensors={info.name: changed})


def _with_nan(file: GGUFFile, info: TensorInfo) -> np.ndarray:
    at, nan = _NAN[info.type]
    geometry = next(each for each in types.TENSOR_TYPES.values() if each.name == info.type)
    blocks = file.raw(info.name).reshape(-1, geometry.block_bytes).copy()
    blocks[len(blocks) // 2, at : at + len(nan)] = np.frombuffer(nan, np.uint8)
    return blocks


# -- the file ---------------------------------------------------------------------------------------------------------


def _key_places(file: GGUFFile) -> tuple[dict[str, int], int]:
    """Where the value of each key begins, behind its type, and where the last one ends."""
    places, at = {}, _START
    for key, value in file.metadata.items():
        places[key] = at = at + _LENGTH + len(key.encode()) + 4
        at += _size(file.kinds[key], value)
    return places, at


def _size(kind: ValueKind, value: Any) -> int:
    if kind.type == "ARRAY":
        return 4 + _LENGTH + sum(_size(ValueKind(kind.element), each) for each in value)
    if kind.type == "STRING":
        return _LENGTH + len(value.encode())
    return next(layout.size for name, layout in types.SCALARS.values() if name == kind.type)


def _info_end(file: GGUFFile, name: str) -> int:
    """Where a tensor's entry in the table ends; its last eight bytes are the offset."""
    at = _key_places(file)[1]
    for info in file.tensors.values():
        at += _INFO + len(info.name.encode()) + 8 * len(info.shape)
        if info.name == name:
            break
    return at


def cut_magic(file: GGUFFile) -> Change:
    return Change("the file ends inside magic and version", edit=lambda copy: (6, None))


def cut_keys(file: GGUFFile) -> Change:
    """In the longest value, the vocabulary: so short a file that even its counts cannot be right tells less."""
    sizes = {key: _size(file.kinds[key], value) for key, value in file.metadata.items()}
    key = max(sizes, key=sizes.__getitem__)
    said = f"the file ends inside the value of {key}, after {sizes[key] // 2} of its {sizes[key]} bytes"
    return Change(said, edit=lambda copy: (_key_places(copy)[0][key] + sizes[key] // 2, None), edited=key)


def cut_table(file: GGUFFile) -> Change:
    name = list(file.tensors)[len(file.tensors) // 2]
    said = f"the file ends inside the entry of {name} in the table of tensors"
    return Change(said, edit=lambda copy: (_info_end(copy, name) - _LENGTH, None), edited=name)


def cut_data(file: GGUFFile, index: int | None, last: int | None = None) -> Change:
    """index: of the tensor, the middle one if None; last: bytes that it loses, half of it if None."""
    infos = list(file.tensors.values())
    info = infos[len(infos) // 2 if index is None else index]
    left = info.nbytes - (info.nbytes // 2 if last is None else last)
    said = f"the file ends inside {info.name}, after {left} of its {info.nbytes} bytes"
    return Change(said, edit=lambda copy: (info.offset + left, None), edited=info.name)


def moved(file: GGUFFile, place: Callable[[int], int]) -> Change:
    """place: the second tensor's offset, by what it should be."""
    if len(file.tensors) < 2:
        _impossible(f"{len(file.tensors)} tensors", "two")
    first, second, *_ = file.tensors.values()
    own = second.offset - first.offset
    said = f"the offset of {second.name} is {place(own)}, in place of {own}"
    new = place(own).to_bytes(8, "little")
    return Change(said, edit=lambda copy: (_info_end(copy, second.name) - _LENGTH, new), edited=second.name)


def alignment(file: GGUFFile, value: int) -> Change:
    name, new = "general.alignment", value.to_bytes(4, "little")
    stated: dict[str, Key | None] = {} if name in file.metadata else {name: Key(_U32, file.alignment)}
    said = f"{name} is {value}, in place of {file.alignment}"
    return Change(said, stated, edit=lambda copy: (_key_places(copy)[0][name], new), edited=name)
