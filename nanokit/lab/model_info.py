"""`nanokit model info`: what a model file is and where its bytes lie; two files of one model side by side.

Facts come from the header alone, unchecked: a file that cannot be loaded is one that people want to look at. What a
loader makes of them is the loader's affair (nanokit/model/config_gguf.py refuses what does not fit together).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from nanokit.errors import ModelFileError
from nanokit.lab.json_target import check_json_target, put
from nanokit.lab.table import Table
from nanokit.model.account import KINDS, ROLES, Account, account

# What is shown -> the key in a GGUF file after its architecture, and in a config.json.
_FACTS = {
    "context": ("context_length", "max_position_embeddings"),
    "layers": ("block_count", "num_hidden_layers"),
    "hidden size": ("embedding_length", "hidden_size"),
    "feed-forward size": ("feed_forward_length", "intermediate_size"),
    "query heads": ("attention.head_count", "num_attention_heads"),
    "key/value heads": ("attention.head_count_kv", "num_key_value_heads"),
    "rope base": ("rope.freq_base", "rope_theta"),
    "rope scaling": ("rope.scaling.type", "rope_scaling"),
    "rope factor": ("rope.scaling.factor", ""),
}


def main(path: str, compare: str | None, target: str | None) -> int:
    """Print one account, or two side by side; the whole as JSON to a file, or with "-" in place of the text.

    Raises ModelFileError for the files, ParameterError for a target that cannot be written."""
    check_json_target(target, path, compare)
    found = [account(each) for each in (path, compare) if each is not None]
    tables = [comparison(*found)] if compare else [overview(found[0]), by_role(found[0])]
    put(target, "\n\n".join(map(str, tables)), lambda: document(found))
    return 0


def facts(found: Account) -> dict[str, str]:
    """What the header says of the model, by name; what it does not say is left out."""
    metadata = found.metadata
    if "general.architecture" in metadata:
        architecture = str(metadata.get("general.architecture", "not stated"))
        values = {name: metadata.get(f"{architecture}.{key}") for name, (key, _) in _FACTS.items()}
    else:
        architecture = str(metadata.get("model_type", "not stated"))
        rope = metadata.get("rope_parameters")
        flat = {**(rope if isinstance(rope, dict) else {}), **metadata}
        values = {name: flat.get(key) for name, (_, key) in _FACTS.items()}
    if metadata and values["rope base"] is None:
        values["rope base"] = "not stated"
    elif isinstance(values["rope base"], str):
        values["rope base"] = f"{values['rope base']!r}, a text and no number"
    roles = {tensor.role for tensor in found.tensors}
    said = {"architecture": architecture, **{k: f"{v}" for k, v in values.items() if v is not None}}
    said |= {key: str(metadata[key]) for key in ("policy", "source") if key in metadata}
    tied = "the embedding (tied)" if "embedding" in roles else "missing, and so is the embedding"
    said["head"] = "a matrix of its own" if "head" in roles else tied
    return said


def types(found: Account, role: str | None = None) -> str:
    """The types of the tensors, or of those of one role, the one of most bytes first."""
    nbytes: dict[str, int] = {}
    for tensor in found.tensors:
        if tensor.weights and role in (None, tensor.role):  # and not of scales that stand by themselves
            nbytes[tensor.type] = nbytes.get(tensor.type, 0) + tensor.nbytes
    return ", ".join(sorted(nbytes, key=nbytes.__getitem__, reverse=True))


def overview(found: Account) -> Table:
    """The facts, and the sums."""
    rows = [
        ("file", f"{found.name}, {found.form}"),
        *facts(found).items(),
        ("types", types(found)),
        ("tensors", f"{len(found.tensors)}, on multiples of {found.alignment} bytes"),
        ("weights", f"{found.weights:,}"),
        ("bytes", f"{found.nbytes:,}, {found.header:,} of them header"),
        ("bits per weight", f"{found.bits_per_weight:.3f} without the header"),
    ]
    return Table(("this model", ""), rows)


def by_role(found: Account) -> Table:
    """Bytes of each kind in the tensors of each role, in MB (1e6)."""
    rows = []
    for role in ROLES:
        part = found.role(role)
        if part.tensors:
            cells = [_mb(part.of(kind)) for kind in KINDS]
            rows.append((role, types(part), f"{part.bits_per_weight:.3f}", *cells, _mb(part.nbytes)))
    cells = [_mb(found.of(kind)) for kind in KINDS]
    rows.append(("header", "", "", *[""] * len(KINDS), _mb(found.header)))
    rows.append(("all", "", f"{found.bits_per_weight:.3f}", *cells, _mb(found.nbytes)))
    columns = ("MB of", "types", "bits a weight", *KINDS, "all")
    return Table(columns, rows, right=columns[2:])


def check_same_model(a: Account, b: Account) -> None:
    """Raise ModelFileError unless the layers of both have as many weights."""
    counts = [{role: each.role(role).weights for role in ("attention", "feed-forward")} for each in (a, b)]
    if counts[0] != counts[1]:
        raise ModelFileError(
            f"{a.name} and {b.name} are not two files of one model",
            found=f"{counts[0]} weights, and {counts[1]}",
            needed="as many weights in the layers of both",
        )


def comparison(a: Account, b: Account) -> Table:
    """Bytes by role, by kind and in all, of two files of one model; the difference is that of the second, in MB.

    Raises ModelFileError, see `check_same_model`."""
    check_same_model(a, b)
    rows = []
    for role in ROLES:
        pair = a.role(role), b.role(role)
        if pair[0].tensors or pair[1].tensors:
            what = " -> ".join(dict.fromkeys(types(each) or "none" for each in pair))
            rows.append((role, what, *_sides(*(each.nbytes for each in pair))))
    rows.append(("header", "", *_sides(a.header, b.header)))
    rows.append(("all", f"{a.bits_per_weight:.3f} -> {b.bits_per_weight:.3f} bits", *_sides(a.nbytes, b.nbytes)))
    rows += [(f"of it {kind}", "", *_sides(a.of(kind), b.of(kind))) for kind in KINDS]
    columns = ("MB of", "types", a.name, b.name if b.name != a.name else f"{b.name} (second)", "more")
    return Table(columns, rows, right=columns[2:])


def _sides(a: int, b: int) -> tuple[str, str, str]:
    return _mb(a), _mb(b), f"{(b - a) / 1e6:+.3f}"


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.3f}"


def document(accounts: Sequence[Account]) -> dict[str, Any]:
    """Everything as JSON: of each file its facts, sums and tensors."""
    return {"schema": "nanokit.model-info/1", "models": [_as_json(each) for each in accounts]}


def _as_json(found: Account) -> Mapping[str, Any]:
    return {
        "name": found.name, "form": found.form, "facts": facts(found), "alignment": found.alignment,
        "nbytes": found.nbytes, "header_bytes": found.header, "weights": found.weights,
        "bits_per_weight": round(found.bits_per_weight, 6), **{f"{kind}_bytes": found.of(kind) for kind in KINDS},
        "tensors": [
            {"name": t.name, "type": t.type, "shape": list(t.shape), "role": t.role, "weights": t.weights,
             **{f"{kind}_bytes": getattr(t, kind) for kind in KINDS}}
            for t in found.tensors
        ],
    }  # fmt: skip
