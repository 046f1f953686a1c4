"""Configurations that the forward would silently get wrong are refused by name."""

from typing import Any

import pytest

from nanokit.errors import ModelFileError, ParameterError
from nanokit.model.config import ModelConfig, config_from_transformers, override_rope
from nanokit.model.config_gguf import config_from_gguf

HF: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
}  # fmt: skip
GGUF: dict[str, Any] = {
    "general.architecture": "llama", "llama.embedding_length": 64, "llama.feed_forward_length": 96,
    "llama.block_count": 2, "llama.attention.head_count": 8, "llama.attention.head_count_kv": 2,
    "llama.context_length": 128, "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 5e5,
}  # fmt: skip


def gguf(changes: dict[str, Any], factors: list[float] | None = None) -> ModelConfig:
    merged = {k: v for k, v in {**GGUF, **changes}.items() if v is not None}
    return config_from_gguf(merged, vocab_size=100, tied_head=True, frequency_factors=factors)


def hf(changes: dict[str, Any]) -> ModelConfig:
    return config_from_transformers({k: v for k, v in {**HF, **changes}.items() if v is not None})


def test_both_spellings_of_the_rope_base() -> None:
    """transformers 5 moved rope_theta into rope_parameters; reading only one spelling gives 10,000 in silence."""
    nested = {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert hf(nested).rope == hf({}).rope == gguf({}).rope


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"rope_theta": None}, "rope base is missing"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "contradict"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"model_type": "mixtral"}, "mixtral"),
        ({"use_sliding_window": True}, "sliding"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"num_attention_heads": "8"}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "divide"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"rms_norm_eps": float("nan")}, "rms_eps"),
        ({"rms_norm_eps": -1e-5}, "rms_eps"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),  # an integer that no float holds
        ({"num_attention_heads": 0}, "num_heads"),
        ({"num_attention_heads": 0, "head_dim": 8}, "num_heads"),
        ({"rope_theta": "500000"}, "rope_theta"),
        ({"rope_theta": True}, "rope_theta"),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": [5e5]}}, "rope_theta"),
        ({"rope_theta": None, "rope_parameters": {"full_attention": {"rope_theta": 5e5}}}, "base is missing"),
        ({"rope_parameters": [5e5]}, "rope_parameters"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"partial_rotary_factor": "half"}, "partial rotary"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "full attention"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "full attention"),
        ({"layer_types": "sliding_attention"}, "full attention"),
        ({"layer_types": 3}, "layer_types"),
        ({"layer_types": [{}]}, "layer_types"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings"),
        ({"quantization_config": "bitsandbytes"}, "bitsandbytes"),
    ],
)
def test_refused_transformers_configs(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ModelFileError, match=word) as caught:
        hf(changes)
    assert caught.value.found is not None
    assert caught.value.needed is not None


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"llama.rope.freq_base": None}, r"llama\.rope\.freq_base is missing"),
        ({"llama.rope.freq_base": "500000"}, r"llama\.rope\.freq_base is not usable"),
        ({"llama.rope.freq_base": float("nan")}, "rope base is not usable"),
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0}, "factor"),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 2.0}, "contradicts"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count"),
        ({"llama.expert_count": 8}, "expert"),
        ({"llama.attention.causal": False}, "looks ahead"),
        ({"llama.attention.layer_norm_rms_epsilon": float("inf")}, "rms_eps"),
        ({"llama.attention.head_count": 0}, "num_heads"),
        ({"llama.attention.head_count_kv": [2, 4]}, "head_count_kv"),
        ({"general.architecture": "gpt2"}, "gpt2"),
        ({"general.architecture": None}, "architecture"),
    ],
)
def test_refused_gguf_metadata(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ModelFileError, match=word) as caught:
        gguf(changes)
    assert caught.value.found is not None
    assert caught.value.needed is not None


def test_frequency_factors_are_checked() -> None:
    for factors in ([1.0] * 3, [1.0, 1.0, 0.0, 1.0], [float("nan")] * 4):
        with pytest.raises(ModelFileError, match="rope_freqs"):
            gguf({}, factors)


def test_rope_override_needs_force() -> None:
    with pytest.raises(ParameterError, match="--force"):
        override_rope(gguf({}), base=1e4)
    changed = override_rope(gguf({}), base=1e4, scale=0.5, force=True)
    assert (changed.rope.base, changed.rope.linear_factor) == (1e4, 2.0)
    with pytest.raises(ParameterError, match="out of range"):
        override_rope(gguf({}), scale=0.0, force=True)
