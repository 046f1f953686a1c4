"""Tokenizers from GGUF metadata, on small vocabularies; the parts of transformers and tokenizers are the oracle."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizer_corpus import TEXTS, byte_level_metadata, sentencepiece_metadata
from tokenizers import Regex, pre_tokenizers

from nanokit.errors import TokenizerError
from nanokit.gguf.reader import GGUFFile
from nanokit.model.tokenizer import Tokenizer
from nanokit.model.tokenizer_gguf import PRE_TOKENIZERS

TRANSFORMERS_GGUF = "transformers.integrations.gguf.gguf_tokenizer_mapping"  # not in every release 5.x

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
    known = pytest.importorskip(TRANSFORMERS_GGUF).GGUF_PRE_TOKENIZER_SPLITS
    native = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for pre in PRE_TOKENIZERS:
        tokenizer = Tokenizer.from_gguf(byte_level_metadata(pre, add_bos_token=False))
        backend = tokenizer._backend
        if pre in known:
            split = pre_tokenizers.Split(Regex(known[pre]), "isolated")
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
    convert_gguf_tokenizer = pytest.importorskip(TRANSFORMERS_GGUF).convert_gguf_tokenizer
    renamed = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    names = {"model": "tokenizer_type", "unknown_token_id": "unk_token_id"}
    backend, _ = convert_gguf_tokenizer("phi3", {names.get(key, key): value for key, value in renamed.items()})
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
    tokenizer = Tokenizer.from_gguf(GGUFFile.open(tmp_path / "v.gguf").metadata)
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
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(tokens=[*tokens, text], token_type=types, eos_token_id=None))
    assert tokenizer.eos_ids == (len(tokens),)
    assert tokenizer.encode(f"a{text}")[1:] == [len(tokens)]
    assert tokenizer.decode([len(tokens)], skip_special=False) == text


def test_end_closes_only_a_message_beside_return_and_call() -> None:
    """gpt-oss ends each message with `<|end|>`: stopping there would cut off the answer."""
    tokens = byte_level_metadata()["tokenizer.ggml.tokens"]
    more = ["<|end|>", "<|return|>", "<|call|>"]
    types = [1] * len(tokens) + [3] * 3
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(tokens=tokens + more, token_type=types, eos_token_id=None))
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
        ({"bos_token_id": "one"}, "bos_token_id"),
        ({"eos_token_id": [1]}, "eos_token_id"),
        ({"eos_token_id": True}, "eos_token_id"),
        ({"add_bos_token": "false"}, "add_bos_token"),  # bool("false") is True
        ({"tokens": 7}, "tokens"),
        ({"merges": 7}, "merges"),
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
