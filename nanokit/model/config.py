"""What a model is, read from GGUF metadata or a transformers config.json and checked before a weight is touched.

Three architectures share one forward: llama, qwen2 (biases on q, k, v) and qwen3 (norms on q and k heads). Anything
that this forward would silently get wrong is refused by name: other architectures, experts, sliding windows,
partial rotary, unknown rope scaling, a missing rope base.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nanokit.errors import ModelFileError, ParameterError, UnsupportedModelError
from nanokit.model.rope import Llama3Scaling, Rope

LEAST, MOST = 1.1754944e-38, 3.4028234e38  # the normal numbers of fp32
ARCHITECTURES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class ModelConfig:
    """The shapes and constants of a decoder-only transformer.

    num_heads / num_kv_heads: query and key/value heads of head_dim each; max_context: tokens it was trained for.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    rms_eps: float
    rope: Rope
    tied_head: bool

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
                     "num_kv_heads", "head_dim", "max_context"):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ModelFileError(
                    f"the model's {name} is not usable", found=repr(value), needed="a positive integer"
                )
        if not 0 < self.rms_eps < float("inf"):
            raise ModelFileError("the model's rms_eps is not usable", found=self.rms_eps, needed="a positive number")
        if self.num_heads % self.num_kv_heads:
            raise ModelFileError(
                "query heads do not divide into key/value heads",
                found=f"{self.num_heads} query and {self.num_kv_heads} key/value heads",
                needed="a whole number of query heads for each key/value head",
            )
        if self.head_dim % 2:
            raise ModelFileError(
                "rotary embedding needs pairs of dimensions",
                found=f"head_dim {self.head_dim}",
                needed="an even one",
            )


def check_architecture(name: object) -> str:
    """The architecture's name, or ModelFileError listing those that run."""
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            "this architecture is not supported",
            found=repr(name),
            needed="one of " + ", ".join(ARCHITECTURES),
            do="use a model of a supported family (Llama, SmolLM2, Mistral-as-llama, Qwen2/2.5, Qwen3)",
        )
    return str(name)


def override_rope(
    config: ModelConfig, *, base: float | None = None, scale: float | None = None, force: bool = False
) -> ModelConfig:
    """Replace the rope base, or set llama.cpp's frequency scale (1 / linear factor), only with `force`.

    Raises ParameterError without `force`, or for a value that is not a positive number of fp32, as files store it.
    """
    if base is None and scale is None:
        return config
    for name, value in (("--rope-freq-base", base), ("--rope-freq-scale", scale)):
        if value is not None and not LEAST <= value <= MOST:
            raise ParameterError(f"{name} is out of range", found=value, needed=f"{LEAST:.2g} to {MOST:.2g}")
    if not force:
        raise ParameterError(
            "overriding the model's own rope parameters needs --force",
            found=f"base {base}, scale {scale}; the model says base {config.rope.base:g}, "
            f"scale {1 / config.rope.linear_factor:g}",
            needed="the model's own values: a wrong base reads fine and loses accuracy with length",
            do="leave the option out, or add --force if you know the file to be wrong",
        )
    rope = replace(config.rope, base=base if base is not None else config.rope.base)
    if scale is not None:
        rope = replace(rope, linear_factor=1 / scale)
    return replace(config, rope=rope)


# ---------------------------------------------------------------------------------------------------------------
# transformers' config.json


