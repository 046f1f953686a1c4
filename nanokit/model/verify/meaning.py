"""Do keys and tensors fit together as a model of their architecture?

Each check names the key or the tensor that contradicts the other. What no header can tell (whether a rope base that is
stated is the model's own) stays "not checked" until a source is at hand. At the end the loader has its say: a fault
that no check knows by name is still a fault.
"""

from collections.abc import Callable, Iterator
from typing import Any

from nanokit.errors import NanokitError, TokenizerError, UnsupportedModelError
from nanokit.gguf.reader import GGUFFile
from nanokit.model.chat import ChatTemplate
from nanokit.model.config import ARCHITECTURES
from nanokit.model.source import GGUFSource
from nanokit.model.tokenizer import Tokenizer
from nanokit.model.tokenizer_gguf import PRE_TOKENIZERS
from nanokit.model.verify.report import NEEDS_SOURCE, Check, Found, listed
from nanokit.model.weights import Weights, find_weights
from nanokit.quant.formats import FORMATS

PART = "meaning"
INTEGERS = ("UINT8", "INT8", "UINT16", "INT16", "UINT32", "INT32", "UINT64", "INT64")
SIZES = ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count")
PER_LAYER = ("feed_forward_length", "attention.head_count", "attention.head_count_kv")  # an array may stand for these
FUSED = {"phi3"}  # architectures whose files keep gate and up in one matrix, ffn_up
ROPE_BASE, ROPE_SCALING, HEAD, VOCABULARY = "rope base", "rope scaling", "head", "vocabulary"
_OWN = f"{NEEDS_SOURCE} (nanokit model smoke tries some others)"
_SCALING = (
    "type", "factor", "original_context_length", "finetuned", "attn_factor", "yarn_log_multiplier", "yarn_ext_factor",
    "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow",
)  # fmt: skip


