"""A directory's tokenizer as the metadata of a GGUF file, and the proof that it is read back as the same one.

A GGUF file holds tokens, their types, merges or scores, and a *name* for how text is split. tokenizer.json spells the
splitting out instead. The name is never guessed from the model's: every definition that our reader knows is built with
the new vocabulary and compared with the directory's tokenizer, id by id, over many texts (tokenizer_probes.py). If
none agrees on all of them, there is no file. Comparing the regular expressions was rejected: there are several
spellings of one splitting, and they say nothing of normalizer, merges and special tokens.

SentencePiece's scores are made from the merges: the token that is made first has the highest. A reader recovers from
them the order in which tokens are made, but not that among several ways to make one token; where this order is another
one, texts of such tokens repeated are compared as well.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nanokit.errors import TokenizerError
from nanokit.gguf.header import ValueKind
from nanokit.gguf.write import Key
from nanokit.model import tokenizer_probes as probing
from nanokit.model.chat import ChatTemplate
from nanokit.model.tokenizer import Tokenizer
from nanokit.model.tokenizer_gguf import (
    BYTE,
    CONTROL,
    NORMAL,
    PRE_TOKENIZERS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    merges_by_score,
    split_as,
)
from nanokit.model.tokenizer_parts import byte_alphabet

TEXT, U32, BOOL = ValueKind("STRING"), ValueKind("UINT32"), ValueKind("BOOL")
TEXTS, NUMBERS, SCORES = ValueKind("ARRAY", "STRING"), ValueKind("ARRAY", "INT32"), ValueKind("ARRAY", "FLOAT32")
_BYTE_NAME = re.compile(r"<0x[0-9A-F]{2}>")
_SPACE = "\u2581"
_ALPHABET = byte_alphabet()
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def tokenizer_keys(tokenizer: Tokenizer, rows: int, architecture: str) -> dict[str, Key]:
    """The keys tokenizer.*. rows: of the embedding, for each of which the file needs a token.

    Raises TokenizerError for a tokenizer that a GGUF file cannot say, naming the texts that would become other ids, and
    for a folder whose chat template or end of text is broken: a file that says the same would be refused.
    """
    _check_folder(tokenizer, rows)
    vocabulary = _vocabulary(tokenizer, rows)
    keys, doubtful = _byte_level(vocabulary) if vocabulary.byte_level else _sentencepiece(vocabulary)
    keys |= _shared(tokenizer, vocabulary)
    wanted = probing.probes(tokenizer, _texts(vocabulary, doubtful))
    metadata = {"general.architecture": architecture, **{name: value for name, (_, value) in keys.items()}}
    differing = []
    for choice, read in (_splittings if vocabulary.byte_level else _prefixes)(metadata):
        differs = probing.difference(wanted, read)
        if differs is None:
            _check_named(tokenizer, read)
            return keys | choice
        differing += [f"{value}: {differs}" for _, value in choice.values()]
    raise TokenizerError(
        "nothing that a GGUF file can say of splitting gives the ids of this model's tokenizer",
        found="; ".join(differing),
        needed="agreement on every text that is compared",
        do="use the model's own directory, whose tokenizer.json spells the splitting out",
    )


def _check_folder(tokenizer: Tokenizer, rows: int) -> None:
    parts = tokenizer.parts
    strange = [index for index in parts.eos_ids if not 0 <= index < rows]
    if strange:
        raise TokenizerError(
            "the folder names an end of text that is no token",
            found=f"eos_token_id {', '.join(map(str, strange))}",
            needed=f"ids from 0 to {rows - 1}",
            do="correct it in the folder's generation_config.json, or in config.json where there is none",
        )
    if parts.chat_template is None:
        return
    try:
        ChatTemplate(parts.chat_template)
    except TokenizerError as error:
        raise TokenizerError(
            "the folder's own chat template is broken",
            found=error.found,
            needed=error.needed,
            do="correct the folder's chat_template.jinja (or chat_template in tokenizer_config.json), or take it away",
        ) from error


Choice = tuple[dict[str, Key], Tokenizer]


def _splittings(metadata: Mapping[str, Any]) -> Iterator[Choice]:
    """A vocabulary of bytes under each pre-tokenizer (the first of several names for one). The vocabulary is built
    once: with hundreds of thousands of merges that is most of the work."""
    first = {definition: name for name, definition in reversed(PRE_TOKENIZERS.items())}
    read = None
    for definition, name in reversed(first.items()):
        read = read or Tokenizer.from_gguf({**metadata, "tokenizer.ggml.pre": name})
        split_as(read.parts.backend, definition)
        yield {"tokenizer.ggml.pre": Key(TEXT, name)}, read


def _prefixes(metadata: Mapping[str, Any]) -> Iterator[Choice]:
    """A scored vocabulary with a space put before every text, and without."""
    for flag in (True, False):
        key = "tokenizer.ggml.add_space_prefix"
        yield {key: Key(BOOL, flag)}, Tokenizer.from_gguf({**metadata, key: flag})


@dataclass(frozen=True)
class _Vocabulary:
    """tokens and their types, by id, a token for every row; model: of tokenizer.json; merges: its pairs; added: matched
    whole in a text."""

    tokens: list[str]
    types: list[int]
    model: Mapping[str, Any]
    merges: list[tuple[str, str]]
    added: list[str]
    byte_level: bool


def _vocabulary(tokenizer: Tokenizer, rows: int) -> _Vocabulary:
    backend = tokenizer.parts.backend
    spelled = json.loads(backend.to_str())
    model, byte_level = spelled["model"], spelled["decoder"]["type"] == "ByteLevel"
    unusual = [key for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout") if model.get(key)]
    if model["type"] != "BPE" or unusual or not (byte_level or model["byte_fallback"]):
        raise TokenizerError(
            "this kind of vocabulary has no place in a GGUF file",
            found=", ".join([model["type"], *unusual]) + ("" if byte_level else ", no byte for every byte"),
            needed="BPE of bytes, or SentencePiece's BPE with byte_fallback",
        )
    merges = [(left, right) for left, right in model["merges"]]
    by_id = {index: text for text, index in backend.get_vocab(with_added_tokens=True).items()}
    added = backend.get_added_tokens_decoder()
    names = set(by_id.values())
    tokens, types = [], []
    for index in range(rows):
        text, token = by_id.get(index), added.get(index)
        if text is None:
            kind, text = UNUSED, _padding(index, names)
        elif token is not None:
            unknown = not byte_level and text == model["unk_token"]
            kind = UNKNOWN if unknown else CONTROL if token.special else USER_DEFINED
        else:
            kind = BYTE if not byte_level and _BYTE_NAME.fullmatch(text) else NORMAL
        tokens.append(text)
        types.append(kind)
    return _Vocabulary(tokens, types, model, merges, [token.content for token in added.values()], byte_level)


def _padding(index: int, names: set[str]) -> str:
    """A name for a row without a token; no two tokens may have one name."""
    name = f"[PAD{index}]"
    while name in names:
        name = f"[{name}]"
    return name


def _shared(tokenizer: Tokenizer, vocabulary: _Vocabulary) -> dict[str, Key]:
    """What both kinds of vocabulary have: types, the ids of special tokens, and what is put around a text."""
    parts = tokenizer.parts
    bos, eos = _frame(tokenizer)
    ends = dict(zip(("eos", "eot", "eom"), parts.eos_ids, strict=False))
    texts = {name: parts.special_texts.get(key) for key, name in _NAMED.items()}
    ids = {name: parts.backend.token_to_id(text) for name, text in texts.items() if text is not None}
    ids |= ends | ({"bos": bos} if bos is not None else {}) | ({"eos": eos} if eos is not None else {})
    keys = {
        "token_type": Key(NUMBERS, vocabulary.types),
        **{f"{name}_token_id": Key(U32, index) for name, index in ids.items()},
        "add_bos_token": Key(BOOL, bos is not None),
        "add_eos_token": Key(BOOL, eos is not None),
    }
    template = parts.chat_template
    return _ggml(keys) | ({"tokenizer.chat_template": Key(TEXT, template)} if template is not None else {})


def _ggml(keys: Mapping[str, Key]) -> dict[str, Key]:
    return {f"tokenizer.ggml.{name}": key for name, key in keys.items()}


def _frame(tokenizer: Tokenizer) -> tuple[int | None, int | None]:
    """The ids that are put before and behind a text. Raises TokenizerError for what is no BOS and no EOS."""
    plain, framed = (tokenizer.encode("a", add_special=special) for special in (False, True))
    at = next((i for i in range(len(framed) + 1) if framed[i : i + len(plain)] == plain), 0)
    before, behind = framed[:at], framed[at + len(plain) :]
    named = {"bos": tokenizer.bos_id, "eos": next(iter(tokenizer.eos_ids), None)}
    for marks, name in ((before, "bos"), (behind, "eos")):
        if len(marks) > 1 or (marks and named[name] not in (None, marks[0])):
            raise TokenizerError(
                "what this tokenizer puts around a text has no place in a GGUF file",
                found=f"the ids {before} before and {behind} behind it",
                needed=f"BOS ({named['bos']}) before it and EOS ({named['eos']}) behind it, or nothing",
            )
    return next(iter(before), None), next(iter(behind), None)


def _byte_level(vocabulary: _Vocabulary) -> tuple[dict[str, Key], list[str]]:
    """Keys of a vocabulary of bytes; and no token whose pairs come in another order."""
    if not vocabulary.merges:
        raise TokenizerError(
            "this tokenizer has no merges: every byte of a text is a token of its own",
            found="a vocabulary of bytes with an empty list of merges in tokenizer.json",
            needed="at least one pair of tokens that becomes one, without which readers refuse a GGUF file",
            do="download tokenizer.json again if the model is said to have merges; otherwise use the folder as it is",
        )
    spaced = next((pair for pair in vocabulary.merges if " " in "".join(pair)), None)
    if spaced:
        raise TokenizerError(
            "these merges have no place in a GGUF file",
            found=f"the pair {spaced}",
            needed="pairs of tokens without a space in them",
        )
    keys = {
        "model": Key(TEXT, "gpt2"),
        "tokens": Key(TEXTS, vocabulary.tokens),
        "merges": Key(TEXTS, [" ".join(pair) for pair in vocabulary.merges]),
    }
    return _ggml(keys), []


def _sentencepiece(vocabulary: _Vocabulary) -> tuple[dict[str, Key], list[str]]:
    """Keys of a scored vocabulary, and the tokens whose pairs come in another order."""
    added = set(vocabulary.added)
    merges = [
        pair for pair in vocabulary.merges if not added.intersection((*pair, "".join(pair)))
    ]  # added tokens are found before any merge
    ranks = _ranks(merges)
    normal = zip(vocabulary.tokens, vocabulary.types, strict=True)
    scores = {token: -float(ranks.get(token, len(merges))) for token, kind in normal if kind == NORMAL}
    index = {token: index for index, token in enumerate(vocabulary.tokens)}
    recovered = merges_by_score(scores, index)
    doubtful = sorted({"".join(pair) for pair, other in zip(merges, recovered, strict=False) if pair != other})
    if sorted(merges) != sorted(recovered) or any(map(_other_token, merges, recovered)):
        wrong = next(
            (f"{pair} where scores give {other}" for pair, other in zip(merges, recovered, strict=False)
             if _other_token(pair, other)),
            f"{len(merges)} pairs where scores give {len(recovered)}",
        )  # fmt: skip
        raise TokenizerError(
            "the merges of this tokenizer do not follow from scores, which is what a GGUF file keeps of them",
            found=wrong,
            needed="for every token all the pairs that make it, one token after the other",
            do="use the model's own directory",
        )
    keys = {
        "model": Key(TEXT, "llama"),
        "pre": Key(TEXT, "default"),
        "tokens": Key(TEXTS, vocabulary.tokens),
        "scores": Key(SCORES, [scores.get(token, 0.0) for token in vocabulary.tokens]),
    }
    return _ggml(keys), doubtful


def _ranks(merges: list[tuple[str, str]]) -> dict[str, int]:
    """When each token is made, counted in tokens: those whose pairs stand among each other's have one rank."""
    last = {"".join(pair): index for index, pair in enumerate(merges)}
    ranks: dict[str, int] = {}
    rank, end = -1, -1
    for index, pair in enumerate(merges):
        if index > end:
            rank += 1
        end = max(end, last["".join(pair)])
        ranks["".join(pair)] = rank
    return ranks


