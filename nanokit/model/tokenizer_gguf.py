"""GGUF metadata -> a `tokenizers` tokenizer, in a tenth of a second.

A GGUF file carries the vocabulary, its merges or scores, and the *name* of the pre-tokenizer. Everything else
is knowledge that the name stands for, and it lives in `PRE_TOKENIZERS` below: how text is split before the
merges apply, whether it is normalized, whether a word found whole in the vocabulary skips its merges, and
whether a sequence starts with BOS where the file does not say. A wrong entry gives plausible but different
ids, so the table holds only pre-tokenizers whose definition is certain, and an unknown name is an error,
never a default.

Two kinds of vocabulary are built: `gpt2` (byte-level BPE with merges) and `llama` (SentencePiece BPE: no
merges in the file, so they are recovered from the scores). Going through `transformers` was rejected for its
start-up time and because its GGUF route splits `smollm` text without isolating digits and does not normalize
`qwen2` text, so that "\\n\\n1" or a decomposed "é" get other ids than those that the models were trained on.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from nanokit.errors import TokenizerError
from nanokit.model.tokenizer_parts import TokenizerParts, frame_with

# GGUF's token types (normal, unused and byte ones are ordinary vocabulary here).
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# A file names one end-of-sequence id; a chat model ends its turn with one of these as well. Only control
# tokens count, so that a base model's text is not cut short.
END_TEXTS = frozenset(
    (
        "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>",
        "<end_of_turn>", "<|return|>", "</s>", "<｜end▁of▁sentence｜>",
    )
)  # fmt: skip

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """`splits` are applied one after the other; each isolates what its pattern matches."""

    splits: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


_PLAIN = PreTokenizer((_GPT2,))
_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA = PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True)
PRE_TOKENIZERS = {
    "gpt-2": _PLAIN,
    "default": _PLAIN,  # as transformers reads it; llama.cpp isolates punctuation as well, and warns
    "phi-2": _PLAIN,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama-bpe": _LLAMA,
    "llama3": _LLAMA,
    "llama-v3": _LLAMA,
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True),
    "qwen2": PreTokenizer((_QWEN2,), nfc=True),
}


def read_gguf(metadata: Mapping[str, Any]) -> TokenizerParts:
    """Build a tokenizer from the `tokenizer.*` keys of a GGUF file; arrays may be lists or numpy arrays.

    Raises TokenizerError, naming the key, for a vocabulary that is missing, inconsistent or of an unsupported
    kind.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise TokenizerError(
            "the GGUF file's vocabulary is of a kind that is not supported",
            found=f"tokenizer.ggml.model = {kind!r}",
            needed="'gpt2' (byte-level BPE) or 'llama' (SentencePiece BPE)",
            do="use a model with one of these, or its safetensors directory with a tokenizer.json",
        )
    tokens = _array(metadata, "tokens")
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(index for index, token in enumerate(tokens) if vocab[token] != index)
        raise _broken(
            "tokens", f"{tokens[twice]!r} twice, as ids {twice} and {vocab[tokens[twice]]}", "distinct tokens"
        )
    types = _numbers(metadata, "token_type", len(tokens))
    ids = {name: _token_id(metadata, name, len(tokens)) for name in _ID_KEYS}
    if kind == "gpt2":
        backend, adds_bos = _byte_level(metadata, vocab)
    else:
        backend, adds_bos = _sentencepiece(metadata, tokens, vocab, types, ids["unknown"]), True
    _add_tokens(backend, tokens, types, ids, phi3=metadata.get("general.architecture") == "phi3")
    _frame(backend, metadata, tokens, ids, adds_bos)
    texts = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return TokenizerParts(
        backend=backend,
        vocab_size=len(tokens),
        bos_id=ids["bos"],
        eos_ids=_end_ids(vocab, types, ids),
        chat_template=metadata.get("tokenizer.chat_template"),
        special_texts={key: tokens[token_id] for key, name in texts.items() if (token_id := ids[name]) is not None},
    )


_ID_KEYS = ("bos", "eos", "eot", "eom", "unknown", "padding")


def _byte_level(metadata: Mapping[str, Any], vocab: dict[str, int]) -> tuple[Backend, bool]:
    """(backend, whether it adds BOS unless told) of a vocabulary spelled in GPT-2's byte alphabet."""
    name = metadata.get("tokenizer.ggml.pre")
    pre = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if pre is None:
        raise TokenizerError(
            "the GGUF file names no pre-tokenizer that is known, and guessing one would give wrong token ids",
            found=f"tokenizer.ggml.pre = {name!r}",
            needed=", ".join(sorted(PRE_TOKENIZERS)),
            do="use the model's safetensors directory, whose tokenizer.json spells the splitting out",
        )
    merges = []
    for merge in _array(metadata, "merges"):
        left, _, right = merge.partition(" ")
        if not (left in vocab and right in vocab and left + right in vocab):
            raise _broken("merges", repr(merge), "two tokens whose concatenation is a token")
        merges.append((left, right))
    backend = Backend(models.BPE(vocab, merges))
    split_as(backend, pre)
    backend.decoder = decoders.ByteLevel()
    return backend, pre.adds_bos


def split_as(backend: Backend, pre: PreTokenizer) -> None:
    """Let a byte-level backend treat text as this pre-tokenizer says, whatever it did before."""
    backend.model.ignore_merges = pre.ignore_merges
    backend.normalizer = normalizers.NFC() if pre.nfc else None
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.splits]
    spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, spelling])


