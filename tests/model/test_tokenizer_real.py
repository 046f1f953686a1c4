"""Tokenizers of real models: against llama.cpp's conformance texts, and the default model against transformers."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_corpus import CHATS, SPECIAL_TEXTS, TEXTS
from tokenizers import pre_tokenizers

from nanokit.gguf.reader import GGUFFile
from nanokit.model.spec import DEFAULT_MODEL, model_path
from nanokit.model.tokenizer import Tokenizer

VOCABS = os.environ.get("NANOKIT_VOCABS")
DEFAULT_PATH = model_path(DEFAULT_MODEL)

needs_vocabs = pytest.mark.skipif(not VOCABS, reason="NANOKIT_VOCABS does not name the folder of vocabularies")
needs_model = pytest.mark.skipif(not DEFAULT_PATH.is_file(), reason="the default model is not in the cache")


@pytest.fixture(scope="module")
def default_metadata() -> dict[str, Any]:
    return GGUFFile.open(DEFAULT_PATH).metadata


@pytest.fixture(scope="module")
def default_tokenizer(default_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(default_metadata)


@needs_vocabs
@pytest.mark.parametrize("name", ["gpt-2", "qwen2", "phi-3"])
def test_every_conformance_text_of_llama_cpp_gets_its_ids(name: str) -> None:
    """A wrong split, normalizer or merge order: ids that look plausible and are not the model's."""
    folder = Path(str(VOCABS))
    tokenizer = Tokenizer.from_gguf(GGUFFile.open(folder / f"{name}.gguf").metadata)
    texts = (folder / f"{name}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = (folder / f"{name}.out").read_text().split("\n")
    assert len(texts) == len(lines) > 40
    for text, line in zip(texts, lines, strict=True):
        ids = [int(word) for word in line.split()]
        assert tokenizer.encode(text, add_special=False) == ids, repr(text)
        if name != "qwen2":  # which composes accents, so that not every text comes back as it was
            assert tokenizer.decode(ids) == text


@pytest.fixture(scope="module")
def transformers_tokenizer() -> Any:
    """transformers' own reading of the same file, with the splitting of SmolLM2's tokenizer.json.

    The GGUF route of transformers knows no `smollm`: it leaves the digits out of the splitting.
    """
    from transformers import AutoTokenizer

    oracle = AutoTokenizer.from_pretrained(DEFAULT_PATH.parent, gguf_file=DEFAULT_PATH.name)
    digits = pre_tokenizers.Digits(individual_digits=True)
    oracle.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return oracle


@pytest.mark.model
@needs_model
def test_the_default_model_agrees_with_transformers_on_every_id(
    default_tokenizer: Tokenizer, transformers_tokenizer: Any
) -> None:
    """Encoding, special tokens, decoding and chat template, on the file that everyone starts with."""
    tokenizer = default_tokenizer
    for text in [*TEXTS, *SPECIAL_TEXTS]:
        ids = transformers_tokenizer(text)["input_ids"]
        assert tokenizer.encode(text) == ids, repr(text)
        for skip in (True, False):
            expected = transformers_tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert tokenizer.decode(ids, skip_special=skip) == expected
    for chat in CHATS:
        for prompt in (True, False):
            text = transformers_tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
            assert tokenizer.chat_text(chat, add_generation_prompt=prompt) == text
        ids = transformers_tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        assert tokenizer.chat_ids(chat) == ids
    assert "You are a helpful AI assistant named SmolLM" in tokenizer.chat_text(CHATS[0])
    for token_id in range(0, tokenizer.vocab_size, 7):
        expected = transformers_tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        assert tokenizer.decode([token_id], skip_special=False) == expected


@pytest.mark.model
@needs_model
@given(text=st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("  \n\n\t019'a.<|>"), max_size=40))
@settings(max_examples=400, deadline=None)
def test_any_text_gets_the_ids_of_transformers(
    default_tokenizer: Tokenizer, transformers_tokenizer: Any, text: str
) -> None:
    """What no corpus thinks of: unassigned characters, white space of every kind, digits of other scripts."""
    ids = default_tokenizer.encode(text)
    assert ids == transformers_tokenizer(text)["input_ids"]
    expected = transformers_tokenizer.decode(ids, clean_up_tokenization_spaces=False)  # not always the text:
    assert default_tokenizer.decode(ids, skip_special=False) == expected  # the vocabulary lacks a few rare bytes


@pytest.mark.model
@needs_model
def test_the_default_model_ends_on_both_of_its_ids(default_tokenizer: Tokenizer) -> None:
    """The file names `<|im_end|>` only; a model that says `<|endoftext|>` would run on."""
    tokenizer = default_tokenizer
    assert {tokenizer.decode([token], skip_special=False) for token in tokenizer.eos_ids} == {
        "<|im_end|>", "<|endoftext|>",
    }  # fmt: skip
    assert (tokenizer.bos_id, tokenizer.add_bos, tokenizer.vocab_size) == (1, False, 49152)
    assert tokenizer.encode("") == []


@pytest.mark.model
@needs_model
def test_the_default_tokenizer_is_built_quickly(default_metadata: dict[str, Any]) -> None:
    """Start-up: .8 s is what is allowed, about .1 s what it takes."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        Tokenizer.from_gguf(default_metadata)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.8
