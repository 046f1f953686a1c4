"""What a tokenizer is made of, wherever it came from.

GGUF metadata (`tokenizer_gguf`) and a directory of Hugging Face files (`tokenizer_directory`) are read by two
modules that know nothing of each other; both return `TokenizerParts`, and `tokenizer.Tokenizer` is built from
that alone. The pieces below turn a token id back into bytes.

Why bytes of our own and not `tokenizers`' decoder: decoding must also work token by token (streaming), and
the library's `DecodeStream` re-decodes a window per token, never emits a text that ends in a broken character
and cannot be finished. A table from id to bytes is O(1) a token, and the whole text is then simply the UTF-8
of the joined bytes, so that streaming and decoding are one rule and cannot differ.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import processors

from nanokit.errors import TokenizerError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"  # SentencePiece's visible space


@dataclass(frozen=True)
class TokenizerParts:
    """A `tokenizers` backend and the facts that it does not hold itself.

    `vocab_size` is one more than the largest id; `special_texts` maps `bos_token`, `eos_token`, … to their
    text, for the chat template.
    """

    backend: Backend
    vocab_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    chat_template: str | None = None
    special_texts: Mapping[str, str] = field(default_factory=dict)


def frame_with(backend: Backend, bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> None:
    """Make the backend's `encode` put `bos` before and `eos` behind a text; each is (text, id) or None."""
    template = ["$A:0"]
    if bos is not None:
        template.insert(0, "BOS:0")
    if eos is not None:
        template.append("EOS:0")
    marks = [(name, mark) for name, mark in (("BOS", bos), ("EOS", eos)) if mark is not None]
    backend.post_processor = processors.TemplateProcessing(
        single=template,
        pair=[*template, "$B:1"],
        special_tokens=[{"id": name, "ids": [mark[1]], "tokens": [mark[0]]} for name, mark in marks],
    )


def byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of the 256 bytes as printable characters, from character to byte.

    Printable Latin-1 characters stand for themselves; the other 68 bytes, in order, take the code points from
    256.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


class Pieces:
    """The bytes that each token id stands for, and whether the text's first space belongs to the encoder."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._alphabet, self.strips_first_space = _decoder_rule(backend)
        self._cache: dict[int, bytes] = {}
        self._special = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )

    def is_special(self, token_id: int) -> bool:
        """Whether decoding leaves this token out when special tokens are skipped."""
        return token_id in self._special

    def bytes_of(self, token_id: int) -> bytes | None:
        """The bytes of one token; None where the vocabulary has no such id."""
        piece = self._cache.get(token_id)
        if piece is None:
            text = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
            if text is None:
                return None
            piece = self._cache[token_id] = self._spell(text)
        return piece

    def _spell(self, text: str) -> bytes:
        if self._alphabet is not None:
            if all(character in self._alphabet for character in text):
                return bytes(self._alphabet[character] for character in text)
            return text.encode()  # an added token that is not spelled in the byte alphabet
        byte = _BYTE_TOKEN.fullmatch(text)
        return bytes([int(byte[1], 16)]) if byte else text.replace(_SPACE_MARK, " ").encode()


def _decoder_rule(backend: Backend) -> tuple[dict[str, int] | None, bool]:
    """(byte alphabet or None for SentencePiece, strip the first space) of the backend's decoder.

    Raises TokenizerError for a decoder that is neither byte-level nor SentencePiece with byte fallback.
    """
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    steps = state.get("decoders", [state])
    kinds = [step.get("type", "none") for step in steps]
    if kinds == ["ByteLevel"]:
        return byte_alphabet(), False
    if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        replaces = steps[0]["pattern"] == {"String": _SPACE_MARK} and steps[0]["content"] == " "
        strips = [(step["content"], step["start"], step["stop"]) for step in steps[3:]]
        if replaces and strips in ([], [(" ", 1, 0)]):
            return None, bool(strips)
    raise TokenizerError(
        "the tokenizer's decoder is not supported",
        found=state or "no decoder",
        needed="ByteLevel, or Replace + ByteFallback + Fuse (+ Strip of one space on the left)",
        do="use a model with a byte-level or a SentencePiece BPE vocabulary",
    )
