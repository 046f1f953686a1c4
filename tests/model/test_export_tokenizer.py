"""A directory's tokenizer as GGUF metadata: the same ids through our reader and, where it knows how, transformers'."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizer_corpus import CHATS, SPECIAL_TEXTS, TEXTS, byte_level_metadata, sentencepiece_metadata
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from nanokit.errors import TokenizerError
from nanokit.gguf.reader import GGUFFile
from nanokit.gguf.write import Key
from nanokit.model import tokenizer_probes
from nanokit.model.export_tokenizer import tokenizer_keys
from nanokit.model.tokenizer import Tokenizer
from nanokit.model.tokenizer_gguf import PRE_TOKENIZERS, read_gguf

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
VOCABS = os.environ.get("NANOKIT_VOCABS")
CORPUS = [*TEXTS, *SPECIAL_TEXTS, "hello world", "<|begin|>hello<|im_end|> <think>hello", "<s>hello</s><|end|> <tool>"]


def directory(folder: Path, backend: Backend, named: Mapping[str, str], ends: list[int] | None = None) -> Tokenizer:
    """A tokenizer by way of files, as the converter meets it."""
    backend.save(str(folder / "tokenizer.json"))
    config = {**named, "chat_template": TEMPLATE, "added_tokens_decoder": {}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if ends is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return Tokenizer.from_directory(folder)


def from_metadata(folder: Path, metadata: Mapping[str, Any], ends: list[int] | None = None) -> Tokenizer:
    parts = read_gguf(metadata)
    return directory(folder, parts.backend, parts.special_texts, ends)


def values(keys: Mapping[str, Key]) -> dict[str, Any]:
    return {name: key.value for name, key in keys.items()}


def assert_same(tokenizer: Tokenizer, keys: Mapping[str, Key]) -> None:
    """Every id, text and chat, on texts that the exporter does not compare."""
    read = Tokenizer.from_gguf(values(keys))
    for text in CORPUS:
        ids = tokenizer.encode(text)
        assert read.encode(text) == ids, repr(text)
        assert read.encode(text, add_special=False) == tokenizer.encode(text, add_special=False)
        for skip in (True, False):
            assert read.decode(ids, skip_special=skip) == tokenizer.decode(ids, skip_special=skip)
    for chat in CHATS:
        assert read.chat_ids(chat) == tokenizer.chat_ids(chat)
    assert read.bos_id == tokenizer.bos_id
    assert set(read.eos_ids) >= set(tokenizer.eos_ids)


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "tekken", "qwen2"])
def test_the_pre_tokenizer_is_found_by_its_ids(tmp_path: Path, pre: str) -> None:
    """Named after the model, as converters do it, a splitting is wrong for every model that nobody thought of: digits,
    line ends, contractions in capitals get other ids. The vocabulary has a token on which each two of them differ."""
    merges = ["h e", "l l", "he ll", "1 2", "12 3", "Ċ Ċ", "Ġ Ġ", "' S", "Ã ©", "e Ì", "eÌ ģ", "A b", "b A"]
    metadata = byte_level_metadata(pre)
    tokens = metadata["tokenizer.ggml.tokens"][:256]
    tokens += [*(merge.replace(" ", "") for merge in merges), "hello", "<|begin|>", "<|im_end|>", "<think>"]
    metadata |= {
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 3) + [3, 3, 4],
        "tokenizer.ggml.bos_token_id": len(tokens) - 3, "tokenizer.ggml.eos_token_id": len(tokens) - 2,
    }  # fmt: skip
    tokenizer = from_metadata(tmp_path, metadata)
    keys = tokenizer_keys(tokenizer, len(tokens) + 5, "llama")
    found = values(keys)
    assert found["tokenizer.ggml.pre"] == pre
    assert found["tokenizer.ggml.add_bos_token"] is PRE_TOKENIZERS[pre].adds_bos
    assert found["tokenizer.ggml.add_eos_token"] is False
    assert found["tokenizer.ggml.merges"] == merges
    assert found["tokenizer.ggml.tokens"][:-5] == tokens
    assert len(set(found["tokenizer.ggml.tokens"])) == len(tokens) + 5
    assert found["tokenizer.ggml.token_type"] == [*metadata["tokenizer.ggml.token_type"], *[5] * 5]
    assert_same(tokenizer, keys)


def test_merges_come_back_out_of_scores_in_their_order(tmp_path: Path) -> None:
    """A GGUF file has no merges of SentencePiece: scores in another order than theirs join other pieces."""
    metadata = sentencepiece_metadata()
    tokenizer = from_metadata(tmp_path, metadata)
    keys = tokenizer_keys(tokenizer, len(metadata["tokenizer.ggml.tokens"]), "llama")
    found = values(keys)
    assert found["tokenizer.ggml.token_type"] == metadata["tokenizer.ggml.token_type"]
    assert merges_of(Tokenizer.from_gguf(found)) == merges_of(tokenizer)
    assert found["tokenizer.ggml.add_bos_token"] is True
    assert found["tokenizer.ggml.unknown_token_id"] == 0
    assert_same(tokenizer, keys)


def merges_of(tokenizer: Tokenizer) -> list[list[str]]:
    merges: list[list[str]] = json.loads(tokenizer.parts.backend.to_str())["model"]["merges"]
    return merges


def test_text_without_a_first_space_is_told_apart(tmp_path: Path) -> None:
    """The key add_space_prefix: without it a reader puts a space before every text."""
    metadata = sentencepiece_metadata(add_space_prefix=False)
    tokenizer = from_metadata(tmp_path, metadata)
    keys = tokenizer_keys(tokenizer, len(metadata["tokenizer.ggml.tokens"]), "llama")
    assert values(keys)["tokenizer.ggml.add_space_prefix"] is False
    assert_same(tokenizer, keys)


def test_every_end_is_named(tmp_path: Path) -> None:
    """generation_config.json lists several; a file that names the first only runs on past the others."""
    metadata = byte_level_metadata()
    tokenizer = from_metadata(tmp_path, metadata, ends=[5, 6])
    keys = values(tokenizer_keys(tokenizer, tokenizer.vocab_size, "llama"))
    assert keys["tokenizer.ggml.eos_token_id"] == tokenizer.parts.backend.token_to_id("<|im_end|>")
    assert (keys["tokenizer.ggml.eot_token_id"], keys["tokenizer.ggml.eom_token_id"]) == (5, 6)
    with pytest.raises(TokenizerError, match="the end 7"):
        tokenizer_keys(from_metadata(tmp_path, metadata, ends=[5, 6, 7]), 300, "llama")


def test_eos_behind_a_text_is_written(tmp_path: Path) -> None:
    """Models of embeddings are trained with it; readers add none by themselves."""
    metadata = byte_level_metadata(add_eos_token=True, add_bos_token=True)
    tokenizer = from_metadata(tmp_path, metadata)
    keys = tokenizer_keys(tokenizer, tokenizer.vocab_size, "llama")
    assert values(keys)["tokenizer.ggml.add_eos_token"] is True
    assert_same(tokenizer, keys)


def test_padding_has_names_of_its_own(tmp_path: Path) -> None:
    """Two tokens of one name make a file that no reader takes; the vocabulary may have the padding's names."""
    tokenizer = from_metadata(tmp_path, byte_level_metadata())
    size = tokenizer.vocab_size
    tokenizer.parts.backend.add_tokens([f"[PAD{size + 2}]"])
    tokenizer = directory(tmp_path, tokenizer.parts.backend, {})
    found = values(tokenizer_keys(tokenizer, size + 4, "llama"))["tokenizer.ggml.tokens"]
    assert found[size:] == [f"[PAD{size + 2}]", f"[PAD{size + 1}]", f"[[PAD{size + 2}]]", f"[PAD{size + 3}]"]


