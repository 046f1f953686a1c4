"""Tokenizers from GGUF metadata: against llama.cpp's conformance texts, and against transformers."""

import json
import os
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_corpus import CHATS, SPECIAL_TEXTS, TEXTS, byte_level_metadata, sentencepiece_metadata
from tokenizers import pre_tokenizers

from nanokit.errors import TokenizerError
from nanokit.gguf.reader import GGUFFile
from nanokit.model.spec import DEFAULT_MODEL, model_path
from nanokit.model.tokenizer import Tokenizer
from nanokit.model.tokenizer_gguf import PRE_TOKENIZERS

VOCABS = os.environ.get("NANOKIT_VOCABS")
DEFAULT_PATH = model_path(DEFAULT_MODEL)

needs_vocabs = pytest.mark.skipif(
    not VOCABS, reason="NANOKIT_VOCABS does not name the folder of vocabularies"
)
needs_model = pytest.mark.skipif(not DEFAULT_PATH.is_file(), reason="the default model is not in the cache")


def metadata_of(path: Path) -> dict[str, Any]:
    return GGUFFile.open(path).metadata


@pytest.fixture(scope="module")
def default_metadata() -> dict[str, Any]:
    return metadata_of(DEFAULT_PATH)


@pytest.fixture(scope="module")
def default_tokenizer(default_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(default_metadata)


@needs_vocabs
@pytest.mark.parametrize("name", ["gpt-2", "qwen2", "phi-3"])
def test_every_conformance_text_of_llama_cpp_gets_its_ids(name: str) -> None:
    """A wrong split, normalizer or merge order: ids that look plausible and are not the model's."""
    folder = Path(str(VOCABS))
    tokenizer = Tokenizer.from_gguf(metadata_of(folder / f"{name}.gguf"))
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
            expected = transformers_tokenizer.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
            assert tokenizer.decode(ids, skip_special=skip) == expected
    for chat in CHATS:
        for prompt in (True, False):
            text = transformers_tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=prompt
            )
            assert tokenizer.chat_text(chat, add_generation_prompt=prompt) == text
        ids = transformers_tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        assert tokenizer.chat_ids(chat) == ids
    assert "You are a helpful AI assistant named SmolLM" in tokenizer.chat_text(CHATS[0])
    for token_id in range(0, tokenizer.vocab_size, 7):
        expected = transformers_tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        assert tokenizer.decode([token_id], skip_special=False) == expected


@pytest.mark.model
@needs_model
@given(
    text=st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("  \n\n\t019'a.<|>"), max_size=40)
)
@settings(max_examples=400, deadline=None)
def test_any_text_gets_the_ids_of_transformers(
    default_tokenizer: Tokenizer, transformers_tokenizer: Any, text: str
) -> None:
    """What no corpus thinks of: unassigned characters, white space of every kind, digits of other scripts."""
    ids = default_tokenizer.encode(text)
    assert ids == transformers_tokenizer(text)["input_ids"]
    expected = transformers_tokenizer.decode(ids, clean_up_tokenization_spaces=False)  # not always the text:
    assert (
        default_tokenizer.decode(ids, skip_special=False) == expected
    )  # the vocabulary lacks a few rare bytes


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


# --- pre-tokenizers without a vocabulary at hand ----------------------------------------------------------


@pytest.mark.parametrize("pre", ["smollm", "starcoder", "refact"])
def test_digits_stand_alone(pre: str) -> None:
    """No merge goes across a digit, and the newlines in front of one stay together."""
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(pre))
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode("hello\n\n12")]
    assert pieces == ["hello", "\n\n", "1", "2"]
    plain = Tokenizer.from_gguf(byte_level_metadata("gpt-2"))
    assert [plain.decode([token]) for token in plain.encode("hello\n\n12")] == ["hello", "\n", "\n", "12"]


