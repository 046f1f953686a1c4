"""Sealed pages against an oracle written from the drawing, number by number in fp64: what a record holds, and where."""

import numpy as np
import pytest
import torch

from nanokit.kernels.kivi import LEVELS, read_kv, record_bytes, seal, unseal, value_group
from nanokit.kernels.paged import LayerPages

DIMS = (16, 32, 48, 64, 80, 96, 256)


def opened(dim: int, seed: int = 0) -> LayerPages:
    """Three open blocks of two heads, keys with dimensions that are large in every token."""
    noise = torch.Generator().manual_seed(seed + dim)
    keys = torch.randn(3, 2, 4, dim, 16, generator=noise)
    keys[:, :, :, 1::7] += 20 * torch.randn(3, 2, 1, keys[:, :, :, 1::7].shape[3], 1, generator=noise)
    return LayerPages(keys.half(), torch.randn(3, 2, 4, 16, dim, generator=noise).half(), None, None)


def token_key(pages: LayerPages, block: int, head: int, token: int, i: int) -> float:
    return float(pages.keys[block, head, token // 16, i, token % 16])


def token_value(pages: LayerPages, block: int, head: int, token: int, i: int) -> float:
    return float(pages.values[block, head, token // 16, token % 16, i])


def sealed_of(pages: LayerPages, dim: int, blocks: list[int]) -> torch.Tensor:
    records = torch.full((3, 2, record_bytes(dim, 64)), 77, dtype=torch.uint8)
    seal(pages, records, blocks)
    return records


@pytest.mark.parametrize("dim", DIMS)
def test_a_record_is_what_the_drawing_says(dim: int) -> None:
    """Every code is the nearest of its group's sixteen numbers, found in the bytes by the drawing's arithmetic; blocks
    that are not sealed keep theirs."""
    pages = opened(dim)
    records = sealed_of(pages, dim, [2, 0])
    assert (records[1] == 77).all()
    group = 32 if dim % 32 == 0 else dim
    assert value_group(dim) == group
    assert record_bytes(dim, 64) == 64 * dim + 8 * dim + 4 * 64 * (dim // group)
    assert record_bytes(dim, 64) % 128 == 0
    k, v = (x.double().numpy() for x in unseal(records, dim, 64))
    draw = np.random.default_rng(dim)
    for block in (0, 2):
        for head in range(2):
            record = records[block, head].numpy()
            numbers = record.copy().view(np.float16)
            key_params, value_params = 32 * dim, 32 * dim + 4 * dim  # in fp16 numbers, behind 64 dim bytes of codes
            for token, i in zip(draw.integers(0, 64, 60), draw.integers(0, dim, 60), strict=True):
                fellows = [token_key(pages, block, head, t, i) for t in range(token // 32 * 32, token // 32 * 32 + 32)]
                scale, low = (float(numbers[key_params + (token // 32 * 2 + n) * dim + i]) for n in range(2))
                byte = record[(token // 16 * dim + i) * 8 + token % 8]
                code = byte >> 4 if token % 16 >= 8 else byte & 15
                check(code, scale, low, fellows, token_key(pages, block, head, token, i), k[block, head, token, i])
                start = i // group * group
                fellows = [token_value(pages, block, head, token, j) for j in range(start, start + group)]
                at = value_params + i // group * 2 * 64 + token
                scale, low = float(numbers[at]), float(numbers[at + 64])
                byte = record[32 * dim + token * (dim // 2) + i % (dim // 2)]
                code = byte >> 4 if i >= dim // 2 else byte & 15
                check(code, scale, low, fellows, token_value(pages, block, head, token, i), v[block, head, token, i])


def check(code: int, scale: float, low: float, fellows: list[float], number: float, read: float) -> None:
    assert low == min(fellows)
    assert scale == np.float16((max(fellows) - min(fellows)) / 15)
    assert read == np.float32(code * scale + low)
    nearest = min(abs(c * scale + low - number) for c in range(LEVELS + 1))
    assert abs(code * scale + low - number) <= nearest * (1 + 1e-5) + 1e-9


@pytest.mark.parametrize("dim", [32, 48])
def test_rows_see_their_own_page_as_it_was_written(dim: int) -> None:
    """And earlier ones sealed: gathered in the order of the table, cut at the context's end."""
    pages = opened(dim)
    records = sealed_of(pages, dim, [0, 1, 2])
    k, v = unseal(records, dim, 64)
    for kv_len in (1, 64, 65, 130, 192):
        table = [2, 0, 1][: -(-kv_len // 64)]
        got_k, got_v = read_kv(pages, records, torch.tensor(table), kv_len)
        assert got_k.shape == got_v.shape == (2, kv_len, dim)
        for token in range(0, kv_len, 13):
            block, place = table[token // 64], token % 64
            own = token // 64 == len(table) - 1
            for head in range(2):
                key = torch.tensor([token_key(pages, block, head, place, i) for i in range(dim)])
                value = torch.tensor([token_value(pages, block, head, place, i) for i in range(dim)])
                assert torch.equal(got_k[head, token], key if own else k[block, head, place])
                assert torch.equal(got_v[head, token], value if own else v[block, head, place])


def test_groups_without_spread_and_of_tiny_or_huge_numbers() -> None:
    """Equal numbers have no scale, and come back as they are; the ends of fp16 do not overflow; -0 is 0."""
    pages = opened(32)
    for number in (0.0, -0.0, 3.5, -65504.0, 6e-8):
        pages.keys.fill_(number)
        pages.values.fill_(number)
        for x in unseal(sealed_of(pages, 32, [0, 1, 2]), 32, 64):
            assert torch.equal(x, torch.full_like(x, float(torch.tensor(number).half())))
            assert not x.signbit().any() or number < 0
    pages.keys[:, :, :, :, ::2] = 65504.0
    pages.keys[:, :, :, :, 1::2] = -65504.0
    pages.values.copy_(6e-8 * torch.arange(32))
    k, v = unseal(sealed_of(pages, 32, [0, 1, 2]), 32, 64)
    assert (k - pages.keys.transpose(3, 4).flatten(2, 3).float()).abs().max() < 65504 * 2e-3
    assert (v - pages.values.flatten(2, 3).float()).abs().max() <= 6e-8 * 31 / 15


@pytest.mark.parametrize("broken", [torch.inf, -torch.inf, torch.nan])
def test_a_number_that_is_not_finite_is_not_hidden(broken: float) -> None:
    """Codes cannot hold it: its group is none, and every other group is what it was."""
    pages = opened(64)
    clean = unseal(sealed_of(pages, 64, [0, 1, 2]), 64, 64)
    pages.keys[1, 0, 2, 5, 3] = pages.values[2, 1, 0, 7, 40] = broken
    records = sealed_of(pages, 64, [0, 1, 2])
    k, v = unseal(records, 64, 64)
    numbers = records[1, 0].view(torch.float16)[32 * 64 :]
    assert numbers[2 * 64 + 5].isnan()
    assert numbers[3 * 64 + 5] == 0  # the minimum
    spoiled = torch.zeros_like(k, dtype=torch.bool)
    spoiled[1, 0, 32:, 5] = True
    assert torch.equal(k.isfinite(), ~spoiled)
    assert torch.equal(k[~spoiled], clean[0][~spoiled])
    spoiled = torch.zeros_like(v, dtype=torch.bool)
    spoiled[2, 1, 7, 32:] = True
    assert torch.equal(v.isfinite(), ~spoiled)
    assert torch.equal(v[~spoiled], clean[1][~spoiled])
