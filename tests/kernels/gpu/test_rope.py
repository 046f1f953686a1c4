"""The GPU backend's rotation and page writes: queries and pages bit for bit those of the reference, head norms against
fp64."""

from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from nanokit.errors import ParameterError
from nanokit.kernels import reference
from nanokit.kernels.gpu.bound import PAGES
from nanokit.kernels.gpu.rope import rotate_and_store
from nanokit.kernels.gpu.runtime import device
from nanokit.kernels.paged import LayerPages, write_kv
from nanokit.kv.pages import BLOCK_SIZE, PagedKV

BLOCKS, EPS, U = 2, 1e-5, 2.0**-24
HEADS = [(3, 1, 16), (2, 2, 48), (4, 2, 64), (1, 1, 80)]
# the interpreter's numpy: what is no number, and what fp16 cannot hold
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")


class World:
    """Queries, keys, values and rotations of some rows, and pages in which every slot was used before."""

    def __init__(self, heads: tuple[int, int, int], kv_format: str, rows: int, seed: int) -> None:
        self.heads, self.kv_heads, self.dim = heads
        self.kv_format, self.generator = kv_format, torch.Generator().manual_seed(seed)
        self.q = self.noise(rows, self.heads, self.dim)
        self.k, self.v = (self.noise(rows, self.kv_heads, self.dim) for _ in "kv")
        angles = self.noise(rows, self.dim // 2) * 9
        self.cos, self.sin = angles.cos(), angles.sin()
        static = kv_format == "int8-static"  # some numbers are clipped
        self.peaks = 1.3 + torch.arange(2.0 * self.kv_heads).view(2, -1) / 8 if static else None
        self.old = [self.noise(BLOCKS * BLOCK_SIZE, self.kv_heads, self.dim) for _ in "kv"]

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def pages(self, where: torch.device | str) -> LayerPages:
        shape = SimpleNamespace(num_layers=1, num_kv_heads=self.kv_heads, head_dim=self.dim)
        pages = PagedKV(shape, BLOCKS, self.kv_format, where).layer(0)
        write_kv(pages, torch.arange(BLOCKS * BLOCK_SIZE, device=where), *(x.to(where) for x in self.old))
        return pages

    def run(
        self, slots: list[int], q: Tensor | None = None, q_norm: Tensor | None = None, k_norm: Tensor | None = None
    ) -> tuple[Tensor, LayerPages]:
        """Queries (q, or the world's) as the kernel leaves them, and the pages; k and v have to stay as they are."""
        there = device()
        pages = self.pages(there)
        inputs = [x.to(there, copy=True) for x in (self.q if q is None else q, self.k, self.v, self.cos, self.sin)]
        norms = [None if x is None else x.to(there) for x in (q_norm, k_norm)]
        peaks = None if self.peaks is None else self.peaks.to(there)
        rotate_and_store(*inputs, torch.tensor(slots, device=there), pages, *norms, EPS, peaks=peaks)
        assert np.array_equal(inputs[1].cpu().numpy(), self.k.numpy(), equal_nan=True)
        assert np.array_equal(inputs[2].cpu().numpy(), self.v.numpy(), equal_nan=True)
        return inputs[0].cpu(), pages

    def check_pages(self, pages: LayerPages, slots: list[int], k: Tensor) -> None:
        """These pages hold k (rotated) and v in those slots, and in all others what they held."""
        wanted = self.pages("cpu")
        write_kv(wanted, torch.tensor(slots), k, self.v, self.peaks)
        for name, mine, theirs in zip(LayerPages._fields, pages, wanted, strict=True):
            assert (mine is None) == (theirs is None)
            if theirs is not None:
                assert np.array_equal(mine.cpu().numpy(), theirs.numpy(), equal_nan=True), name


worlds = st.builds(World, st.sampled_from(HEADS), st.sampled_from(list(PAGES)), st.integers(1, 4), st.integers(0, 99))


def draw_slots(data: st.DataObject, rows: int) -> list[int]:
    """Often in one group of 16, where tokens share bytes of int4 pages."""
    places = st.sampled_from([*range(16), *range(16, BLOCKS * BLOCK_SIZE)])
    near = st.integers(48, 63)
    return data.draw(st.lists(st.one_of(near, places), min_size=rows, max_size=rows, unique=True))


@given(worlds, st.data())
@settings(max_examples=50, deadline=None)
def test_rotated_queries_and_pages_have_the_references_bits(world: World, data: st.DataObject) -> None:
    """A fused multiplication, halves exchanged, another row's angle, a wrong lane, nibble, head or block."""
    slots = draw_slots(data, len(world.q))
    q, pages = world.run(slots)
    assert torch.equal(q, reference.rotate(world.q, world.cos, world.sin))
    world.check_pages(pages, slots, reference.rotate(world.k, world.cos, world.sin))


@given(worlds, st.data())
@settings(max_examples=25, deadline=None)
def test_head_norms_come_before_rotation(world: World, data: st.DataObject) -> None:
    """A mean over the padded head, over all heads, or the queries' weight for keys. What is stored is bit for bit what
    the kernel computes for queries that are those keys."""
    slots = draw_slots(data, len(world.q))
    q_norm, k_norm = world.noise(world.dim), world.noise(world.dim)
    q, pages = world.run(slots, q_norm=q_norm, k_norm=k_norm)
    k, _ = world.run(slots, q=world.k, q_norm=k_norm)
    for got, x, weight in ((q, world.q, q_norm), (k, world.k, k_norm)):
        x, cos, sin = x.double(), world.cos.double(), world.sin.double()
        normed = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
        first, second = normed.abs().chunk(2, dim=-1)
        c, s = cos.abs()[:, None], sin.abs()[:, None]
        size = torch.cat((first * c + second * s, second * c + first * s), dim=-1)  # the two terms may cancel
        assert ((got.double() - reference.rotate(normed, cos, sin)).abs() <= 28 * U * size).all()
    world.check_pages(pages, slots, k)


@pytest.mark.parametrize("kv_format", PAGES)
def test_a_whole_group_in_one_launch(kv_format: str) -> None:
    """Sixteen tokens whose keys lie in the same bytes or lines, each written by a program of its own."""
    world = World((1, 1, 16), kv_format, 16, 0)
    slots = [int(i) + 64 for i in torch.randperm(16, generator=world.generator)]
    _, pages = world.run(slots)
    world.check_pages(pages, slots, reference.rotate(world.k, world.cos, world.sin))


@pytest.mark.parametrize("kv_format", PAGES)
@pytest.mark.parametrize("bad", [torch.inf, torch.nan, 3e38, 1e-40, 0.0])
def test_numbers_at_the_ends_are_stored_as_the_contract_says(kv_format: str, bad: float) -> None:
    """Not finite, beyond fp16, and peaks that vanish: each in a key and in a value."""
    world = World((1, 2, 16), kv_format, 2, 0)
    world.cos, world.sin = torch.ones(2, 8), torch.zeros(2, 8)
    world.k[0, 0], world.v[1, 1] = bad, -bad
    world.k[1, 0, 3] = world.v[0, 1, 9] = bad
    _, pages = world.run([5, 13])
    world.check_pages(pages, [5, 13], reference.rotate(world.k, world.cos, world.sin))


def test_what_the_kernel_cannot_take_is_refused() -> None:
    there, world = device(), World((4, 2, 64), "int8", 2, 0)
    inputs = [x.to(there) for x in (world.q, world.k, world.v, world.cos, world.sin)]
    slots, pages = torch.tensor([0, 1], device=there), world.pages(there)
    with pytest.raises(ParameterError, match=r"(?s)slots.*int32"):
        rotate_and_store(*inputs, slots.int(), pages)
    with pytest.raises(ParameterError, match=r"(?s)queries' norm.*\[32\].*\[64\]"):
        rotate_and_store(*inputs, slots, pages, torch.ones(32, device=there))
    with pytest.raises(ParameterError, match=r"(?s)pages' keys.*\[-1, 2, -1, 64, 16\]"):
        rotate_and_store(*inputs, slots, World((4, 1, 64), "int8", 2, 0).pages(there))
    with pytest.raises(ParameterError, match=r"(?s)pages' values"):
        rotate_and_store(*inputs, slots, pages._replace(values=pages.keys))
    with pytest.raises(ParameterError, match=r"(?s)keys' scales"):
        rotate_and_store(*inputs, slots, pages._replace(key_scales=pages.key_scales[:1]))
    with pytest.raises(ParameterError, match=r"(?s)cos.*\[2, 32\]"):
        rotate_and_store(*inputs[:3], inputs[3][:, :16].contiguous(), inputs[4], slots, pages)
    with pytest.raises(ParameterError, match="24 numbers"):
        rotate_and_store(*(x[..., :24].contiguous() for x in inputs), slots, pages)
    with pytest.raises(ParameterError, match="bfloat16"):
        rotate_and_store(*inputs, slots, pages._replace(keys=pages.keys.bfloat16()))