def _sentencepiece(
    metadata: Mapping[str, Any],
    tokens: Sequence[str],
    vocab: dict[str, int],
    types: np.ndarray,
    unknown: int | None,
) -> Backend:
    """SentencePiece BPE: a space is a visible mark; each text between special tokens starts with one."""
    scores = _numbers(metadata, "scores", len(tokens))
    normal = [int(index) for index in np.flatnonzero(types == NORMAL)]
    merges = merges_by_score({tokens[index]: float(scores[index]) for index in normal}, vocab)
    unk_token = tokens[unknown] if unknown is not None else None
    backend = Backend(models.BPE(vocab, merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True))
    prefixed = _flag(metadata, "add_space_prefix", True)
    marks = [normalizers.Prepend("\u2581")] if prefixed else []
    backend.normalizer = normalizers.Sequence([*marks, normalizers.Replace(" ", "\u2581")])
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def merges_by_score(scores: Mapping[str, float], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """The merges that SentencePiece's rule (join the pair whose whole scores best) implies, best first.

    One token can be joined from several pairs; they stand next to each other, longest left part first.
    """
    found = []
    for token, score in scores.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in scores and right in scores:
                found.append((-score, -cut, vocab[token], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _add_tokens(
    backend: Backend, tokens: Sequence[str], types: np.ndarray, ids: Mapping[str, int | None], *, phi3: bool
) -> None:
    """Tokens matched whole in a text: control tokens (special: decoding skips them) and user-defined ones.

    The ones that the file names by id are special whatever their type, as in transformers. Phi-3's swallow
    the white space behind them; no key says so, llama.cpp goes by the model as well.
    """
    special = {int(index) for index in np.flatnonzero((types == CONTROL) | (types == UNKNOWN))}
    special |= {ids[name] for name in ("bos", "eos", "unknown", "padding")} - {None}  # type: ignore[arg-type]
    user_defined = {int(index) for index in np.flatnonzero(types == USER_DEFINED)} - special
    keeps_space = {"<unk>", "<s>", "<|endoftext|>"}

    def added(indices: Iterable[int], is_special: bool) -> list[AddedToken]:
        return [
            AddedToken(
                tokens[index],
                normalized=False,
                special=is_special,
                rstrip=phi3 and tokens[index] not in keeps_space,
            )
            for index in sorted(indices)
        ]

    backend.add_special_tokens(added(special, True))
    backend.add_tokens(added(user_defined, False))


def _frame(
    backend: Backend,
    metadata: Mapping[str, Any],
    tokens: Sequence[str],
    ids: Mapping[str, int | None],
    adds_bos: bool,
) -> None:
    """BOS before and EOS behind a text, where the file or its kind of vocabulary asks for them."""
    marks: dict[str, tuple[str, int] | None] = {}
    for name, default in (("bos", adds_bos), ("eos", False)):
        wanted, token_id = _flag(metadata, f"add_{name}_token", default), ids[name]
        if wanted and token_id is None:
            raise _broken(
                f"{name}_token_id", "no such key", f"the id of the {name.upper()} token that texts start with"
            )
        marks[name] = (tokens[token_id], token_id) if wanted and token_id is not None else None
    if any(marks.values()):
        frame_with(backend, marks["bos"], marks["eos"])


def _end_ids(vocab: Mapping[str, int], types: np.ndarray, ids: Mapping[str, int | None]) -> tuple[int, ...]:
    """Every id that ends a generation, the file's own first.

    `<|end|>` only closes a message, not the answer, where the vocabulary has `<|return|>` and `<|call|>`
    beside it.
    """
    named = [ids[name] for name in ("eos", "eot", "eom")]
    texts = END_TEXTS - ({"<|end|>"} if {"<|return|>", "<|call|>"} <= vocab.keys() else set())
    by_text = sorted(vocab[text] for text in texts if text in vocab and types[vocab[text]] == CONTROL)
    return tuple(dict.fromkeys(token_id for token_id in [*named, *by_text] if token_id is not None))


def _array(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str) or len(value) == 0:
        raise _broken(key, "nothing" if value is None else f"{value!r:.80}", "an array of strings")
    strings = list(value)
    if (kinds := set(map(type, strings))) != {str}:
        raise _broken(key, f"elements of type {', '.join(sorted(kind.__name__ for kind in kinds))}", "strings")
    return strings


def _numbers(metadata: Mapping[str, Any], key: str, length: int) -> np.ndarray:
    """An array of one number per token. Only `token_type` may be absent: then every token is a normal one."""
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is None and key == "token_type":
        return np.full(length, NORMAL)
    numbers = np.asarray(value if value is not None else [])
    if numbers.shape != (length,) or numbers.dtype.kind not in "iuf" or not np.isfinite(numbers).all():
        raise _broken(key, f"an array of shape {numbers.shape} and type {numbers.dtype}", f"{length} finite numbers")
    return numbers


def _token_id(metadata: Mapping[str, Any], name: str, vocab_size: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < vocab_size:
        raise _broken(f"{name}_token_id", f"{value!r:.80}", f"an id below {vocab_size}")
    return value


def _flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{key}", default)
    if not isinstance(value, bool):
        raise _broken(key, f"{value!r:.80}", "a truth value")
    return value


def _broken(key: str, found: object, needed: str) -> TokenizerError:
    return TokenizerError(
        f"the GGUF file's vocabulary is broken: tokenizer.ggml.{key}",
        found=found,
        needed=needed,
        do="download the file again, or convert the model anew",
    )
