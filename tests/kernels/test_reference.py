"""The reference operations against fp64."""

import torch

from nanokit.kernels import reference


def test_attention_against_fp64() -> None:
    """Grouped heads, causal limits and a row that sees nothing, against the formula written out in fp64."""
    torch.manual_seed(0)
    q, k, v = torch.randn(5, 6, 8), torch.randn(2, 9, 8), torch.randn(2, 9, 8)
    visible = torch.tensor([9, 1, 0, 4, 7])
    got = reference.attention(q, k, v, visible)
    for row in range(5):
        for head in range(6):
            keys, values = (x[head // 3, : visible[row]].double() for x in (k, v))
            weight = torch.softmax(keys @ q[row, head].double() / 8**0.5, dim=0)
            expected = weight @ values if visible[row] else torch.zeros(8, dtype=torch.float64)
            torch.testing.assert_close(got[row, head].double(), expected, rtol=1e-5, atol=1e-6)


def test_rms_norm_and_gate_against_fp64() -> None:
    x, w, up = torch.randn(4, 12) * 30, torch.randn(12), torch.randn(4, 12)
    wide = x.double()
    norm = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w.double()
    torch.testing.assert_close(reference.rms_norm(x, w, 1e-5).double(), norm, rtol=1e-5, atol=1e-6)
    gate = wide / (1 + (-wide).exp()) * up.double()
    torch.testing.assert_close(reference.silu_gate(x, up).double(), gate, rtol=1e-5, atol=1e-6)
