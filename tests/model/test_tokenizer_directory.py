"""Directories of Hugging Face files, as transformers writes and reads them."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizer_corpus import CHATS, TEXTS, byte_level_metadata, sentencepiece_metadata
from transformers import PreTrainedTokenizerFast

from nanokit.errors import TokenizerError
from nanokit.model.tokenizer import Tokenizer
from nanokit.model.tokenizer_gguf import read_gguf

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"


def write(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(json.dumps(value), encoding="utf-8")


def change(folder: Path, name: str, **changes: Any) -> None:
    file = folder / name
    value = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    write(folder, name, {key: item for key, item in {**value, **changes}.items() if item is not None})


@pytest.fixture(params=["byte-level", "sentencepiece"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A small tokenizer as `save_pretrained` writes it."""
    metadata = byte_level_metadata("llama-bpe") if request.param == "byte-level" else sentencepiece_metadata()
    parts = read_gguf(metadata)
    saved = PreTrainedTokenizerFast(tokenizer_object=parts.backend, chat_template=TEMPLATE, **parts.special_texts)
    saved.save_pretrained(tmp_path)
    return tmp_path


def assert_same(folder: Path) -> Tokenizer:
    """Every id, text and chat as transformers has them."""
    ours, oracle = Tokenizer.from_directory(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    for text in [*TEXTS, "hello world", "<s>hello</s><|end|> <tool>", "hello<|im_end|> <think>hello"]:
        ids = oracle(text)["input_ids"]
        assert ours.encode(text) == ids, repr(text)
        assert ours.encode(text, add_special=False) == oracle(text, add_special_tokens=False)["input_ids"]
        for skip in (True, False):
            expected = oracle.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special=skip) == expected
    for chat in CHATS:
        assert ours.chat_text(chat) == oracle.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert ours.chat_ids(chat) == oracle.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert ours.bos_id == oracle.bos_token_id
    assert ours.eos_ids[:1] == (oracle.eos_token_id,)
    assert ours.vocab_size == len(oracle)
    return ours


def test_agrees_with_transformers(folder: Path) -> None:
    """Split, merges, BOS of the post-processor, template in its own file."""
    assert (folder / "chat_template.jinja").is_file()
    tokenizer = assert_same(folder)
    assert tokenizer.add_bos


@pytest.mark.parametrize("flags", [(True, False), (False, False), (True, True), (None, True)])
def test_bos_and_eos_flags_do_not_overrule_tokenizer_json(folder: Path, flags: tuple[bool | None, bool]) -> None:
    """`add_bos_token: false` beside a tokenizer.json that adds it: transformers adds it."""
    change(folder, "tokenizer_config.json", add_bos_token=flags[0], add_eos_token=flags[1])
    assert assert_same(folder).add_bos
    change(folder, "tokenizer.json", post_processor=None)
    assert not assert_same(folder).add_bos


def test_special_tokens_that_only_the_configuration_names(folder: Path) -> None:
    """Written as objects or as text; a new one gets the next id, one of the vocabulary keeps its own."""
    change(
        folder,
        "tokenizer_config.json",
        eos_token={
            "__type": "AddedToken",
            "content": "he",
            "lstrip": False,
            "rstrip": False,
            "single_word": False,
            "normalized": False,
        },
        pad_token="<|new|>",
    )
    tokenizer = assert_same(folder)
    assert tokenizer.decode(tokenizer.encode("<|new|>")) == ""


def test_named_templates_and_template_in_the_configuration(folder: Path) -> None:
    """Older files: a text, or a list of named ones of which `default` is meant."""
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(TokenizerError, match="no chat template"):
        Tokenizer.from_directory(folder).chat_text(CHATS[0])
    change(folder, "tokenizer_config.json", chat_template=TEMPLATE)
    assert_same(folder)
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": TEMPLATE}]
    change(folder, "tokenizer_config.json", chat_template=named)
    assert_same(folder)


def test_older_directories_name_their_tokens_in_special_tokens_map(folder: Path) -> None:
    """Without the configuration, the map is all there is."""
    config = json.loads((folder / "tokenizer_config.json").read_text())
    write(
        folder,
        "special_tokens_map.json",
        {"bos_token": config["bos_token"], "eos_token": config["eos_token"]},
    )
    (folder / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.from_directory(folder)
    assert tokenizer.decode([tokenizer.bos_id or 0], skip_special=False) == config["bos_token"]
    assert tokenizer.decode([tokenizer.eos_ids[0]], skip_special=False) == config["eos_token"]


def test_every_end_id_is_honoured(folder: Path) -> None:
    """A list in generation_config.json; config.json only where that file is missing."""
    eos = Tokenizer.from_directory(folder).eos_ids
    write(folder, "config.json", {"eos_token_id": 7})
    assert Tokenizer.from_directory(folder).eos_ids == (*eos, 7)
    write(folder, "generation_config.json", {"eos_token_id": [8, eos[0], 9]})
    assert Tokenizer.from_directory(folder).eos_ids == (*eos, 8, 9)
    write(folder, "generation_config.json", {"eos_token_id": 8})
    assert Tokenizer.from_directory(folder).eos_ids == (*eos, 8)
    write(folder, "generation_config.json", {"eos_token_id": "8"})
    with pytest.raises(TokenizerError, match=r"generation_config\.json"):
        Tokenizer.from_directory(folder)


def test_truncation_and_padding_of_the_file_do_not_apply(folder: Path) -> None:
    """A tokenizer.json saved after training cuts every prompt at its max_length."""
    change(
        folder,
        "tokenizer.json",
        truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 200}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
            "pad_type_id": 0, "pad_token": "a",
        },
    )  # fmt: skip
    tokenizer = Tokenizer.from_directory(folder)
    text = "hello world hello world hello world"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_without_tokenizer_json_it_says_what_to_do(folder: Path) -> None:
    """A directory with SentencePiece's own file only."""
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_directory(folder)
    assert "tokenizer.model" in str(caught.value)
    assert "save_pretrained" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("tokenizer.json", content) for content in (b"", b"{", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000)),
        *(("tokenizer_config.json", content) for content in (b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000)),
        ("tokenizer_config.json", b'{"chat_template": 3, "added_tokens_decoder": {}}'),
        ("chat_template.jinja", b"\xff\xfe"),
    ],
)
def test_broken_files_are_named(folder: Path, name: str, content: bytes) -> None:
    """Cut off, of another shape, not UTF-8, nested beyond measure."""
    (folder / "chat_template.jinja").unlink()
    (folder / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=name.replace(".", r"\.")):
        Tokenizer.from_directory(folder)


def test_a_decoder_that_cannot_be_streamed_is_refused(folder: Path) -> None:
    """WordPiece and friends join tokens by rules of their own."""
    change(folder, "tokenizer.json", decoder={"type": "WordPiece", "prefix": "##", "cleanup": True})
    with pytest.raises(TokenizerError, match="WordPiece"):
        Tokenizer.from_directory(folder)
