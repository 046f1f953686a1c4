"""C attention over pages: against the reference in fp64, and bit for bit against itself however the work is cut."""

from dataclasses import dataclass
from itertools import pairwise
from random import Random

import hypothesis.strategies as st
import paged_text
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from paged_text import Text, blocks_of
from torch import Tensor

from nanokit.errors import ParameterError
from nanokit.kernels import kivi, reference
from nanokit.kernels.cpu.bound import KV_FORMATS
from nanokit.kernels.cpu.library import Library
from nanokit.kernels.cpu.ops_attention import attention
from nanokit.kernels.paged import read_kv, write_kv
from nanokit.kv.pages import BLOCK_SIZE, PagedKV
from nanokit.model.batch import Batch

HEADS = [
    (9, 3, 64),
    (14, 2, 64),
    (28, 4, 32),
    (16, 8, 16),
    (4, 4, 80),
    (3, 1, 96),
    (2, 1, 256),
    (1, 1, 48),
    (80, 1, 16),
]
# a library is loaded once for all examples, so hypothesis need not make it anew for each
properties = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class World(paged_text.World):
    """With the rotation that the operation does itself."""

    def rotation(self, length: int) -> tuple[Tensor, Tensor]:
        half = self.head_dim // 2
        angles = torch.arange(length)[:, None] * 10000 ** (-torch.arange(half) / half)
        return angles.cos(), angles.sin()

    def step(
        self, kernels: Library, pages: PagedKV, parts: list[tuple[Text, int, int]], **options: int
    ) -> list[Tensor]:
        """Tokens first ... end - 1 of each text in one step; earlier ones are in the pages."""
        batch = Batch(
            [0] * sum(end - first for _, first, end in parts),
            [end - first for _, first, end in parts],
            [end for _, _, end in parts],
            [text.table for text, _, _ in parts],
        )
        q, k, v = (
            torch.cat([getattr(text, name)[first:end] for text, first, end in parts]) for name in ("q", "k", "v")
        )
        rotation = self.rotation(max(batch.kv_lens))
        out = attention(batch, pages, q, k, v, *rotation, library=kernels, **options)
        return list(out.split(batch.query_lens))


def _alone(world: World, kernels: Library, text: Text, stale: float = 0.0) -> Tensor:
    """The whole text in one step, nothing cut."""
    return world.step(kernels, world.pages([text], stale), [(text, 0, len(text))], threads=1)[0]


worlds = st.builds(
    lambda heads, kv_format, seed: World(*heads, kv_format, seed),
    st.sampled_from(HEADS), st.sampled_from(list(KV_FORMATS)), st.integers(0, 99),
)  # fmt: skip
lengths = st.one_of(st.integers(1, 90), st.sampled_from([15, 16, 17, 63, 64, 65, 127, 128, 129, 700]))