def _other_token(pair: tuple[str, str], other: tuple[str, str]) -> bool:
    return "".join(pair) != "".join(other)


def _texts(vocabulary: _Vocabulary, doubtful: list[str]) -> Iterator[str]:
    """All that is compared."""
    yield from probing.TEXTS
    yield from probing.mixed()
    yield from probing.around(probing.spread(vocabulary.added))
    made = {"".join(pair) for pair in vocabulary.merges}
    normal = [t for t, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == NORMAL]
    whole = [token for token in normal if token not in made and len(token) > 1]
    for token in dict.fromkeys([*probing.spread(normal), *probing.spread(whole)]):
        yield _text_of(token, vocabulary)
    for token in doubtful:
        yield _text_of(token * 2, vocabulary)
        yield _text_of(token * 3, vocabulary)


def _text_of(token: str, vocabulary: _Vocabulary) -> str:
    """The text that a token of the vocabulary stands for; what is no whole character in it becomes U+FFFD."""
    if not vocabulary.byte_level:
        return token.replace(_SPACE, " ")
    return bytes(_ALPHABET[c] for c in token if c in _ALPHABET).decode(errors="replace")


def _check_named(tokenizer: Tokenizer, read: Tokenizer) -> None:
    """Raise TokenizerError where a special token of the directory's is not the file's."""
    lost = [f"{key} {text!r}" for key, text in tokenizer.parts.special_texts.items()
            if key in _NAMED and read.parts.special_texts.get(key) != text]  # fmt: skip
    lost += [f"the end {index}" for index in tokenizer.eos_ids if index not in read.eos_ids]
    if lost:
        raise TokenizerError(
            "a GGUF file cannot name all special tokens of this tokenizer",
            found=", ".join(lost),
            needed="at most three ids that end a text, beside those that every reader knows by their text",
        )
