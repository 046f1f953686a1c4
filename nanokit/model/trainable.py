"""The transformer as a torch module whose weights can train: the reference forward with gradients.

Layers carry the names that transformers gives them (layers.3.self_attn.q_proj), so that `quant.prepare`, peft and a
policy find them. A whole batch of equally long texts at a time, no cache: this is for training, the engine is for
running. Norms, embedding and head are constants: quantizing changes the layers' matrices, and so does training here.

Rejected: the class of transformers (another reading of the same file to keep in step, and its attention masks are built
anew in every pass), and gradients through `kernels.reference` (its pages are written in place).
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, scaled_dot_product_attention

from nanokit.errors import ModelFileError
from nanokit.kernels.reference import rms_norm, silu_gate
from nanokit.model.config import ModelConfig
from nanokit.model.weights import LayerWeights, Linear, Matrix, Weights


class Attention(nn.Module):
    """q, k, v and o of a layer; norms of heads where the architecture has them."""

    def __init__(self, config: ModelConfig, weights: LayerWeights) -> None:
        super().__init__()
        self._config = config
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            _linear(each) for each in (weights.q, weights.k, weights.v, weights.o)
        )
        self.register_buffer("q_norm", _vector(weights.q_norm))
        self.register_buffer("k_norm", _vector(weights.k_norm))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c = self._config
        q, k, v = (
            layer(x).float().unflatten(-1, (heads, c.head_dim)).transpose(1, 2)
            for layer, heads in (
                (self.q_proj, c.num_heads), (self.k_proj, c.num_kv_heads), (self.v_proj, c.num_kv_heads)
            )
        )  # fmt: skip
        if self.q_norm is not None and self.k_norm is not None:
            q, k = rms_norm(q, self.q_norm, c.rms_eps), rms_norm(k, self.k_norm, c.rms_eps)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        repeat = c.num_heads // c.num_kv_heads
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """gate, up and down of a layer."""

    def __init__(self, weights: LayerWeights) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            _linear(each) for each in (weights.gate, weights.up, weights.down)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu_gate(self.gate_proj(x), self.up_proj(x)))


class Layer(nn.Module):
    """A transformer layer; the stream between layers is fp32 whatever the products are."""

    def __init__(self, config: ModelConfig, weights: LayerWeights) -> None:
        super().__init__()
        self._eps = config.rms_eps
        self.self_attn, self.mlp = Attention(config, weights), FeedForward(weights)
        self.register_buffer("attn_norm", weights.attn_norm.dense())
        self.register_buffer("ffn_norm", weights.ffn_norm.dense())

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(rms_norm(x, self.attn_norm, self._eps), cos, sin)
        return x + self.mlp(rms_norm(x, self.ffn_norm, self._eps))


class TrainableModel(nn.Module):
    """config and weights as `find_weights` gives them; the matrices are read, in fp32. Raises ModelFileError for a head
    with a bias.

    head: fp32 [vocab_size, hidden_size], the embedding itself in tied models.
    """

    embedding: Tensor
    head: Tensor
    final_norm: Tensor

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__()
        if weights.head is not None and weights.head.bias is not None:
            raise ModelFileError(
                f"{weights.head.bias.name} is a bias of the head, which this module does not have",
                do="run the model in the engine instead, which has one",
            )
        self.config = config
        self.layers = nn.ModuleList(Layer(config, each) for each in weights.layers)
        self.register_buffer("embedding", weights.embedding.dense())
        self.register_buffer("head", self.embedding if weights.head is None else weights.head.weight.dense())
        self.register_buffer("final_norm", weights.final_norm.dense())

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [texts, tokens] to the hidden states that the head takes, fp32 [texts, tokens, hidden_size]."""
        angles = torch.arange(ids.shape[1]).outer(self.config.rope.inverse_frequencies(self.config.head_dim))
        cos, sin = angles.cos().to(ids.device), angles.sin().to(ids.device)
        x = embedding(ids, self.embedding)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return rms_norm(x, self.final_norm, self.config.rms_eps)

    def logits(self, ids: list[int]) -> Tensor:
        """After every token of one text: fp32 [len(ids), vocab_size]; without gradient."""
        with torch.no_grad():
            hidden = self(torch.tensor([ids], device=self.embedding.device))[0]
            return hidden @ self.head.T


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [texts, heads, tokens, d], pairs (i, i + d/2); cos, sin [tokens, d/2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _linear(found: Linear) -> nn.Linear:
    rows, columns = found.weight.shape
    made = nn.Linear(columns, rows, bias=False, device="meta")
    made.weight = nn.Parameter(found.weight.dense())
    if found.bias is not None:
        made.bias = nn.Parameter(found.bias.dense(), requires_grad=False)
    return made


def _vector(found: Matrix | None) -> Tensor | None:
    return None if found is None else found.dense()