@given(world=worlds, data=st.data())
@properties
def test_equals_the_reference(kernels: Library, world: World, data: st.DataObject) -> None:
    """Wrong lanes, groups, head ratios, masks or scales: pages bit for bit, results against fp64 to float rounding."""
    texts, parts, used = [], [], 0
    for length in data.draw(st.lists(lengths, min_size=1, max_size=4)):
        texts.append(world.text(length, data.draw(st.permutations(range(used, used + blocks_of(length))))))
        used += blocks_of(length)
        parts.append((texts[-1], data.draw(st.one_of(st.integers(0, length), st.just(length - 1))), length))
    pages, expected = world.pages(texts), world.pages(texts)
    for text, first, _ in parts:
        if first:
            world.step(kernels, pages, [(text, 0, first)], threads=1)
    results = world.step(kernels, pages, parts, threads=data.draw(st.integers(1, 2)))
    for (text, first, end), result in zip(parts, results, strict=True):
        cos, sin = world.rotation(end)
        slots = torch.tensor([text.table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(end)])
        write_kv(expected.layer(0), slots, reference.rotate(text.k, cos, sin), text.v, expected.peaks(0))
        if (sealed := expected.sealed(0)) is not None:
            kivi.seal(expected.layer(0), sealed, text.table[: end // BLOCK_SIZE])
        q = reference.rotate(text.q, cos, sin).double()
        own_page = world.kv_format == "kivi4"  # which its rows see otherwise than earlier pages
        borders = range((first // BLOCK_SIZE + 1) * BLOCK_SIZE, end, BLOCK_SIZE) if own_page else ()
        for begin, stop in pairwise([first, *borders, end]):
            seen = torch.tensor(text.table[: blocks_of(stop)]), stop
            k, v = read_kv(expected.layer(0), *seen) if not own_page else kivi.read_kv(expected.layer(0), sealed, *seen)
            k, v, rows = k.double(), v.double(), q[begin:stop]
            scores = torch.einsum("rhgd,htd->rhgt", rows.unflatten(1, (world.num_kv_heads, -1)), k)
            largest = float(scores.abs().max()) / world.head_dim**0.5 if len(rows) else 0
            wanted = reference.attention(rows, k, v, torch.arange(begin, stop) + 1)
            bound = 1e-6 * (2 + largest) * float(v.abs().max())
            torch.testing.assert_close(result[begin - first : stop - first].double(), wanted, rtol=0, atol=bound)
        if own_page:
            assert torch.equal(
                pages.sealed(0)[text.table[: end // BLOCK_SIZE]], sealed[text.table[: end // BLOCK_SIZE]]
            )
    held = sorted(pages._open._open) if pages._open else slice(None)  # of others the originals were given back
    for ours, theirs in zip(pages.layer(0), expected.layer(0), strict=True):
        assert ours is theirs is None or torch.equal(ours[held], theirs[held])


@pytest.mark.parametrize("broken", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dim", [16, 48, 64])
def test_numbers_that_are_not_finite_are_sealed_as_the_reference_seals_them(
    kernels: Library, dim: int, broken: float
) -> None:
    """Bit for bit, codes and minimums of their groups included: a store on disk compares pages by their bytes."""
    world = World(4, 2, dim, "kivi4", 3)
    text = world.text(128, [1, 0])
    text.k[70, 1, dim // 2 + 3] = text.v[5, 0, 7] = text.v[127, 1, dim - 1] = broken
    pages, expected = world.pages([text]), world.pages([text])
    world.step(kernels, pages, [(text, 0, 128)], threads=1)
    slots = torch.tensor([text.table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(128)])
    write_kv(expected.layer(0), slots, reference.rotate(text.k, *world.rotation(128)), text.v)
    kivi.seal(expected.layer(0), expected.sealed(0), text.table)
    assert torch.equal(pages.sealed(0), expected.sealed(0))


@given(world=worlds, wanted=st.lists(lengths, min_size=1, max_size=3, unique=True), chance=st.integers(0, 10**6))
@properties
def test_a_row_is_the_same_bits_however_the_work_is_cut(
    kernels: Library, world: World, wanted: list[int], chance: int
) -> None:
    """Chunks of the prompt, batch mates, places of pages, threads: anything that changed the order of a sum would show,
    and with it prefix hits, batching and verification would change the text."""
    draw = Random(chance)
    blocks = draw.sample(range(1, 99), sum(map(blocks_of, wanted)))
    texts = [world.text(length, [blocks.pop() for _ in range(blocks_of(length))]) for length in wanted]
    pages = world.pages(texts)
    pieces: list[list[Tensor]] = [[] for _ in texts]
    cuts = []
    for length in wanted:
        inner = draw.choices(range(length), k=draw.randint(0, 3))
        tail = range(max(0, length - draw.randint(0, 12)), length)  # the last tokens one by one
        cuts.append(list(pairwise(sorted({0, *inner, *tail, length}))))
    while live := [i for i, left in enumerate(cuts) if left]:
        now = draw.sample(live, draw.randint(1, len(live)))
        parts = [(texts[i], *cuts[i].pop(0)) for i in now]
        options = {"threads": draw.randint(1, 3), "cut_for": draw.randint(1, 9)}
        for i, piece in zip(now, world.step(kernels, pages, parts, **options), strict=True):
            pieces[i].append(piece)
    for text, got in zip(texts, pieces, strict=True):
        straight = Text(text.q, text.k, text.v, list(range(blocks_of(len(text)))))
        assert torch.equal(torch.cat(got), _alone(world, kernels, straight))


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("length", [1, 17, 64, 65, 1000])
def test_what_an_earlier_use_left_in_a_page_is_not_seen(kernels: Library, kv_format: str, length: int) -> None:
    """0 * NaN is NaN: a slot beyond the context that is read into the sums poisons the row."""
    world = World(9, 3, 64, kv_format, 5)
    text = world.text(length, list(range(blocks_of(length) + 1)))
    clean = _alone(world, kernels, text)
    assert clean.isfinite().all()
    for stale in (float("nan"), float("inf")):
        pages = world.pages([text], stale)
        first = world.step(kernels, pages, [(text, 0, length // 2)], cut_for=3) if length > 1 else []
        rest = world.step(kernels, pages, [(text, length // 2, length)], cut_for=3)
        assert torch.equal(torch.cat(first + rest), clean)


def test_a_later_token_that_overflows_its_page_is_not_seen(kernels: Library) -> None:
    """The rows of a prompt share the loads of their diagonal block: one that weighs infinity with 0 gets NaN."""
    world = World(3, 1, 64, "fp16", 6)
    text = world.text(70, [1, 0])
    clean = _alone(world, kernels, text)
    text.v[40] = 1e6
    assert torch.equal(_alone(world, kernels, text)[:40], clean[:40])


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_nan_comes_out(kernels: Library, kv_format: str) -> None:
    """A clamped exponential makes a number of NaN, and a code cannot hold it: broken weights would answer fluently."""
    world = World(3, 1, 64, kv_format, 6)
    text = world.text(70, [1, 0])
    text.k[20, 0, 3] = float("nan")
    out = _alone(world, kernels, text)
    assert out[20:].isnan().all()
    assert out[:20].isfinite().all()


@dataclass(frozen=True)
class Norms:
    q_norm: Tensor
    k_norm: Tensor
    eps: float = 1e-6


def test_heads_are_normalized_before_they_are_rotated(kernels: Library) -> None:
    """Qwen 3: the wrong order, the wrong weight or one norm over all heads would pass where there is no norm."""
    world = World(4, 2, 32, "fp32", 7)
    text = world.text(70, [1, 0])
    norms = Norms(torch.rand(32) + 0.5, torch.rand(32) + 0.5)
    cos, sin = world.rotation(70)
    pages = world.pages([text])
    got = attention(Batch([0] * 70, [70], [70], [text.table]), pages, text.q, text.k, text.v, cos, sin, norms,
                    library=kernels)  # fmt: skip
    q = reference.rotate(reference.rms_norm(text.q, norms.q_norm, norms.eps), cos, sin)
    k = reference.rotate(reference.rms_norm(text.k, norms.k_norm, norms.eps), cos, sin)
    wanted = reference.attention(q, k.transpose(0, 1), text.v.transpose(0, 1), torch.arange(70) + 1)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_a_step_may_have_sequences_without_new_tokens(kernels: Library) -> None:
    """A sequence of no rows shifts the blocks or rows of those after it, or is divided by."""
    world = World(4, 2, 32, "fp16", 8)
    first, second = world.text(65, [0, 1]), world.text(3, [2])
    pages = world.pages([first, second])
    empty = Text(first.q[:0], first.k[:0], first.v[:0], [])
    world.step(kernels, pages, [(first, 0, 65)])
    parts = [(empty, 0, 0), (first, 65, 65), (second, 0, 3), (empty, 0, 0)]
    assert torch.equal(world.step(kernels, pages, parts)[2], _alone(world, kernels, world.text(3, [0])))
    assert world.step(kernels, pages, [(empty, 0, 0)])[0].shape == (0, 4, 32)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 2, 16), (2, 1, 24)])
def test_heads_that_do_not_fit_are_refused(heads: int, kv_heads: int, dim: int) -> None:
    """A group of heads or a vector of dimensions that is cut off would read beyond its row."""
    world = World(heads, kv_heads, 16, "fp32", 0)
    q, k = torch.zeros(1, heads, dim), torch.zeros(1, kv_heads, dim)
    with pytest.raises(ParameterError, match="heads"):
        attention(Batch([0], [1], [1], [[0]]), PagedKV(world, 1), q, k, k, *world.rotation(1))


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_a_batch_or_pages_of_another_shape_are_refused(heads: int, tokens: int) -> None:
    """C goes by the rows of q and by the heads of k: more rows than positions, or fewer heads in the pages, and it
    writes beyond them."""
    world = World(4, heads, 16, "fp32", 0)
    q, k = torch.zeros(2, 4, 16), torch.zeros(2, 2, 16)
    batch, pages = Batch([0] * tokens, [tokens], [tokens], [[0]]), PagedKV(world, 1)
    if (heads, tokens) == (2, 2):
        assert attention(batch, pages, q, k, k, *world.rotation(3)).shape == q.shape
        with pytest.raises(ValueError, match="block id"):
            attention(Batch([0, 0], [2], [2], [[1]]), pages, q, k, k, *world.rotation(3))
    else:
        with pytest.raises(ParameterError, match="not those of these heads"):
            attention(batch, pages, q, k, k, *world.rotation(3))
