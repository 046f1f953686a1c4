"""Numbers that a file states in the wrong kind of value: a rope base as a text, a count as 64 bits.

The value is there, only its kind is not the one that readers ask for (llama.cpp refuses any other). So the kind is
changed, and only where the number can be read in one way. Rejected: reading "100.000" or "1e5 (default)" as somebody
may have meant them, and a number that the right kind cannot hold.
"""

import math
import re
from collections.abc import Mapping

from nanokit.gguf.header import ValueKind
from nanokit.gguf.write import Key
from nanokit.model.config import ARCHITECTURES
from nanokit.model.verify.meaning import INTEGERS, SIZES

FLOATS = ("FLOAT32", "FLOAT64")
# As what numbers of an architecture are stored, with or without a reader that needs them.
KINDS: dict[str, str] = {
    **dict.fromkeys(SIZES, "UINT32"),
    "vocab_size": "UINT32",
    "attention.head_count_kv": "UINT32",
    "attention.key_length": "UINT32",
    "attention.value_length": "UINT32",
    "rope.dimension_count": "UINT32",
    "attention.layer_norm_rms_epsilon": "FLOAT32",
    "rope.freq_base": "FLOAT32",
    "rope.scaling.factor": "FLOAT32",
    "rope.scale_linear": "FLOAT32",
}
LARGEST = 3.4028234663852886e38  # of FLOAT32
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]{1,3})?")
_THOUSANDS = re.compile(r"[+-]?[1-9][0-9]{0,2}\.[0-9]{3}")  # or a fraction: both are written so


def mended_keys(keys: Mapping[str, Key]) -> tuple[dict[str, Key], list[str]]:
    """The keys whose kind changes, and a sentence for each. None of a file whose architecture is not known here."""
    architecture = keys["general.architecture"].value if "general.architecture" in keys else None
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        return {}, []
    changed: dict[str, Key] = {}
    for key, kind in KINDS.items():
        name = f"{architecture}.{key}"
        if name in keys and keys[name].kind.type != kind:
            value = _number(keys[name], kind)
            if value is not None:
                changed[name] = Key(ValueKind(kind), value)
    said = [
        f"{name}: {keys[name].value!r} is a {keys[name].kind.type}, and becomes a {new.kind.type}, {new.value!r}"
        for name, new in changed.items()
    ]
    return changed, said


def _number(key: Key, kind: str) -> int | float | None:
    """The value as the kind has it, or None where it says no number of that kind."""
    value = key.value
    if key.kind.type == "STRING":
        text = value.strip()
        if not _NUMBER.fullmatch(text) or _THOUSANDS.fullmatch(text):
            return None
        value = int(text) if text.lstrip("+-").isdigit() and len(text) < 20 else float(text)
    elif key.kind.type not in (*INTEGERS, *FLOATS):
        return None
    if kind == "FLOAT32":
        return float(value) if abs(value) <= LARGEST else None
    whole = math.isfinite(value) and value == int(value) and 0 <= value < 1 << 32
    return int(value) if whole else None