def config_from_transformers(raw: Mapping[str, Any], rope_base: float | None = None) -> ModelConfig:
    """From a parsed config.json as transformers 4 or 5 writes it. Raises ModelFileError.

    rope_base: what the caller vouches for where the model states none.
    """
    architecture = check_architecture(raw.get("model_type"))
    _refuse_unsupported(raw)
    heads = _integer(raw, "num_attention_heads")
    hidden = _integer(raw, "hidden_size")
    return ModelConfig(
        architecture=architecture,
        vocab_size=_integer(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_integer(raw, "intermediate_size"),
        num_layers=_integer(raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_integer(raw, "num_key_value_heads", heads),
        head_dim=_integer(raw, "head_dim", 128 if architecture == "qwen3" else hidden // max(heads, 1)),
        max_context=_integer(raw, "max_position_embeddings"),
        rms_eps=_number(raw, "rms_norm_eps"),
        rope=_rope_from_transformers(raw, rope_base),
        tied_head=_boolean(raw, "tie_word_embeddings"),
    )


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    quantization = raw.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
        raise ModelFileError(
            f"safetensors quantized with {method} cannot be loaded",
            found=f"quantization_config in config.json, method {method!r}",
            needed="fp32, fp16 or bf16 weights, or a GGUF file",
            do="load the unquantized checkpoint, or a GGUF file of the same model",
        )
    layer_types = raw.get("layer_types") or []
    full = isinstance(layer_types, list) and all(kind == "full_attention" for kind in layer_types)
    if raw.get("use_sliding_window") or not full:
        raise UnsupportedModelError(
            "attention other than full attention is not supported",
            found=f"use_sliding_window {raw.get('use_sliding_window')}, layer_types {layer_types}"[:120],
            needed="every layer with full attention",
        )
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModelError("the feed-forward activation is not supported", found=activation, needed="silu")


def _rope_from_transformers(raw: Mapping[str, Any], rope_base: float | None) -> Rope:
    nested, legacy = _mapping(raw, "rope_parameters"), _mapping(raw, "rope_scaling")
    bases = {_number(p, "rope_theta") for p in (raw, nested, legacy) if p.get("rope_theta") is not None}
    if not bases and rope_base is not None:
        bases = {rope_base}
    if len(bases) != 1:
        raise ModelFileError(
            "the rope base is missing" if not bases else "two rope bases contradict each other",
            found=f"rope_theta {sorted(bases) or 'nowhere in config.json'}",
            needed="rope_theta, at the top level or in rope_parameters (never guessed: a wrong one reads fine)",
            do="take the value from the model's own repository and add it to config.json",
        )
    scaling = nested or legacy
    partial = scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise UnsupportedModelError(
            "partial rotary embedding is not supported",
            found=f"partial_rotary_factor {partial!r}",
            needed="1, or none",
        )
    return _scaled(bases.pop(), str(scaling.get("rope_type", scaling.get("type", "default"))), scaling)


def _scaled(base: float, kind: str, scaling: Mapping[str, Any]) -> Rope:
    if not 0 < base < float("inf"):
        raise ModelFileError("the rope base is not usable", found=base, needed="a positive number")
    if kind in ("default", "none"):
        return Rope(base)
    if kind == "linear":
        return Rope(base, linear_factor=_positive(scaling, "factor"))
    if kind == "llama3":
        rule = Llama3Scaling(
            _positive(scaling, "factor"),
            _positive(scaling, "low_freq_factor"),
            _positive(scaling, "high_freq_factor"),
            int(_positive(scaling, "original_max_position_embeddings")),
        )
        return Rope(base, llama3=rule)
    raise UnsupportedModelError(
        "this rope scaling is not supported",
        found=kind,
        needed="default, linear or llama3",
        do="use a model without it, or one converted with llama3 or linear scaling",
    )


def _positive(raw: Mapping[str, Any], key: str) -> float:
    value = _number(raw, key)
    if not 0 < value < float("inf"):
        raise ModelFileError(f"the rope parameter {key} is not usable", found=value, needed="a positive number")
    return value


def _number(raw: Mapping[str, Any], key: str) -> float:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > sys.float_info.max:
        raise ModelFileError(f"the model's configuration lacks {key}", found=f"{value!r:.80}", needed="a number")
    return float(value)


def _boolean(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key, False)
    if not isinstance(value, bool):
        raise ModelFileError(
            f"the model's configuration has an unusable {key}", found=repr(value), needed="true or false"
        )
    return value


def _mapping(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = raw.get(key) or {}
    if not isinstance(value, Mapping):
        raise ModelFileError(
            f"the model's configuration has an unusable {key}", found=f"{value!r:.120}", needed="an object"
        )
    return value


def _integer(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelFileError(f"the model's configuration lacks {key}", found=repr(value), needed="an integer")
    return value