def split_digits_in_pairs(backend: Backend) -> None:
    spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\p{N}{1,2}"), "isolated"), spelling])


def lower_case(backend: Backend) -> None:
    backend.normalizer = normalizers.Lowercase()


def swallow_spaces(backend: Backend) -> None:
    backend.add_special_tokens([AddedToken("<|tool|>", rstrip=True, normalized=False)])


def frame_twice(backend: Backend) -> None:
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin|> <|im_end|> $A", special_tokens=[("<|begin|>", 264), ("<|im_end|>", 265)]
    )


@pytest.mark.parametrize("change", [split_digits_in_pairs, lower_case, swallow_spaces, frame_twice])
def test_what_no_name_stands_for_is_refused(tmp_path: Path, change: Any) -> None:
    """Written under the nearest name, such a tokenizer gives plausible ids that are not the model's."""
    backend = read_gguf(byte_level_metadata()).backend
    change(backend)
    with pytest.raises(TokenizerError) as caught:
        tokenizer_keys(directory(tmp_path, backend, {}), 300, "llama")
    assert caught.value.found is not None


@pytest.mark.parametrize("change", ["swapped", "missing"])
def test_merges_that_follow_from_no_scores_are_refused(tmp_path: Path, change: str) -> None:
    """A pair that comes before a better one, or that is not joined although its token exists, is lost in scores."""
    state = json.loads(read_gguf(sentencepiece_metadata()).backend.to_str())
    merges = state["model"]["merges"]
    if change == "swapped":  # between the two ways to make "hell"
        at = merges.index(["hel", "l"])
        merges.insert(at + 2, merges.pop(merges.index(["l", "l"])))
        merges.insert(at, merges.pop(merges.index(["he", "ll"])))
        merges.insert(0, merges.pop(merges.index(["hel", "l"])))
    else:
        merges.remove(["he", "ll"])
    backend = Backend.from_str(json.dumps(state))
    with pytest.raises(TokenizerError, match="scores"):
        tokenizer_keys(directory(tmp_path, backend, {}), 330, "llama")


