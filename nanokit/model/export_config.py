"""A model's configuration as the JSON files of a transformers folder.

What a GGUF file and such a folder say differently is decided here, or refused. Rope parameters are written in both
spellings: transformers 5 reads `rope_parameters`, transformers 4 the base on top and `rope_scaling` beside it, and
either takes 10,000 where it finds none. A GGUF file has of the llama3 rule only what it makes of each pair of
dimensions: the rule is found again by trying those that models are published with, and has to give the very same
factors. Biases are all or nothing in a folder: transformers would make up the missing ones.

Numbers that a GGUF file keeps in fp32 are written with as few digits as tell them from their neighbours: 1e-05, not
9.99999974e-06, so that a folder that has become a file becomes the same folder again.
"""

from typing import Any

import numpy as np

from nanokit.errors import ModelFileError
from nanokit.model.config import ModelConfig
from nanokit.model.rope import Llama3Scaling, Rope
from nanokit.model.tokenizer import Tokenizer
from nanokit.model.weights import Weights
from nanokit.quant.policy import ATTENTION, FEED_FORWARD

CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
# Key of config.json -> the parts that all have a bias where it is true; and which of these keys transformers reads.
BIASES = {"attention_bias": ATTENTION, "mlp_bias": FEED_FORWARD}
READ = {"llama": ("attention_bias", "mlp_bias"), "qwen2": (), "qwen3": ("attention_bias",)}
ALWAYS = {"llama": (), "qwen2": ("q", "k", "v"), "qwen3": ()}  # biases without a key
# Of the llama3 rule only the ratios of these three matter, so that one of them can be held.
LOW, HIGH = 1.0, 4.0
CONTEXTS = tuple(1 << power for power in range(4, 23))
LAST_PLACES = 2.0**-21  # relative: what two ways to compute the factors in fp32 may differ

_DO = "use the folder that the file was converted from"


def config_json(config: ModelConfig, weights: Weights, tokenizer: Tokenizer, kind: str) -> dict[str, Any]:
    """config.json. kind: of the matrices, a key of DTYPES.

    Raises ModelFileError for rope parameters and biases that such a file cannot say.
    """
    rope = rope_json(config)
    plain = rope["rope_type"] == "default"
    return {
        "architectures": [CLASSES[config.architecture]],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        **_biases(config, weights),
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": _short(config.rms_eps),
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if plain else {key: value for key, value in rope.items() if key != "rope_theta"},
        "tie_word_embeddings": config.tied_head,
        **_special_ids(tokenizer),
        "dtype": DTYPES[kind],
        "torch_dtype": DTYPES[kind],
    }


def generation_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """generation_config.json: the ids that end an answer, all of them."""
    return _special_ids(tokenizer)


def tokenizer_json(tokenizer: Tokenizer, max_context: int) -> dict[str, Any]:
    """tokenizer_config.json: what tokenizer.json does not hold. The class takes that file as it is; those named after
    a model build their own splitting. What is put around a text tokenizer.json says too, but not every converter reads
    it there."""
    framed = len(tokenizer.encode(""))
    said: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_context,
        "clean_up_tokenization_spaces": False,
        **tokenizer.parts.special_texts,
        "add_bos_token": tokenizer.add_bos,
        "add_eos_token": framed > tokenizer.add_bos,
    }
    return said if tokenizer.chat_template is None else {**said, "chat_template": tokenizer.chat_template}


def rope_json(config: ModelConfig) -> dict[str, Any]:
    """The object `rope_parameters`. Raises ModelFileError for scaling that transformers has no name for."""
    rope = config.rope
    base = {"rope_theta": _short(rope.base)}
    factors = np.array(rope.frequency_factors or (1.0,), np.float32)
    slowed = bool((factors != 1.0).any())
    if slowed and rope.linear_factor != 1.0:
        raise ModelFileError(
            "this rope scaling has no name in a transformers folder",
            found=f"linear, factor {rope.linear_factor:g}, and factors for every pair in rope_freqs.weight",
            needed="one of them",
            do=_DO,
        )
    if rope.linear_factor != 1.0:
        return {"rope_type": "linear", **base, "factor": _short(rope.linear_factor)}
    if not slowed:
        return {"rope_type": "default", **base}
    rule = rope.llama3 or llama3_rule(config, factors)
    return {
        "rope_type": "llama3",
        **base,
        "factor": rule.factor,
        "low_freq_factor": rule.low_freq_factor,
        "high_freq_factor": rule.high_freq_factor,
        "original_max_position_embeddings": rule.original_context,
    }


def llama3_rule(config: ModelConfig, factors: np.ndarray) -> Llama3Scaling:
    """The rule that gives these factors, fp32 [head_dim / 2], by which frequencies are divided.

    Raises ModelFileError where none of those that are tried gives every one of them.
    """
    plain = Rope(config.rope.base).inverse_frequencies(config.head_dim)
    for context in CONTEXTS:
        rule = Llama3Scaling(round(float(factors.max()), 4), LOW, HIGH, context)
        slowed = Rope(config.rope.base, llama3=rule).inverse_frequencies(config.head_dim)
        if np.allclose((plain / slowed).numpy(), factors, rtol=LAST_PLACES, atol=0):
            return rule
    raise ModelFileError(
        "the tensor rope_freqs.weight follows no rule that a transformers folder can name",
        found=f"{len(factors)} factors from {factors.min():g} to {factors.max():g}",
        needed=f"those of the llama3 rule with low_freq_factor {LOW:g}, high_freq_factor {HIGH:g} and a power of two "
        "for original_max_position_embeddings",
        do=_DO,
    )


def _short(value: float) -> float:
    """The number with the fewest digits that is this one in fp32; one that fp32 does not have stays as it is."""
    narrow = np.float32(value)
    return float(str(narrow)) if float(narrow) == value else value


def _special_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    ends = list(tokenizer.eos_ids)
    padding = tokenizer.parts.special_texts.get("pad_token")
    return {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
        "pad_token_id": None if padding is None else tokenizer.parts.backend.token_to_id(padding),
    }


def _biases(config: ModelConfig, weights: Weights) -> dict[str, bool]:
    """The keys for the biases that there are. Raises ModelFileError for some without others."""
    found = {(index, part) for index, layer in enumerate(weights.layers)
             for part in ATTENTION + FEED_FORWARD if getattr(layer, part).bias is not None}  # fmt: skip
    parts = {part for _, part in found} - set(ALWAYS[config.architecture])
    said = {key: not parts.isdisjoint(BIASES[key]) for key in READ[config.architecture]}
    needed = {*ALWAYS[config.architecture], *(part for key, yes in said.items() if yes for part in BIASES[key])}
    wrong = found ^ {(index, part) for index in range(config.num_layers) for part in needed}
    if weights.head is not None and weights.head.bias is not None:
        wrong.add((-1, "head"))
    if wrong:
        index, part = min(wrong)
        where = "the head" if index < 0 else f"{part} of layer {index}"
        raise ModelFileError(
            "these biases have no place in a transformers folder",
            found=f"{where} has {'one' if index < 0 or (index, part) in found else 'none'}, against the others",
            needed=" or ".join(["none", *(", ".join(BIASES[key]) + " all" for key in said)])
            if config.architecture != "qwen2" else "q, k and v",
            do=_DO,
        )  # fmt: skip
    return said
