"""A model's configuration as the metadata of a GGUF file, in the spelling and the value types of the gguf library.

Everything that a reader could fill in by a default of its own is written: the rope base (some take 10,000), the head
size (some divide the hidden size), the key/value heads. Linear rope scaling is two keys. The llama3 rule has no keys
that readers agree on: it becomes the tensor rope_freqs.weight, by whose values llama.cpp and the kit divide the
frequencies. (transformers reads neither: it computes such a file with unscaled frequencies.)
"""

from functools import partial
from typing import Any

import numpy as np

from nanokit.errors import ModelFileError
from nanokit.gguf.header import ValueKind
from nanokit.gguf.write import Entry, Key, check_key
from nanokit.model.config import ModelConfig
from nanokit.model.rope import Rope

U32, F32, TEXT = ValueKind("UINT32"), ValueKind("FLOAT32"), ValueKind("STRING")


def model_keys(config: ModelConfig, name: str, *, alignment: int, file_type: int | None) -> dict[str, Key]:
    """All keys but the tokenizer's. name: what the model calls itself; alignment: in bytes; file_type: llama.cpp's
    number of the type that most weights have, None leaves it out. Raises ModelFileError for a number that a GGUF file
    cannot hold: transformers keeps them as decimals of any size."""
    general: dict[str, tuple[ValueKind, Any]] = {
        "architecture": (TEXT, config.architecture),
        "type": (TEXT, "model"),
        "name": (TEXT, name),
        "alignment": (U32, alignment),
        "quantization_version": (U32, 2),
    }
    if file_type is not None:
        general["file_type"] = (U32, file_type)
    model: dict[str, tuple[ValueKind, Any]] = {
        "vocab_size": (U32, config.vocab_size),
        "context_length": (U32, config.max_context),
        "embedding_length": (U32, config.hidden_size),
        "block_count": (U32, config.num_layers),
        "feed_forward_length": (U32, config.intermediate_size),
        "attention.head_count": (U32, config.num_heads),
        "attention.head_count_kv": (U32, config.num_kv_heads),
        "attention.key_length": (U32, config.head_dim),
        "attention.value_length": (U32, config.head_dim),
        "attention.layer_norm_rms_epsilon": (F32, config.rms_eps),
        "rope.dimension_count": (U32, config.head_dim),
        "rope.freq_base": (F32, config.rope.base),
    }
    if config.rope.linear_factor != 1.0:
        model["rope.scaling.type"] = (TEXT, "linear")
        model["rope.scaling.factor"] = (F32, config.rope.linear_factor)
    keys = {
        **{f"general.{key}": Key(*value) for key, value in general.items()},
        **{f"{config.architecture}.{key}": Key(*value) for key, value in model.items()},
    }
    for key, stored in keys.items():
        check_key(key, stored)
    return keys


def frequency_entry(config: ModelConfig) -> Entry | None:
    """The tensor rope_freqs.weight, fp32 [head_dim / 2]: by how much a rule slows each pair down. None without one.
    Raises ModelFileError where that is no number."""
    factors = _factors(config)
    if factors is not None and not (np.isfinite(factors) & (factors > 0)).all():
        raise ModelFileError(
            "the llama3 rule of this model gives no frequencies",
            found=config.rope.llama3,
            needed="a positive fp32 number by which each pair is slowed down",
        )
    return None if factors is None else Entry("rope_freqs.weight", "F32", factors.shape, partial(np.copy, factors))


def _factors(config: ModelConfig) -> np.ndarray | None:
    if config.rope.frequency_factors is not None:
        return np.array(config.rope.frequency_factors, np.float32)
    if config.rope.llama3 is None:
        return None
    plain = Rope(config.rope.base).inverse_frequencies(config.head_dim)
    slowed = Rope(config.rope.base, llama3=config.rope.llama3).inverse_frequencies(config.head_dim)
    return (plain / slowed).numpy()
