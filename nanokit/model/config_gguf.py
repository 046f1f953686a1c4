"""The model configuration out of GGUF metadata.

Keys are `{architecture}.…`; integers must be integers and numbers numbers, since files in the wild carry a rope base
as a string or a head count that contradicts the tensors. What the shapes of the tensors say wins nothing here: a
contradiction is an error when the weights are read.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from nanokit.errors import ModelFileError, UnsupportedModelError
from nanokit.model.config import ModelConfig, check_architecture
from nanokit.model.rope import Rope


def config_from_gguf(
    metadata: Mapping[str, Any],
    *,
    vocab_size: int,
    tied_head: bool,
    frequency_factors: Sequence[float] | None = None,
    rope_base: float | None = None,
) -> ModelConfig:
    """metadata: as `GGUFFile.metadata`; vocab_size: rows of token_embd.weight; tied_head: no output.weight;
    frequency_factors: the tensor rope_freqs.weight, if the file has one; rope_base: what the caller vouches for where
    the file states none. Raises ModelFileError."""
    arch = check_architecture(metadata.get("general.architecture"))
    keys = _Keys(metadata, arch)
    if keys.get("expert_count", 0):
        raise UnsupportedModelError(
            "mixture-of-experts models are not supported",
            found=f"{arch}.expert_count",
            needed="a dense model",
        )
    if keys.get("attention.sliding_window", 0):
        raise UnsupportedModelError(
            "sliding-window attention is not supported",
            found=f"{arch}.attention.sliding_window",
            needed="every layer with full attention",
        )
    if not keys.get("attention.causal", True):
        raise UnsupportedModelError(
            "the model is no language model: its attention looks ahead",
            found=f"{arch}.attention.causal = False",
            needed="causal attention",
        )
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", hidden // max(heads, 1))
    for name in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(name, head_dim) != head_dim:
            raise ModelFileError(
                f"{arch}.{name} differs from the head size", found=keys.get(name), needed=str(head_dim)
            )
    return ModelConfig(
        architecture=arch,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=keys.integer("feed_forward_length"),
        num_layers=keys.integer("block_count"),
        num_heads=heads,
        num_kv_heads=keys.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_context=keys.integer("context_length"),
        rms_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(keys, head_dim, frequency_factors, rope_base),
        tied_head=tied_head,
    )


class _Keys:
    """The `{architecture}.` keys of one file, read by type."""

    def __init__(self, metadata: Mapping[str, Any], arch: str) -> None:
        self._metadata, self._arch = metadata, arch

    def get(self, name: str, default: object = None) -> Any:
        return self._metadata.get(f"{self._arch}.{name}", default)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if isinstance(value, Sequence) and not isinstance(value, str) and len(set(value)) == 1:
            value = value[0]  # one value a layer, all the same
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, value, "an integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, value, "a number")
        return float(value)

    def _wrong(self, name: str, value: object, needed: str) -> ModelFileError:
        missing = value is None
        return ModelFileError(
            f"the GGUF key {self._arch}.{name} is {'missing' if missing else 'not usable'}",
            found="no such key" if missing else f"{type(value).__name__} {value!r}"[:120],
            needed=needed,
            do="convert the model again from its source; the kit guesses no model parameter",
        )


def _rope(keys: _Keys, head_dim: int, frequency_factors: Sequence[float] | None, rope_base: float | None) -> Rope:
    base = keys.number("rope.freq_base", rope_base)
    if not 0 < base < float("inf"):
        raise ModelFileError("the rope base is not usable", found=base, needed="a positive number")
    kind = keys.get("rope.scaling.type", "none")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    if kind not in ("none", "linear"):
        raise UnsupportedModelError(
            "this rope scaling is not supported",
            found=kind,
            needed="none, linear, or llama3 scaling as the tensor rope_freqs.weight",
        )
    if keys.get("rope.scaling.type") == "none" and factor != 1.0:
        raise ModelFileError(
            "rope scaling contradicts itself",
            found=f"type none, factor {factor:g}",
            needed="type linear, or no factor",
        )
    if not 0 < factor < float("inf"):
        raise ModelFileError("the rope scaling factor is not usable", found=factor, needed="a positive number")
    if frequency_factors is None:
        return Rope(base, linear_factor=factor)
    factors = tuple(frequency_factors)
    if len(factors) != head_dim // 2 or not all(0 < f < float("inf") for f in factors):
        raise ModelFileError(
            "the tensor rope_freqs.weight is not usable",
            found=f"{len(factors)} values from {min(factors, default=0):g} to {max(factors, default=0):g}",
            needed=f"{head_dim // 2} positive numbers",
        )
    return Rope(base, linear_factor=factor, frequency_factors=factors)
