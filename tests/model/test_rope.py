"""Rotary frequencies against transformers' own initialisation: a wrong base or scaling reads fluently and is wrong."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from nanokit.kernels import reference
from nanokit.model.config import config_from_transformers
from nanokit.model.rope import Rope

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip


@pytest.mark.parametrize(
    "rope",
    [{"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}, LLAMA3],
    ids=lambda r: r["rope_type"],
)
def test_cos_and_sin_equal_transformers(rope: dict) -> None:
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, head_dim=64, rope_parameters={"rope_theta": 5e5, **rope}
    )
    ours = config_from_transformers(config.to_dict()).rope.inverse_frequencies(64)
    positions = torch.tensor([[0, 1, 17, 500, 8191, 131071]])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    angles = positions[0].float()[:, None] * ours
    assert torch.equal(angles.cos(), cos[0, :, :32])
    assert torch.equal(angles.sin(), sin[0, :, :32])


def test_llama3_scaling_as_a_tensor_equals_the_rule() -> None:
    """llama.cpp stores llama3 scaling as divisors in rope_freqs.weight and says nothing in the metadata."""
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters={"rope_theta": 5e5, **LLAMA3})
    rule = config_from_transformers(config.to_dict()).rope
    plain = Rope(rule.base).inverse_frequencies(64)
    factors = tuple((plain / rule.inverse_frequencies(64)).tolist())
    torch.testing.assert_close(
        Rope(rule.base, frequency_factors=factors).inverse_frequencies(64),
        rule.inverse_frequencies(64),
        rtol=1e-6,
        atol=0,
    )


def test_rotation_keeps_relative_position() -> None:
    """q at m and k at n must meet as if at m - n: fails for a rotation with the wrong sign or pairing."""
    q, k = torch.randn(1, 1, 16, dtype=torch.float64), torch.randn(1, 1, 16, dtype=torch.float64)
    inverse = Rope(10000.0).inverse_frequencies(16).double()

    def turned(x: torch.Tensor, position: int) -> torch.Tensor:
        angle = position * inverse[None]
        return reference.rotate(x, angle.cos(), angle.sin())

    far = (turned(q, 107) * turned(k, 100)).sum()
    near = (turned(q, 7) * turned(k, 0)).sum()
    torch.testing.assert_close(far, near)
