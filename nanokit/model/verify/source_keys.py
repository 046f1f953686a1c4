"""Does the file say of its model what its source says?"""

import math
from collections.abc import Iterator

import torch

from nanokit.model.config import ModelConfig
from nanokit.model.source import GGUFSource, ModelSource
from nanokit.model.tokenizer import Tokenizer
from nanokit.model.verify.meaning import HEAD, ROPE_BASE, ROPE_SCALING
from nanokit.model.verify.report import Check, Found, listed

PART = "source"
# Field of ModelConfig -> key after the architecture.
SIZES = {
    "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length", "num_layers": "block_count",
    "num_heads": "attention.head_count", "num_kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length", "vocab_size": "vocab_size",
}  # fmt: skip
PROBE = "The 3 Naïve users don't\n\n  agree: 12345 + 67 = 12412?\tÄh, 東京, e\u0301 and WE'LL see.\r\n"
ROUNDING = 1e-5  # relative: keys are stored as fp32


def compare_keys(file: GGUFSource, source: ModelSource, *, vocabulary: bool = True) -> list[Check]:
    """The checks, of configuration and vocabulary. vocabulary: whether that of the file can be read."""
    a, b = file.config, source.config
    found: dict[str, Found] = {
        "architecture as in the source": _same("general.architecture", a.architecture, b.architecture),
        "sizes as in the source": _sizes(a, b),
        ROPE_BASE: _rope_base(a, b),
        ROPE_SCALING: _rope_scaling(a, b),
        "norm epsilon": _epsilon(a, b),
        "context length": _context(a, b),
        HEAD: _head(a, b),
    }
    if vocabulary:
        found["vocabulary as in the source"] = _vocabulary(file.tokenizer, source.tokenizer)
        found["chat template as in the source"] = _template(file.tokenizer, source.tokenizer)
    return [Check(PART, name, *each) for name, each in found.items()]


def _same(key: str, found: object, needed: object) -> Found:
    if found == needed:
        return "ok", f"{found}"
    return "failed", f"{key} is {found!r:.60}, in the source {needed!r:.60}"


def _sizes(a: ModelConfig, b: ModelConfig) -> Found:
    wrong = [
        f"{a.architecture}.{key} is {getattr(a, name)}, in the source {getattr(b, name)}"
        for name, key in SIZES.items()
        if getattr(a, name) != getattr(b, name)
    ]
    return ("failed", "; ".join(wrong)) if wrong else ("ok", f"{len(SIZES)} of them")


def _rope_base(a: ModelConfig, b: ModelConfig) -> Found:
    if math.isclose(a.rope.base, b.rope.base, rel_tol=ROUNDING):
        return "ok", f"{a.rope.base:g}"
    return "failed", f"{a.architecture}.rope.freq_base is {a.rope.base:g}, in the source {b.rope.base:g}"


def _rope_scaling(a: ModelConfig, b: ModelConfig) -> Found:
    """Of what scaling makes of the frequencies, whichever way it is written."""
    if a.head_dim != b.head_dim:
        return "not checked", "heads of another size than the source's"
    ours, theirs = (
        config.rope.inverse_frequencies(config.head_dim)
        * config.rope.base ** (torch.arange(0, config.head_dim, 2) / config.head_dim)
        for config in (a, b)
    )
    if torch.allclose(ours, theirs, rtol=1e-4):
        scaled = "none" if bool((ours - 1).abs().max() < 1e-4) else "the source's"
        return "ok", scaled
    ratio = ours / theirs
    return "failed", (
        f"{a.architecture}.rope.scaling.factor or rope_freqs.weight: frequencies are {float(ratio.min()):g} to "
        f"{float(ratio.max()):g} times the source's"
    )


def _epsilon(a: ModelConfig, b: ModelConfig) -> Found:
    key = f"{a.architecture}.attention.layer_norm_rms_epsilon"
    if math.isclose(a.rms_eps, b.rms_eps, rel_tol=ROUNDING):
        return "ok", f"{b.rms_eps:g}"
    return "failed", f"{key} is {a.rms_eps:g}, in the source {b.rms_eps:g}"


def _context(a: ModelConfig, b: ModelConfig) -> Found:
    if a.max_context == b.max_context:
        return "ok", f"{a.max_context} tokens"
    return "warning", f"{a.architecture}.context_length is {a.max_context}, in the source {b.max_context}"


def _head(a: ModelConfig, b: ModelConfig) -> Found:
    if a.tied_head == b.tied_head:
        return "ok", "tied, as in the source" if a.tied_head else "a matrix of its own, as in the source"
    if a.tied_head:
        return "failed", "output.weight is missing: the source has a head of its own, and the file loads as tied"
    return "warning", "output.weight is there, in the source the head is tied to the embedding"


def _vocabulary(ours: Tokenizer, theirs: Tokenizer) -> Found:
    return next(iter(_vocabulary_faults(ours, theirs)), ("ok", f"{ours.vocab_size} tokens, special ones alike"))


def _vocabulary_faults(ours: Tokenizer, theirs: Tokenizer) -> Iterator[Found]:
    size = min(ours.vocab_size, theirs.vocab_size)
    if ours.vocab_size < theirs.vocab_size:  # more than the source has stand for rows of the embedding without a token
        yield "failed", f"tokenizer.ggml.tokens has {ours.vocab_size} tokens, the source {theirs.vocab_size}"
    texts, their_texts = (each.parts.backend.get_vocab(with_added_tokens=True) for each in (ours, theirs))
    suspect = {at for text, at in texts.items() if at < size and their_texts.get(text) != at}
    pairs = {at: (ours.decode([at], skip_special=False), theirs.decode([at], skip_special=False)) for at in suspect}
    other = [f"{at} is {a!r}, in the source {b!r}" for at, (a, b) in sorted(pairs.items()) if a != b]
    if other:
        yield "failed", f"tokenizer.ggml.tokens: {listed(other)}"
    if ours.encode(PROBE) != theirs.encode(PROBE):
        yield "failed", "tokenizer.ggml.pre, merges or add_bos_token: a text gets other ids than in the source"
    if theirs.bos_id is not None and ours.bos_id != theirs.bos_id:
        yield "failed", f"tokenizer.ggml.bos_token_id is {ours.bos_id}, in the source {theirs.bos_id}"
    if theirs.eos_ids and not set(ours.eos_ids) & set(theirs.eos_ids):
        yield "failed", f"tokenizer.ggml.eos_token_id: {ours.eos_ids} end an answer, in the source {theirs.eos_ids}"


def _template(ours: Tokenizer, theirs: Tokenizer) -> Found:
    if ours.chat_template == theirs.chat_template:
        return "ok", "letter by letter" if ours.chat_template else "none in both"
    return (
        "warning",
        "tokenizer.chat_template differs from the source's"
        if ours.chat_template
        else "tokenizer.chat_template is missing",
    )
