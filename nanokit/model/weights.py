"""The weights of a model under their own names, and where each file format keeps them.

Finding comes before reading: every name and shape is compared with the configuration while only the file's header
has been looked at, so that a wrong file is refused in milliseconds. The matrices themselves are read by the backend
that binds them, which knows whether it wants them in fp32, packed, or again for every use.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from nanokit.errors import ModelFileError, UnsupportedModelError
from nanokit.model.config import ModelConfig
from nanokit.quant.qtensor import Coding, QTensor

# our name -> (GGUF name, transformers name); layer names get the prefix blk.{i}. or model.layers.{i}.
GLOBAL_NAMES = {
    "embedding": ("token_embd", "model.embed_tokens"),
    "final_norm": ("output_norm", "model.norm"),
    "head": ("output", "lm_head"),
}
LAYER_NAMES = {
    "attn_norm": ("attn_norm", "input_layernorm"),
    "q": ("attn_q", "self_attn.q_proj"),
    "k": ("attn_k", "self_attn.k_proj"),
    "v": ("attn_v", "self_attn.v_proj"),
    "o": ("attn_output", "self_attn.o_proj"),
    "q_norm": ("attn_q_norm", "self_attn.q_norm"),
    "k_norm": ("attn_k_norm", "self_attn.k_norm"),
    "ffn_norm": ("ffn_norm", "post_attention_layernorm"),
    "gate": ("ffn_gate", "mlp.gate_proj"),
    "up": ("ffn_up", "mlp.up_proj"),
    "down": ("ffn_down", "mlp.down_proj"),
}


@dataclass(frozen=True)
class Matrix:
    """A weight that has been found and not been read. shape: rows, columns (a vector has one length)."""

    name: str
    shape: tuple[int, ...]
    source: "TensorSource" = field(repr=False)

    @property
    def type(self) -> str:
        """What it is stored as, by the format's own name: "Q4_1", "F32", "int4-sym-g64"."""
        return self.source.stored[self.name].type

    @property
    def coding(self) -> Coding | None:
        """What `quantized` will give, None where it gives nothing."""
        return self.source.stored[self.name].coding

    def dense(self) -> Tensor:
        """Read it, in fp32. Raises ModelFileError when it holds infinities or NaN."""
        return self.source.tensor(self.name)

    def quantized(self, first: int = 0, end: int | None = None) -> QTensor | None:
        """Read it, or the rows first … end - 1 of it, as codes, scales and minimums, nothing rounded again; None where
        it is stored without them. Raises ModelFileError as `dense` does."""
        return self.source.quantized(self.name, first, self.shape[0] if end is None else end)


class Linear(NamedTuple):
    """weight [out, in]; bias [out] or None."""

    weight: Matrix
    bias: Matrix | None


@dataclass(frozen=True)
class LayerWeights:
    """One transformer layer; q_norm and k_norm [head_dim] where the architecture has them."""

    attn_norm: Matrix
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    q_norm: Matrix | None
    k_norm: Matrix | None
    ffn_norm: Matrix
    gate: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True)
class Weights:
    """embedding [vocab_size, hidden_size]; head is None in tied models, whose head is the embedding."""

    embedding: Matrix
    layers: list[LayerWeights]
    final_norm: Matrix
    head: Linear | None


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its shape, the bytes that it takes there, and what they are ("Q4_1", "F32", "int4-sym-g64").
    coding: of its codes, None where it is stored without any."""

    shape: tuple[int, ...]
    nbytes: int
    type: str
    coding: Coding | None = None


class TensorSource(Protocol):
    """A model file, asked for tensors by the file format's own names."""

    kind: int  # 0: GGUF names, 1: transformers names

    @property
    def stored(self) -> Mapping[str, Stored]:
        """Every tensor in the file."""
        ...

    def tensor(self, name: str) -> Tensor:
        """The tensor in fp32, rows and columns as torch has them. Raises ModelFileError unless all of it is finite."""
        ...

    def quantized(self, name: str, first: int, end: int) -> QTensor | None:
        """The rows first … end - 1 of `tensor` as codes; None where it is stored without them."""
        ...


