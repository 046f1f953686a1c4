"""Encoding, decoding and streaming on small vocabularies of both kinds."""

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_corpus import TEXTS, byte_level_metadata, sentencepiece_metadata

from nanokit.errors import TokenizerError
from nanokit.model.tokenizer import Tokenizer

TOKENIZERS = {
    "byte-level": Tokenizer.from_gguf(byte_level_metadata()),
    "sentencepiece": Tokenizer.from_gguf(sentencepiece_metadata()),
    "sentencepiece without prefix": Tokenizer.from_gguf(sentencepiece_metadata(add_space_prefix=False)),
}
both_kinds = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)


def streamed(tokenizer: Tokenizer, ids: list[int], **how: Any) -> list[str]:
    stream = tokenizer.stream(**how)
    return [*map(stream.push, ids), stream.finish()]


@both_kinds
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_streamed_pieces_add_up_to_the_decoded_text(tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    """Any ids at all, broken characters and special tokens among them: nothing lost, doubled or reordered."""
    low = data.draw(st.sampled_from([0, 256]))  # below: mostly single bytes
    ids = data.draw(st.lists(st.integers(low, tokenizer.vocab_size - 1), max_size=30))
    pieces = streamed(tokenizer, ids, skip_special=skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special=skip)
    cuts = [tokenizer.decode(ids[:count], skip_special=skip) for count in range(len(ids) + 1)]
    shown = ""
    for cut, piece in zip(cuts, pieces, strict=True):  # what was shown is never taken back
        assert cut.startswith(shown)
        shown += piece


@both_kinds
@given(text=st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_text_comes_back_and_streams_in_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    """A character split over tokens is never shown in halves, and not held back once it is whole."""
    ids = tokenizer.encode(text, add_special=False)
    pieces = streamed(tokenizer, ids, skip_special=False)
    assert tokenizer.decode(ids, skip_special=False) == text.replace("\u2581", "\u2581" if tokenizer is BYTES else " ")
    assert pieces[-1] == ""
    assert "\ufffd" not in "".join(pieces).replace("\ufffd", "", text.count("\ufffd"))


BYTES = TOKENIZERS["byte-level"]


@both_kinds
def test_an_emoji_is_shown_with_its_last_byte(tokenizer: Tokenizer) -> None:
    """Four tokens, one character: three times nothing, then all of it, and nothing waits for a later token."""
    ids = tokenizer.encode("a🙂🙂b", add_special=False)
    pieces = [piece for piece in streamed(tokenizer, ids) if piece]
    assert pieces == ["a", "🙂", "🙂", "b"]
    assert len(ids) >= 10


@both_kinds
def test_a_character_that_was_cut_off_ends_as_a_replacement_character(tokenizer: Tokenizer) -> None:
    """max_tokens in the middle of an emoji."""
    ids = tokenizer.encode("a🙂", add_special=False)[:-1]
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces[:-1]) == "a"
    assert pieces[-1] == "\ufffd"
    assert tokenizer.decode(ids) == "a\ufffd"


def test_the_space_in_front_belongs_to_the_first_text_shown() -> None:
    """SentencePiece: the first word loses the space that encoding added, a later one keeps its own; also when a
    special token that is not shown comes first."""
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = tokenizer.encode("hello world")
    assert [piece for piece in streamed(tokenizer, ids) if piece] == ["hello", " world"]
    assert tokenizer.decode(ids) == "hello world"
    assert tokenizer.decode(ids, skip_special=False) == "<s> hello world"


@both_kinds
def test_decoding_agrees_with_the_library_on_valid_text(tokenizer: Tokenizer) -> None:
    """The library's decoder is the oracle of our table of bytes."""
    for text in [*TEXTS, "hello<|im_end|><think> hello", "<|end|>hello<tool>"]:
        ids = tokenizer.encode(text)
        for skip in (True, False):
            expected = tokenizer._backend.decode(ids, skip_special_tokens=skip)
            assert tokenizer.decode(ids, skip_special=skip) == expected


@given(ids=st.lists(st.integers(0, BYTES.vocab_size - 1), max_size=30), skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_byte_level_decoding_agrees_with_the_library_on_any_ids(ids: list[int], skip: bool) -> None:
    """Broken UTF-8 as well: as many replacement characters, at the same places."""
    assert BYTES.decode(ids, skip_special=skip) == BYTES._backend.decode(ids, skip_special_tokens=skip)


def test_whole_characters_survive_beside_broken_bytes() -> None:
    """The library turns every byte of such a run into U+FFFD, the emoji that was already shown included."""
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = tokenizer.encode("🙂🙂", add_special=False)[:-1]
    assert tokenizer.decode(ids) == "🙂\ufffd"


@pytest.mark.parametrize("token_id", [-1, BYTES.vocab_size, 2**31, 2**63])
def test_an_id_outside_of_the_vocabulary_is_an_error(token_id: int) -> None:
    """Not an empty string, not an overflow in the library."""
    with pytest.raises(TokenizerError) as caught:
        BYTES.decode([0, token_id])
    assert str(token_id) in str(caught.value)
    assert str(BYTES.vocab_size) in str(caught.value)


@pytest.mark.parametrize("text", ["a\ud83db", "\udcff", "ok \udfff"])
def test_a_lone_surrogate_is_an_error(text: str) -> None:
    """What Python makes of a command line that is not UTF-8."""
    with pytest.raises(TokenizerError, match=r"surrogate, U\+D"):
        BYTES.encode(text)


def test_bytes_are_not_text() -> None:
    """Refused with what to do, not with the library's TypeError."""
    with pytest.raises(TokenizerError, match="UTF-8"):
        BYTES.encode(b"abc")  # type: ignore[arg-type]


def test_nothing_heavy_is_imported() -> None:
    """transformers takes seconds; jinja2 is needed only for chats."""
    code = "import sys, nanokit.model.tokenizer; print({'transformers', 'torch', 'jinja2'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
