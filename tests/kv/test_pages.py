"""KV pages: their bytes, addresses and alignment, and what int8 and int4 pages keep."""

from itertools import pairwise
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings

from nanokit.errors import ParameterError
from nanokit.kernels.paged import LayerPages, read_kv, write_kv
from nanokit.kv.pages import BLOCK_SIZE, DTYPES, PagedKV, PoolBytes
from nanokit.model.batch import Batch

SHAPE = SimpleNamespace(num_layers=2, num_kv_heads=3, head_dim=16)
FORMATS = list(DTYPES)
QUANTIZED = {"int8": 127, "int4": 7}  # the codes of a peak
SCALED = ("int8", "int8-static", "int4")


def slots_of(blocks: list[int], positions: range) -> torch.Tensor:
    return torch.tensor([blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in positions])


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_pages_give_back_what_was_written(data: st.DataObject) -> None:
    """A wrong block, lane or group in the layout arithmetic would return another token's key, value or scale."""
    kv_format = data.draw(st.sampled_from(FORMATS))
    kv_len = data.draw(st.integers(1, 3 * BLOCK_SIZE))
    needed = -(-kv_len // BLOCK_SIZE)
    blocks = data.draw(st.permutations(range(5)))[:needed]
    pages = PagedKV(SHAPE, 5, kv_format).layer(1)
    peak = 7 if kv_format == "int4" else 127
    k, v = (torch.randint(-peak, peak + 1, (kv_len, 3, 16)).float() for _ in range(2))
    k[..., 7], v[..., 2] = peak, -peak  # then whole numbers are stored exactly by all formats
    k, v = k * 2.0 ** torch.randint(-6, 3, (kv_len, 3, 1)), v * 2.0 ** torch.randint(-6, 3, (kv_len, 3, 1))
    start = 0
    while start < kv_len:  # in chunks, as prefill and decode write
        end = min(kv_len, start + data.draw(st.integers(1, kv_len)))
        write_kv(pages, slots_of(blocks, range(start, end)), k[start:end], v[start:end])
        start = end
    got_k, got_v = read_kv(pages, torch.tensor(blocks), kv_len)
    assert torch.equal(got_k.transpose(0, 1), k)
    assert torch.equal(got_v.transpose(0, 1), v)


def stored(pages: LayerPages, block: int, position: int, is_key: bool) -> np.ndarray:
    """The codes [3, 16] of one token, found in the bytes as nanokit/kv/pages.py draws them."""
    group, lane = position // 16, position % 16
    if pages.keys.dtype == torch.int8:
        return (pages.keys[block, :, group, :, lane] if is_key else pages.values[block, :, group, lane]).numpy()
    if is_key:
        packed = pages.keys[block, :, group, :, lane % 8].numpy()
        return (packed % 16 if lane < 8 else packed // 16).astype(int) - 8
    packed = pages.values[block, :, group, lane].numpy()
    return np.concatenate((packed % 16, packed // 16), axis=-1).astype(int) - 8


@pytest.mark.parametrize(("kv_format", "limit"), QUANTIZED.items())
def test_quantized_pages_follow_the_formula_in_numpy(kv_format: str, limit: int) -> None:
    """Scale = peak / limit of one head of one token, codes to nearest even; and where in the pages they lie."""
    random = np.random.default_rng(0)
    k, v = (random.standard_normal((70, 3, 16), np.float32) * 10.0 ** random.integers(-9, 9, (70, 3, 1)) for _ in "kv")
    k[3], k[4, 1], v[5, 2] = 0.0, -0.0, 3e38
    k, v = k.astype(np.float32), v.astype(np.float32)
    pages = PagedKV(SHAPE, 3, kv_format).layer(0)
    blocks = [2, 0]
    write_kv(pages, slots_of(blocks, range(70)), torch.from_numpy(k), torch.from_numpy(v))
    for x, scales, is_key in ((k, pages.key_scales, True), (v, pages.value_scales, False)):
        peak = np.abs(x).max(-1)
        with np.errstate(divide="ignore"):
            inverse = np.where(peak > 0, np.float32(limit) / peak, np.float32(0)).astype(np.float32)
        expected = np.rint(x * inverse[..., None])
        for t in range(70):
            assert np.array_equal(stored(pages, blocks[t // 64], t % 64, is_key), expected[t]), t
            assert np.array_equal(scales[blocks[t // 64], :, t % 64].numpy(), peak[t] / np.float32(limit)), t


@given(st.lists(st.integers(0, 2 * BLOCK_SIZE - 1), min_size=1, max_size=40, unique=True), st.data())
@settings(max_examples=40, deadline=None)
def test_tokens_that_share_bytes_leave_each_other_alone(slots: list[int], data: st.DataObject) -> None:
    """Tokens j and j + 8 of an int4 page, in one write or in two, in any order, over what was there before."""
    pages = PagedKV(SHAPE, 2, "int4").layer(0)
    everything = torch.arange(2 * BLOCK_SIZE)
    old = torch.randint(-7, 8, (2 * BLOCK_SIZE, 3, 16)).float()
    new = torch.randint(-7, 8, (2 * BLOCK_SIZE, 3, 16)).float()
    old[..., 0] = new[..., 0] = 7.0
    write_kv(pages, everything, old, -old)
    cut = data.draw(st.integers(0, len(slots)))
    for part in (slots[:cut], slots[cut:]):
        write_kv(pages, torch.tensor(part, dtype=torch.int64), new[part], -new[part])
    old[slots] = new[slots]
    k, v = read_kv(pages, torch.arange(2), 2 * BLOCK_SIZE)
    assert torch.equal(k.transpose(0, 1), old)
    assert torch.equal(v.transpose(0, 1), -old)


@pytest.mark.parametrize("kv_format", QUANTIZED)
def test_a_rewritten_slot_forgets_its_scale(kv_format: str) -> None:
    """A block that is used again: a large token replaced by a small one keeps all bits of the small one."""
    pages = PagedKV(SHAPE, 1, kv_format).layer(0)
    slot, small = torch.tensor([5]), torch.full((1, 3, 16), 1e-3)
    write_kv(pages, slot, small * 1e6, small * 1e6)
    write_kv(pages, slot, small, small)
    k, _ = read_kv(pages, torch.tensor([0]), 6)
    torch.testing.assert_close(k[:, 5], small[0])
    assert not k[:, :5].any()


@pytest.mark.parametrize("kv_format", QUANTIZED)
def test_a_number_that_is_not_finite_is_not_hidden(kv_format: str) -> None:
    """Codes cannot hold it; a finite page would turn a diverged forward into a plausible answer."""
    pages = PagedKV(SHAPE, 1, kv_format).layer(0)
    k = torch.zeros(2, 3, 16)
    k[0, 0, 0], k[1, 1, 4] = torch.inf, torch.nan
    write_kv(pages, torch.tensor([0, 1]), k, k)
    for got in read_kv(pages, torch.tensor([0]), 2):
        finite = got.isfinite().all(-1)
        assert finite.tolist() == [[False, True], [True, False], [True, True]]


@pytest.mark.parametrize("kv_format", FORMATS)
def test_bytes_per_block_are_the_bytes_allocated(kv_format: str) -> None:
    """The memory check refuses or admits by this number, the scales included."""
    pages = PagedKV(SHAPE, 7, kv_format)
    tensors = tensors_of(pages, 2)
    opened = 0
    if kv_format == "kivi4":
        opened = sum(tensor.nbytes for index in range(2) for tensor in pages.layer(index)[:2])
    assert PagedKV.bytes_per_block(SHAPE, kv_format) * 7 == sum(tensor.nbytes for tensor in tensors) - opened
    assert len(tensors) == (8 if kv_format in SCALED else 6 if opened else 4)
    sizes = PagedKV.pool_bytes(SHAPE, kv_format, 1, 0)
    assert (sizes.of(7) - sizes.of(6) == sizes.per_block) == (sizes.open_blocks < 7)
    assert sizes.of(4) == sum(tensor[:4].nbytes for tensor in tensors)


def tensors_of(pages: PagedKV, layers: int) -> list[torch.Tensor]:
    found = [(*pages.layer(index), pages.sealed(index)) for index in range(layers)]
    return [tensor for layer in found for tensor in layer if tensor is not None]


@given(st.sampled_from(FORMATS), st.integers(1, 5), st.integers(1, 9), st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_every_block_is_aligned_and_no_two_tensors_meet(kv_format: str, blocks: int, heads: int, half: int) -> None:
    """Kernels load whole vectors at these addresses; an overlap would mix layers."""
    dim = {"int4": 4, "kivi4": 16}.get(kv_format, 2) * half
    pages = PagedKV(SimpleNamespace(num_layers=3, num_kv_heads=heads, head_dim=dim), blocks, kv_format)
    spans = []
    for tensor in tensors_of(pages, 3):
        assert tensor.data_ptr() % 64 == 0
        assert tensor.stride(0) * tensor.itemsize % 128 == 0
        assert tensor.is_contiguous() or kv_format == "kivi4"  # the open pages of a block lie together
        for block in tensor:
            assert block.is_contiguous()
            assert block.nbytes % 128 == 0
            spans.append((block.data_ptr(), block.data_ptr() + block.nbytes))
        assert not tensor.any()
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


@pytest.mark.parametrize("kv_format", FORMATS)
def test_addresses_are_those_of_the_tensors(kv_format: str) -> None:
    pages = PagedKV(SHAPE, 2, kv_format)
    found = pages.addresses()
    for name in ("keys", "values", "key_scales", "value_scales", "sealed"):
        column = getattr(found, name)
        assert column.dtype == np.int64
        assert column.flags.c_contiguous
        tensors = [pages.sealed(i) if name == "sealed" else getattr(pages.layer(i), name) for i in range(2)]
        assert column.tolist() == [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


@pytest.mark.parametrize("kv_format", FORMATS)
def test_pages_elsewhere_are_the_same_and_have_no_addresses(kv_format: str) -> None:
    """C that was given a GPU's address would crash; a tensor of another shape or place would do so on the GPU."""
    here, there = PagedKV(SHAPE, 3, kv_format), PagedKV(SHAPE, 3, kv_format, device="meta")
    for index in range(2):
        for a, b in zip(here.layer(index), there.layer(index), strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert (b.device.type, b.shape, b.stride(), b.dtype) == ("meta", a.shape, a.stride(), a.dtype)
    with pytest.raises(ParameterError, match=r"(?s)addresses.*meta"):
        there.addresses()


@pytest.mark.parametrize("kv_format", FORMATS)
def test_an_unused_pool_takes_no_memory(kv_format: str) -> None:
    """A pool of a gigabyte beside a model of a hundred megabytes: its first token may not cost more than its page."""
    shape = SimpleNamespace(num_layers=30, num_kv_heads=3, head_dim=64)
    blocks = (1 << 30) // PagedKV.bytes_per_block(shape, kv_format)
    before = psutil.Process().memory_info().rss
    pages = PagedKV(shape, blocks, kv_format)
    for index in range(30):
        write_kv(pages.layer(index), torch.tensor([0]), torch.ones(1, 3, 64), torch.ones(1, 3, 64))
    assert psutil.Process().memory_info().rss - before < 24 << 20


def test_unknown_formats_and_odd_blocks_are_refused() -> None:
    with pytest.raises(ParameterError, match=r"(?s)bf16.*fp32, fp16, int8, int8-static, int4, kivi4"):
        PagedKV(SHAPE, 1, "bf16")
    with pytest.raises(ParameterError, match=r"(?s)int8.*1 KV heads of 5: 320 bytes.*128"):
        PagedKV(SimpleNamespace(num_layers=1, num_kv_heads=1, head_dim=5), 1, "int8")
    with pytest.raises(ParameterError, match=r"(?s)int4 codes share.*heads of 5"):
        PagedKV(SimpleNamespace(num_layers=1, num_kv_heads=4, head_dim=5), 1, "int4")
    with pytest.raises(ParameterError, match=r"(?s)kivi4.*heads of 8.*multiple of 16"):
        PagedKV(SimpleNamespace(num_layers=1, num_kv_heads=4, head_dim=8), 1, "kivi4")


def test_static_scales_are_those_given_and_clip() -> None:
    """A scale of another head, layer or of values would show only as a worse answer; so would one of the token's own.
    Not finite numbers are no less visible than elsewhere."""
    pages = PagedKV(SHAPE, 2, "int8-static")
    peaks = torch.tensor([[[1.0, 2, 4], [8, 16, 32]], [[0.5, 0.25, 3], [5, 6, 7]]])
    with pytest.raises(ParameterError, match="not been calibrated"):
        pages.begin_step(Batch([0], [1], [1], [[0]]))
    for wrong, said in ((peaks[:1], "2, 2, 3"), (peaks * torch.inf, "inf"), (peaks - 3, "layer 0, keys of head 0")):
        with pytest.raises(ParameterError, match=said):
            pages.calibrate(wrong)
    with pytest.raises(ParameterError, match=r'(?s)layer 1, values of head 2.*found: 0\.0.*kv_format="int8"'):
        pages.calibrate(peaks - 7 * (peaks == 7))  # a head whose values are zero in every text
    with pytest.raises(ParameterError, match="only int8-static"):
        PagedKV(SHAPE, 1, "int8").calibrate(peaks)
    pages.calibrate(peaks)
    assert pages.begin_step(Batch([0], [1], [1], [[0]])) == []
    k, v = 3 * torch.randn(2, 70, 3, 16)
    k[5, 1, 0], v[6, 2, 3] = torch.inf, torch.nan
    for layer in range(2):
        write_kv(pages.layer(layer), slots_of([1, 0], range(70)), k, v, pages.peaks(layer))
        for got, wanted, peak in zip(
            read_kv(pages.layer(layer), torch.tensor([1, 0]), 70), (k, v), peaks[layer], strict=True
        ):
            got, ends = got.transpose(0, 1), peak[:, None]
            broken = ~wanted.isfinite().all(-1)
            assert torch.equal(~got.isfinite().all(-1), broken)
            error = (got - wanted.clamp(-ends, ends))[~broken].abs() / ends.expand(70, 3, 1)[~broken]
            assert error.max() <= 0.5001 / 127
            assert error.max() > 0.49 / 127


def test_kv_bytes_are_divided_into_blocks_as_they_are_summed() -> None:
    """kv_memory becomes blocks and the memory check sums them up again: no block more or less than fits."""
    for sizes in (PoolBytes(10, 0, 0), PoolBytes(10, 32, 3), PoolBytes(7, 32, 1)):
        for nbytes in range(300):
            blocks = sizes.blocks_in(nbytes)
            assert sizes.of(blocks) <= nbytes < sizes.of(blocks + 1)