def meaning(file: GGUFFile) -> tuple[list[Check], GGUFSource | None, Weights | None]:
    """The checks, and the model as the loader sees it where it loads; its vocabulary may be unknown all the same."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        return list(_foreign(file, architecture)), None, None
    keys = _Keys(file, str(architecture))
    checks = [Check(PART, "architecture", "ok", keys.architecture)]
    rules: dict[str, Callable[[_Keys], Found]] = {
        "required keys": _required, ROPE_BASE: _rope_base, ROPE_SCALING: _rope_scaling, "head counts": _head_counts,
        "gate, up and down": _feed_forward, HEAD: _head, "special tokens": _special, VOCABULARY: _vocabulary,
        "chat template": _template,
    }  # fmt: skip
    checks += [Check(PART, name, *rule(keys)) for name, rule in rules.items()]
    try:
        source = GGUFSource(file.path)
        weights = find_weights(source.config, source)
    except NanokitError as error:
        return [*checks, _refused(checks, error)], None, None
    unread = [f"{name} ({stored.type})" for name, stored in source.stored.items() if stored.type not in FORMATS]
    if unread:
        said = f"{listed(unread)}: no type of weights that can be read here"
        return [*checks, Check(PART, "tensors", "not checked", said)], None, None
    said = f"{len(weights.layers)} layers, every tensor of {keys.architecture} and no other, in its shape"
    return [*checks, Check(PART, "tensors", "ok", said)], source, weights


def _refused(checks: list[Check], error: NanokitError) -> Check:
    """What the loader says. A model of a kind that is not known here is no fault of the file."""
    if isinstance(error, UnsupportedModelError):
        return Check(
            PART, "tensors", "not checked", f"nanokit does not run such models: {error.what}; found {error.found}"
        )
    if any(check.verdict == "failed" for check in checks):
        return Check(PART, "tensors", "not checked", "the loader stops at what failed above")
    return Check(PART, "tensors", "failed", f"the loader refuses: {error.what}; found {error.found}")


def _foreign(file: GGUFFile, architecture: object) -> Iterator[Check]:
    if not isinstance(architecture, str):
        found = "missing" if architecture is None else repr(architecture)
        yield Check(PART, "architecture", "failed", f"general.architecture is {found}, no name")
        return
    unknown = f"nanokit runs {', '.join(ARCHITECTURES)}, not {architecture}: keys and shapes are not looked at"
    yield Check(PART, "architecture", "not checked", unknown)
    fused = _fused(file, file.metadata.get(f"{architecture}.feed_forward_length"))
    if fused and architecture in FUSED:
        said = f"gate and up fused in ffn_up in {len(fused)} layers, as {architecture} has them"
        yield Check(PART, "gate, up and down", "ok", said)


class _Keys:
    """A file asked for the keys of its architecture."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file, self.architecture = file, architecture

    def name(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def get(self, key: str) -> Any:
        return self.file.metadata.get(self.name(key))

    def kind(self, key: str) -> str:
        """As what it is stored, "" where it is missing; of one value a layer, what those are."""
        kind = self.file.kinds.get(self.name(key))
        if kind is None:
            return ""
        return (
            kind.element if key in PER_LAYER and kind.element else f"{kind.type} of {kind.element}".removesuffix(" of ")
        )

    def integer(self, key: str) -> int | None:
        """A whole number, of an array with one value a layer the only one; None for anything else."""
        value = self.get(key)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        return value if type(value) is int else None

    def wrong(self, key: str, kinds: tuple[str, ...], needed: str) -> str:
        """What is wrong with a key that has to be there, "" where nothing is."""
        kind = self.kind(key)
        if not kind:
            return f"{self.name(key)} is missing"
        return "" if kind in kinds else f"{self.name(key)} is a {kind}, {self.get(key)!r:.40}, where {needed} has to be"


def _required(keys: _Keys) -> Found:
    wrong = [keys.wrong(key, INTEGERS, "a whole number") for key in SIZES]
    wrong.append(keys.wrong("attention.layer_norm_rms_epsilon", ("FLOAT32", "FLOAT64"), "a FLOAT32"))
    if faults := [each for each in wrong if each]:
        return "failed", "; ".join(faults)
    return "ok", f"{len(wrong)} keys of {keys.architecture}, of the right kind"


def _rope_base(keys: _Keys) -> Found:
    fault = keys.wrong("rope.freq_base", ("FLOAT32",), "a FLOAT32")
    if fault:
        return "failed", fault + ("" if keys.kind("rope.freq_base") else "; other programs take 10,000 then")
    base = keys.get("rope.freq_base")
    if not 0 < base < float("inf"):
        return "failed", f"{keys.name('rope.freq_base')} is {base}, no positive number"
    return "not checked", f"{keys.name('rope.freq_base')} says {base:g}; whether that is the model's own {_OWN}"


def _rope_scaling(keys: _Keys) -> Found:
    stated = {
        name: value
        for name, value in keys.file.metadata.items()
        if name.startswith((keys.name("rope.scaling."), keys.name("rope.scale_linear")))
    }
    known = {keys.name(f"rope.scaling.{each}") for each in _SCALING} | {keys.name("rope.scale_linear")}
    if unknown := sorted(stated.keys() - known):
        return "warning", f"{listed(unknown)} means nothing that is known here"
    wrong = [
        keys.wrong(key, kinds, needed)
        for key, kinds, needed in (
            ("rope.scaling.type", ("STRING",), "a STRING"),
            ("rope.scaling.factor", ("FLOAT32",), "a FLOAT32"),
            ("rope.scale_linear", ("FLOAT32",), "a FLOAT32"),
        )
        if keys.kind(key)
    ]
    if faults := [each for each in wrong if each]:
        return "failed", "; ".join(faults)
    parts = [f"{name} = {value}" for name, value in stated.items()]
    parts += ["the tensor rope_freqs.weight"] if "rope_freqs.weight" in keys.file.tensors else []
    return "not checked", f"{'; '.join(parts) or 'none'}; whether that is the model's own {_OWN}"


def _head_counts(keys: _Keys) -> Found:
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    kv_key = "attention.head_count_kv" if keys.kind("attention.head_count_kv") else "attention.head_count"
    kv_heads = keys.integer(kv_key)
    if any(isinstance(keys.get(key), list) and not keys.integer(key) for key in (kv_key, "attention.head_count")):
        return "not checked", "another number of heads in each layer"
    if not hidden or not heads or not kv_heads:
        return "not checked", "the keys that it needs are missing, or no whole numbers above 0"
    per_head, said_by = hidden // heads, f"{hidden} / {heads}"
    for key in ("rope.dimension_count", "attention.key_length"):
        if stated := keys.integer(key):
            per_head, said_by = stated, keys.name(key)
    faults = []
    for part, count, key in (("q", heads, "attention.head_count"), ("k", kv_heads, kv_key), ("v", kv_heads, kv_key)):
        rows = {
            info.shape[0]: name
            for name, info in reversed(keys.file.tensors.items())
            if name.endswith(f".attn_{part}.weight")
        }
        faults += [
            f"{keys.name(key)} is {count}, of {per_head} dimensions each ({said_by}), but {name} has {found} rows"
            for found, name in rows.items()
            if found != count * per_head
        ]
    if faults:
        return "failed", "; ".join(faults)
    return "ok", f"{heads} query and {kv_heads} key/value heads of {per_head}, as the rows of q, k and v say"


def _fused(file: GGUFFile, width: object) -> list[str]:
    """The matrices that hold gate and up together."""
    return [
        name
        for name, info in file.tensors.items()
        if name.endswith(".ffn_up.weight")
        and isinstance(width, int)
        and info.shape[0] == 2 * width
        and name.replace("ffn_up", "ffn_gate") not in file.tensors
    ]


def _feed_forward(keys: _Keys) -> Found:
    width = keys.integer("feed_forward_length")
    if keys.get("expert_count"):
        return "not checked", "experts, which nanokit does not run"
    if fused := _fused(keys.file, width):
        return "failed", (
            f"{fused[0]} has {2 * (width or 0)} rows, twice {keys.name('feed_forward_length')}: gate and up fused, in "
            f"{len(fused)} layers, as phi3 files have them; {keys.architecture} keeps ffn_gate apart"
        )
    shapes: dict[str, tuple[int, ...]] = {}
    for index in range(min(keys.integer("block_count") or 0, len(keys.file.tensors))):
        for part, axis in (("gate", 0), ("up", 0), ("down", 1)):
            name = f"blk.{index}.ffn_{part}.weight"
            info = keys.file.tensors.get(name)
            if info is None:
                return "failed", f"{name} is missing"
            if len(info.shape) != 2 or info.shape[axis] != width:
                shapes[name] = info.shape
    if shapes:
        name, shape = next(iter(shapes.items()))
        return "failed", f"{name} is {list(shape)}, but {keys.name('feed_forward_length')} is {width}"
    return "ok", f"apart in every layer, {width} wide"


def _head(keys: _Keys) -> Found:
    tensors = keys.file.tensors
    if "token_embd.weight" not in tensors:
        tied = ", nor output.weight" if "output.weight" not in tensors else ", only output.weight"
        return "failed", f"token_embd.weight is not there{tied}: the matrix of a tied head belongs under its name"
    if "output.weight" in tensors:
        return "ok", "a matrix of its own, output.weight"
    return "not checked", f"tied: no output.weight, the embedding is the head; whether it is the model's {NEEDS_SOURCE}"


def _vocabulary(keys: _Keys) -> Found:
    metadata = keys.file.metadata
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if isinstance(kind, str) and kind not in ("gpt2", "llama"):
        return "not checked", f"vocabularies of the kind {kind!r} are not known to nanokit"
    if kind == "gpt2" and isinstance(pre, str) and pre not in PRE_TOKENIZERS:
        return "not checked", f"tokenizer.ggml.pre is {pre!r}, which is not known to nanokit"
    if _special(keys)[0] == "failed":
        return "not checked", "special tokens come first"
    try:
        tokenizer = Tokenizer.from_gguf(metadata)
    except TokenizerError as error:
        return "failed", f"{error.what}; found {error.found}"
    table = keys.file.tensors.get("token_embd.weight")
    if table is not None and table.shape[0] < tokenizer.vocab_size:
        return (
            "failed",
            f"tokenizer.ggml.tokens has {tokenizer.vocab_size} tokens, token_embd.weight {table.shape[0]} rows",
        )
    stated = keys.get("vocab_size")
    if table is not None and stated is not None and stated != table.shape[0]:
        return "failed", f"{keys.name('vocab_size')} is {stated}, but token_embd.weight has {table.shape[0]} rows"
    return "ok", f"{tokenizer.vocab_size} tokens, each with a row of the embedding"


def _special(keys: _Keys) -> Found:
    metadata = keys.file.metadata
    tokens = metadata.get("tokenizer.ggml.tokens")
    count = len(tokens) if isinstance(tokens, list) else 0
    ids = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.") and key.endswith("_token_id")
    }
    outside = {key: value for key, value in ids.items() if type(value) is not int or not 0 <= value < count}
    if outside:
        return "failed", "; ".join(
            f"tokenizer.ggml.{key} is {value!r:.40}, no id below {count}" for key, value in outside.items()
        )
    if "eos_token_id" not in ids:
        return "warning", "tokenizer.ggml.eos_token_id is missing: answers end only where they are cut"
    named = ", ".join(f"{key.removesuffix('_token_id')} {tokens[value]!r}" for key, value in ids.items())  # type: ignore[index]
    return "ok", named


def _template(keys: _Keys) -> Found:
    source = keys.file.metadata.get("tokenizer.chat_template")
    if source is None:
        return "ok", "none: a model for plain text"
    try:
        template = ChatTemplate(source)
    except TokenizerError as error:
        return "failed", f"tokenizer.chat_template: {error.found}"
    try:
        texts = {"bos_token": "", "eos_token": ""}
        template.render([{"role": "user", "content": "Hi"}], add_generation_prompt=True, special_texts=texts)
    except TokenizerError as error:
        return "warning", f"tokenizer.chat_template does not render a user's message: {error.found}"
    return "ok", "compiles in a sandbox and renders a user's message"
