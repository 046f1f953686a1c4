"""The reference operations against fp64 and transformers; the page layout against a plain cache."""

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from nanokit.kernels import reference
from nanokit.kv.pages import BLOCK_SIZE, PagedKV


class Shape:
    num_layers, num_kv_heads, head_dim = 1, 3, 10


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_pages_give_back_what_was_written(data: st.DataObject) -> None:
    """A wrong block, lane or group in the layout arithmetic would return another token's key or value."""
    kv_len = data.draw(st.integers(1, 3 * BLOCK_SIZE))
    needed = -(-kv_len // BLOCK_SIZE)
    blocks = data.draw(st.permutations(range(5)))[:needed]
    pages = PagedKV(Shape, 5)
    keys, values = pages.layer(0)
    k, v = torch.randn(kv_len, 3, 10), torch.randn(kv_len, 3, 10)
    start = 0
    while start < kv_len:  # in chunks, as prefill and decode write
        end = min(kv_len, start + data.draw(st.integers(1, kv_len)))
        slots = torch.tensor([blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(start, end)])
        reference.write_kv(keys, values, slots, k[start:end], v[start:end])
        start = end
    got_k, got_v = reference.read_kv(keys, values, torch.tensor(blocks), kv_len)
    assert torch.equal(got_k.transpose(0, 1), k)
    assert torch.equal(got_v.transpose(0, 1), v)


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


def test_bytes_per_block_are_the_bytes_allocated() -> None:
    """The memory check refuses or admits by this number."""
    for kv_format in ("fp32", "fp16"):
        keys, values = PagedKV(Shape, 7, kv_format).layer(0)
        assert PagedKV.bytes_per_block(Shape, kv_format) * 7 == keys.nbytes + values.nbytes