def test_the_probes_tell_all_known_splittings_apart() -> None:
    """Two definitions that no text distinguishes would be told apart by chance; compared are the pieces themselves."""
    pieces: dict[Any, str] = {}
    for name in dict.fromkeys(PRE_TOKENIZERS):
        definition = PRE_TOKENIZERS[name]
        backend = read_gguf(byte_level_metadata(name)).backend
        found = [
            [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(normalized(backend, text))]
            for text in tokenizer_probes.TEXTS
        ]
        key = json.dumps(found)
        same = next((other for other in PRE_TOKENIZERS if PRE_TOKENIZERS[other].splits == definition.splits), name)
        assert pieces.setdefault(key, same) == same
    assert len(pieces) == len({each.splits for each in PRE_TOKENIZERS.values()})


def normalized(backend: Backend, text: str) -> str:
    return text if backend.normalizer is None else str(backend.normalizer.normalize_str(text))


@pytest.mark.skipif(not VOCABS, reason="NANOKIT_VOCABS does not name the folder of vocabularies")
@pytest.mark.parametrize(("name", "pre"), [("gpt-2", "gpt-2"), ("qwen2", "qwen2"), ("phi-3", "default")])
def test_real_vocabularies_come_back_whole(tmp_path: Path, name: str, pre: str) -> None:
    """Tens of thousands of merges, equal scores, padding and user-defined tokens, checked by llama.cpp's own texts."""
    metadata = {**GGUFFile.open(Path(str(VOCABS)) / f"{name}.gguf").metadata, "general.architecture": "llama"}
    size = len(metadata["tokenizer.ggml.tokens"])
    tokenizer = from_metadata(tmp_path, metadata)
    found = values(tokenizer_keys(tokenizer, size, "llama"))
    for key in ("tokens", "merges"):
        assert found.get(f"tokenizer.ggml.{key}") == metadata.get(f"tokenizer.ggml.{key}")
    assert found["tokenizer.ggml.pre"] == pre
    read = Tokenizer.from_gguf(found)
    texts = (Path(str(VOCABS)) / f"{name}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = (Path(str(VOCABS)) / f"{name}.out").read_text().split("\n")
    for text, line in zip(texts, lines, strict=True):
        assert read.encode(text, add_special=False) == [int(word) for word in line.split()], repr(text)