def test_splits_are_those_of_the_transformers_classes() -> None:
    """A typing error in a pattern: one split differs, on one kind of text."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    native = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for pre in PRE_TOKENIZERS:
        tokenizer = Tokenizer.from_gguf(byte_level_metadata(pre, add_bos_token=False))
        backend = tokenizer._backend
        if pre in GGUF_PRE_TOKENIZER_SPLITS:
            from tokenizers import Regex

            split = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), "isolated")
            spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            oracle = pre_tokenizers.Sequence([split, spell])
        elif pre in ("smollm", "starcoder", "refact"):
            oracle = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), native])
        else:
            oracle = native
        for text in TEXTS:
            ours = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
            assert ours == [word for word, _ in oracle.pre_tokenize_str(text)], (pre, text)


def test_qwen2_composes_accents() -> None:
    """Without NFC, "e" + accent is two tokens that the model has hardly seen."""
    qwen = Tokenizer.from_gguf(byte_level_metadata("qwen2"))
    assert qwen.encode("e\u0301") == qwen.encode("\u00e9")
    plain = Tokenizer.from_gguf(byte_level_metadata("gpt-2"))
    assert plain.encode("e\u0301") != plain.encode("\u00e9")


def test_llama3_takes_whole_words_and_starts_with_bos() -> None:
    """`ignore_merges` forgotten: a word in the vocabulary that its merges cannot build falls to pieces."""
    metadata = byte_level_metadata("llama-bpe")
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens[tokens.index("[PAD]")], metadata["tokenizer.ggml.token_type"][-1] = "xyz", 1
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode("xyz") == [tokens.index("<|begin|>"), tokens.index("xyz")]
    assert tokenizer.add_bos
    assert tokenizer.encode("xyz", add_special=False) == [tokens.index("xyz")]
    assert len(Tokenizer.from_gguf(byte_level_metadata("gpt-2")).encode("xyz")) == 3


# --- SentencePiece ----------------------------------------------------------------------------------------


def sentencepiece_oracle(metadata: dict[str, Any]) -> Any:
    """transformers' reading of the same metadata: its Llama class with the merges that it recovers."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    renamed = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    names = {"model": "tokenizer_type", "unknown_token_id": "unk_token_id"}
    backend, _ = convert_gguf_tokenizer(
        "phi3", {names.get(key, key): value for key, value in renamed.items()}
    )
    return backend


def test_sentencepiece_agrees_with_transformers() -> None:
    """Merge order, byte fallback, the space in front, runs of spaces, text beside special tokens."""
    metadata = sentencepiece_metadata()
    tokenizer, oracle = Tokenizer.from_gguf(metadata), sentencepiece_oracle(metadata)
    texts = [
        *TEXTS,
        "hello world",
        "<s>hello</s> hello<|end|>world<tool> w",
        "  hello",
        "hello.hello",
        "▁hello",
        "<0x41>",
    ]
    merges = [json.loads(backend.to_str())["model"]["merges"] for backend in (tokenizer._backend, oracle)]
    assert merges[0] == merges[1]
    for text in texts:
        ids = oracle.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special=False) == ids, repr(text)
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special=skip) == oracle.decode(ids, skip_special_tokens=skip)
    assert tokenizer.encode("") == [1]
    assert tokenizer.encode("hello")[0] == 1
    assert tokenizer.eos_ids == (2, metadata["tokenizer.ggml.tokens"].index("<|end|>"))


def test_sentencepiece_without_a_space_in_front() -> None:
    """`add_space_prefix = false` must reach both encoding and decoding."""
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata(add_space_prefix=False, add_bos_token=False))
    for text in ("hello", " hello", "  hello"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    hello, space = (tokenizer._backend.token_to_id(piece) for piece in ("hello", "▁"))
    assert tokenizer.encode("hello<s>hello") == [hello, 1, hello]
    assert tokenizer.decode([space, hello]) == " hello"


def test_phi3_swallows_white_space_behind_its_tokens() -> None:
    """The chat template writes a newline behind `<|end|>`; Phi-3 was trained without it."""
    metadata = sentencepiece_metadata() | {"general.architecture": "phi3"}
    phi3, llama = Tokenizer.from_gguf(metadata), Tokenizer.from_gguf(sentencepiece_metadata())
    assert phi3.encode("<|end|> \n hello") == llama.encode("<|end|>hello")
    assert phi3.encode("<s> hello") == llama.encode("<s> hello")


# --- what the file says, and what is refused --------------------------------------------------------------


def test_numpy_arrays_are_as_good_as_lists() -> None:
    """Our reader gives numpy arrays for numbers, the gguf library lists."""
    metadata = sentencepiece_metadata()
    arrays = {key: np.asarray(metadata[f"tokenizer.ggml.{key}"]) for key in ("scores", "token_type")}
    other = Tokenizer.from_gguf(metadata | {f"tokenizer.ggml.{key}": value for key, value in arrays.items()})
    assert other.encode("hello world.") == Tokenizer.from_gguf(metadata).encode("hello world.")


def test_a_file_written_by_the_gguf_library(tmp_path: Path) -> None:
    """Names and types of the keys, as a real writer puts them."""
    metadata = byte_level_metadata("smollm")
    writer = gguf.GGUFWriter(tmp_path / "v.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    writer.add_bos_token_id(metadata["tokenizer.ggml.bos_token_id"])
    writer.add_eos_token_id(metadata["tokenizer.ggml.eos_token_id"])
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = Tokenizer.from_gguf(metadata_of(tmp_path / "v.gguf"))
    assert tokenizer.encode("hello 12") == [
        tokenizer.bos_id,
        *tokenizer.encode("hello 12", add_special=False),
    ]
    chat = [{"role": "user", "content": "hello"}]
    assert tokenizer.chat_ids(chat) == [*tokenizer.encode("hello"), *tokenizer.eos_ids]  # BOS once


def test_eos_behind_a_text_where_the_file_asks_for_it() -> None:
    """`add_eos_token`, as transformers and llama.cpp read it."""
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(add_eos_token=True))
    assert tokenizer.encode("hello") == [*tokenizer.encode("hello", add_special=False), *tokenizer.eos_ids]
    assert not tokenizer.add_bos


def test_types_of_tokens() -> None:
    """Control: matched whole, skipped in decoding. User-defined: matched whole, shown. Unused: plain."""
    tokenizer = Tokenizer.from_gguf(byte_level_metadata())
    control, shown = tokenizer.encode("<|im_end|>"), tokenizer.encode("<think>")
    assert len(control) == len(shown) == 1
    assert len(tokenizer.encode("[PAD]")) == 5
    unnamed = Tokenizer.from_gguf(sentencepiece_metadata(unknown_token_id=None))
    assert unnamed.encode("<unk>", add_special=False) == [0]  # type "unknown" is as good as control
    assert unnamed.decode([0]) == ""
    assert tokenizer.decode(control + shown) == "<think>"
    assert tokenizer.decode(control + shown, skip_special=False) == "<|im_end|><think>"


def test_end_ids_come_from_keys_and_from_control_tokens_by_text() -> None:
    """eot and eom are ends as well; a normal token that merely looks like an end is not one."""
    tokens = byte_level_metadata()["tokenizer.ggml.tokens"]
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(eos_token_id=5, eot_token_id=6, eom_token_id=7))
    assert tokenizer.eos_ids == (5, 6, 7, tokens.index("<|im_end|>"))
    normal = Tokenizer.from_gguf(byte_level_metadata(token_type=None, eos_token_id=None))
    assert normal.eos_ids == ()


