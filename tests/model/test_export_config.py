"""config.json and tokenizer_config.json of a GGUF file: transformers' AutoTokenizer and published rules as oracles."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizer_corpus import SPECIAL_TEXTS, TEXTS, byte_level_metadata, sentencepiece_metadata
from transformers import AutoTokenizer

from nanokit.errors import ModelFileError
from nanokit.model.config import ModelConfig
from nanokit.model.export_config import rope_json, tokenizer_json
from nanokit.model.rope import Rope
from nanokit.model.tokenizer import Tokenizer


@pytest.mark.parametrize(
    "metadata",
    [
        *(byte_level_metadata(pre) for pre in ("smollm", "llama-bpe", "tekken", "qwen2")),
        byte_level_metadata(add_bos_token=True, add_eos_token=True),
        sentencepiece_metadata(),
        sentencepiece_metadata(add_space_prefix=False, add_bos_token=False),
    ],
    ids=["smollm", "llama-bpe", "tekken", "qwen2", "bos and eos", "sentencepiece", "no prefix"],
)
def test_transformers_splits_as_the_file_says(tmp_path: Path, metadata: dict[str, Any]) -> None:
    """A tokenizer class that builds a splitting of its own, BOS or EOS that is not put, or put twice."""
    tokenizer = Tokenizer.from_gguf(metadata)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text(tokenizer.parts.backend.to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_json(tokenizer, 512)))
    oracle, again = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_directory(tmp_path)
    for text in [*TEXTS, *SPECIAL_TEXTS, "hello world<s>hello</s>", "<|begin|>hello<|im_end|> <think>hello"]:
        ids = tokenizer.encode(text)
        assert oracle(text)["input_ids"] == ids, repr(text)
        assert again.encode(text) == ids, repr(text)
        assert oracle.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids)


@pytest.mark.parametrize("flags", [(True, True), (True, False), (False, True), (False, False)])
def test_what_is_put_around_a_text_is_said(flags: tuple[bool, bool]) -> None:
    """Converters to other formats go by these two flags; transformers goes by tokenizer.json."""
    names = ("add_bos_token", "add_eos_token")
    given = dict(zip(names, flags, strict=True))
    for metadata in (byte_level_metadata(**given), sentencepiece_metadata(**given)):
        said = tokenizer_json(Tokenizer.from_gguf(metadata), 512)
        assert {name: said[name] for name in names} == given


def llama3_factors(base: float, head_dim: int, factor: float, context: int, high: float = 4.0) -> tuple[float, ...]:
    """As converters compute them, in fp64 and one by one; low_freq_factor is 1."""
    found = []
    for pair in range(head_dim // 2):
        turns = context / (2 * math.pi) * base ** (-2 * pair / head_dim)  # in the original context
        blend = min(max((turns - 1) / (high - 1), 0), 1)
        found.append(float(np.float32(1 / ((1 - blend) / factor + blend))))
    return tuple(found)


def config_of(rope: Rope, head_dim: int) -> ModelConfig:
    return ModelConfig("llama", 10, 64, 64, 1, 2, 1, head_dim, 131072, 1e-5, rope, tied_head=True)


@pytest.mark.parametrize(("base", "head_dim", "factor", "context"), [(5e5, 128, 8, 8192), (5e5, 64, 32, 8192)])
def test_the_llama3_rule_is_found_again(base: float, head_dim: int, factor: float, context: int) -> None:
    """Of Llama 3.1 and 3.2, whose files have the factors only."""
    rope = Rope(base, frequency_factors=llama3_factors(base, head_dim, factor, context))
    assert rope_json(config_of(rope, head_dim)) == {
        "rope_type": "llama3", "rope_theta": base, "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": context,
    }  # fmt: skip


def test_factors_of_another_rule_are_refused() -> None:
    """The nearest rule reads fine, and costs accuracy with length. Factors of one are no scaling."""
    with pytest.raises(ModelFileError, match=r"rope_freqs\.weight follows no rule"):
        rope_json(config_of(Rope(5e5, frequency_factors=llama3_factors(5e5, 64, 32, 8192, high=3.9)), 64))
    factors = llama3_factors(5e5, 64, 32, 8192)
    with pytest.raises(ModelFileError, match="one of them"):
        rope_json(config_of(Rope(5e5, linear_factor=2.0, frequency_factors=factors), 64))
    assert rope_json(config_of(Rope(1e4, frequency_factors=(1.0,) * 32), 64))["rope_type"] == "default"