def find_weights(config: ModelConfig, source: TensorSource) -> Weights:
    """Find, check and name every weight. Raises ModelFileError for one that is missing, left over or misshapen: a
    tensor that nobody asked for means that the forward would not be the model's."""
    finder = _Finder(config, source)
    layers = [finder.layer(index) for index in range(config.num_layers)]
    shape = (config.vocab_size, config.hidden_size)
    embedding = finder.find(finder.name("embedding", None) + ".weight", shape)
    if config.tied_head:
        finder.check_tied(embedding)
    head = None if config.tied_head else finder.linear("head", *shape)
    weights = Weights(embedding, layers, finder.vector("final_norm", config.hidden_size), head)
    finder.refuse_left_over()
    return weights


class _Finder:
    def __init__(self, config: ModelConfig, source: TensorSource) -> None:
        self._config, self._source = config, source
        self._unfound = set(source.stored)

    def layer(self, index: int) -> LayerWeights:
        c, at = self._config, index
        q_out, kv_out = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        has_head_norms = c.architecture == "qwen3"
        return LayerWeights(
            attn_norm=self.vector("attn_norm", c.hidden_size, at),
            q=self.linear("q", q_out, c.hidden_size, at),
            k=self.linear("k", kv_out, c.hidden_size, at),
            v=self.linear("v", kv_out, c.hidden_size, at),
            o=self.linear("o", c.hidden_size, q_out, at),
            q_norm=self.vector("q_norm", c.head_dim, at) if has_head_norms else None,
            k_norm=self.vector("k_norm", c.head_dim, at) if has_head_norms else None,
            ffn_norm=self.vector("ffn_norm", c.hidden_size, at),
            gate=self.linear("gate", c.intermediate_size, c.hidden_size, at),
            up=self.linear("up", c.intermediate_size, c.hidden_size, at),
            down=self.linear("down", c.hidden_size, c.intermediate_size, at),
        )

    def vector(self, name: str, length: int, layer: int | None = None) -> Matrix:
        return self.find(self.name(name, layer) + ".weight", (length,))

    def check_tied(self, embedding: Matrix) -> None:
        """No head of its own. One that stands in the file all the same must be the embedding: which of two is meant
        is not ours to guess (transformers 4 takes the embedding, transformers 5 the head)."""
        name = self.name("head", None) + ".weight"
        if name not in self._unfound:
            return
        if not torch.equal(self.find(name, embedding.shape).dense(), embedding.dense()):
            raise ModelFileError(
                f"{name} is not the embedding, although the configuration says that they are tied",
                found="different values",
                needed="equal ones, or tie_word_embeddings: false",
                do="correct tie_word_embeddings in config.json as the model's authors meant it",
            )

    def linear(self, name: str, rows: int, columns: int, layer: int | None = None) -> Linear:
        base = self.name(name, layer)
        weight = self.find(base + ".weight", (rows, columns))
        needs_bias = name in ("q", "k", "v") and self._config.architecture == "qwen2"
        has_bias = base + ".bias" in self._unfound
        return Linear(weight, self.find(base + ".bias", (rows,)) if needs_bias or has_bias else None)

    def name(self, name: str, layer: int | None) -> str:
        kind = self._source.kind
        if layer is None:
            return GLOBAL_NAMES[name][kind]
        return (f"blk.{layer}.", f"model.layers.{layer}.")[kind] + LAYER_NAMES[name][kind]

    def find(self, name: str, shape: tuple[int, ...]) -> Matrix:
        if name not in self._unfound:
            raise ModelFileError(
                f"the tensor {name} is missing",
                found=f"{len(self._source.stored)} other tensors",
                needed=f"shape {list(shape)}",
                do="the file is incomplete or of another architecture: download or convert it again",
            )
        self._unfound.discard(name)
        found = self._source.stored[name].shape
        if found != shape:
            raise ModelFileError(
                f"the tensor {name} has the wrong shape",
                found=list(found),
                needed=list(shape),
                do="the file's metadata and its tensors contradict each other: convert the model again",
            )
        return Matrix(name, shape, self._source)

    def refuse_left_over(self) -> None:
        left = sorted(n for n in self._unfound if not n.endswith(("rotary_emb.inv_freq", "rope_freqs.weight")))
        if left:
            parts = ("blk.", "model.layers.", *(names[self._source.kind] for names in GLOBAL_NAMES.values()))
            kind = ModelFileError if any(name.startswith(parts) for name in left) else UnsupportedModelError
            raise kind(
                "the file holds tensors that this architecture does not use",
                found=f"{len(left)}: " + ", ".join(left[:4]) + (" …" if len(left) > 4 else ""),
                needed=f"the tensors of {self._config.architecture} with {self._config.num_layers} layers",
                do="the architecture named in the file is not what its tensors are; the answers would be wrong",
            )