def test_a_control_token_outside_of_the_byte_alphabet() -> None:
    """DeepSeek's `<｜end▁of▁sentence｜>` is no byte-level spelling: matched, decoded and counted as an end anyway."""
    tokens, text = byte_level_metadata()["tokenizer.ggml.tokens"], "<｜end▁of▁sentence｜>"
    types = [1] * len(tokens) + [3]
    tokenizer = Tokenizer.from_gguf(
        byte_level_metadata(tokens=[*tokens, text], token_type=types, eos_token_id=None)
    )
    assert tokenizer.eos_ids == (len(tokens),)
    assert tokenizer.encode(f"a{text}")[1:] == [len(tokens)]
    assert tokenizer.decode([len(tokens)], skip_special=False) == text


def test_end_closes_only_a_message_beside_return_and_call() -> None:
    """gpt-oss ends each message with `<|end|>`: stopping there would cut off the answer."""
    tokens = byte_level_metadata()["tokenizer.ggml.tokens"]
    more = ["<|end|>", "<|return|>", "<|call|>"]
    types = [1] * len(tokens) + [3] * 3
    tokenizer = Tokenizer.from_gguf(
        byte_level_metadata(tokens=tokens + more, token_type=types, eos_token_id=None)
    )
    assert tokenizer.eos_ids == (len(tokens) + 1,)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pre": "deepseek-v9"}, "deepseek-v9"),
        ({"pre": None}, "smollm"),
        ({"model": "bert"}, "bert"),
        ({"model": "t5"}, "t5"),
        ({"model": "rwkv"}, "rwkv"),
        ({"model": None}, "tokenizer.ggml.model"),
        ({"tokens": None}, "tokens"),
        ({"tokens": "text"}, "tokens"),
        ({"tokens": [1, 2]}, "int"),
        ({"tokens": ["a", "b", "a"]}, "'a' twice, as ids 0 and 2"),
        ({"merges": None}, "merges"),
        ({"merges": ["nope"]}, "'nope'"),
        ({"merges": ["a b"]}, "'a b'"),
        ({"token_type": [1, 1]}, "token_type"),
        ({"bos_token_id": 10_000}, "10000"),
        ({"eos_token_id": -1}, "-1"),
        ({"bos_token_id": None, "add_bos_token": True}, "bos_token_id"),
    ],
)
def test_broken_or_unsupported_vocabularies_are_refused(changes: dict[str, Any], says: str) -> None:
    """Each names the key and what was found; none falls back to a default or crashes inside the library."""
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_gguf(byte_level_metadata(**changes))
    assert says in str(caught.value)


@pytest.mark.parametrize("scores", [None, [0.0], [float("nan")] * 300])
def test_sentencepiece_needs_its_scores(scores: list[float] | None) -> None:
    """Without scores there is no merge order."""
    with pytest.raises(TokenizerError, match="scores"):
        Tokenizer.from_gguf(sentencepiece_metadata(scores=scores))


def test_the_error_for_an_unknown_pre_tokenizer_names_the_known_ones() -> None:
    """What can be used instead is part of the message."""
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_gguf(byte_level_metadata("other"))
    assert all(name in str(caught.value) for name in PRE_TOKENIZERS)
