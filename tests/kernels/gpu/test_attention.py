"""Attention over pages in Triton: against the reference in fp64, and bit for bit against itself however it is cut."""

from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from paged_text import Text, World, blocks_of
from torch import Tensor

from nanokit.errors import ParameterError
from nanokit.kernels import reference
from nanokit.kernels.gpu import attention as gpu
from nanokit.kernels.gpu import runtime
from nanokit.kernels.gpu.attention import attention, tile_rows
from nanokit.kernels.gpu.bound import PAGES
from nanokit.kernels.gpu.step import make_step
from nanokit.kernels.paged import read_kv, write_kv
from nanokit.kv.pages import BLOCK_SIZE, PagedKV
from nanokit.model.batch import Batch

HEADS = [(3, 3, 16), (3, 1, 48), (9, 3, 64), (7, 1, 64), (8, 2, 80), (8, 1, 96), (4, 1, 128), (1, 1, 256), (20, 1, 32)]
ERROR = 2.0 ** (-22 if runtime.INTERPRETED else -18)  # of a term, see kernels/gpu/attention.py
properties = settings(max_examples=12, deadline=None)

worlds = st.builds(
    lambda heads, kv_format, seed: World(*heads, kv_format, seed),
    st.sampled_from(HEADS), st.sampled_from(list(PAGES)), st.integers(0, 99),
)  # fmt: skip
lengths = st.one_of(st.integers(1, 90), st.sampled_from([15, 16, 17, 63, 64, 65, 127, 129, 255, 256, 257, 300, 513]))


def _write(world: World, pages: PagedKV, text: Text) -> None:
    slots = torch.tensor([text.table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(len(text))])
    where = runtime.device()
    write_kv(pages.layer(0), slots.to(where), text.k.to(where), text.v.to(where))


def _pages(world: World, texts: list[Text], stale: float = 0.0) -> PagedKV:
    """Pages that hold the texts."""
    pages = world.pages(texts, stale, runtime.device())
    for text in texts:
        _write(world, pages, text)
    return pages


def _attend(
    world: World, pages: PagedKV, parts: list[tuple[Text, int, int]], split: bool | None = None, rows: int = 0
) -> list[Tensor]:
    """Tokens first … end - 1 of each text in one step, in tiles of so many rows (0: as many as the kernel says)."""
    batch = Batch(
        [0] * sum(end - first for _, first, end in parts),
        [end - first for _, first, end in parts],
        [end for _, _, end in parts],
        [text.table for text, _, _ in parts],
    )
    step = make_step(batch, BLOCK_SIZE, rows or tile_rows(world.num_heads, world.num_kv_heads), runtime.device())
    q = torch.cat([text.q[first:end] for text, first, end in parts]).to(runtime.device())
    out = attention(q, pages.layer(0), step, scale=world.head_dim**-0.5, split=split)
    return list(out.cpu().split(batch.query_lens))


@given(world=worlds, data=st.data())
@properties
def test_equals_the_reference(world: World, data: st.DataObject) -> None:
    """Wrong lanes, nibbles, groups, head ratios, masks, scales, chunks: within the bound that the module states."""
    texts, parts, used = [], [], 0
    for length in data.draw(st.lists(lengths, min_size=1, max_size=3)):
        texts.append(world.text(length, data.draw(st.permutations(range(used, used + blocks_of(length))))))
        used += blocks_of(length)
        end = data.draw(st.one_of(st.just(length), st.integers(1, length)))
        parts.append((texts[-1], data.draw(st.integers(max(0, end - 6), end)), end))
    pages = _pages(world, texts)
    results = _attend(world, pages, parts, data.draw(st.sampled_from([None, False, True])))
    for (text, first, end), result in zip(parts, results, strict=True):
        k, v = (x.double().cpu() for x in read_kv(pages.layer(0), torch.tensor(text.table), end))
        q, visible = text.q[first:end].double(), torch.arange(first, end) + 1
        wanted, total = (reference.attention(q, k, x, visible) for x in (v, v.abs()))
        grouped = q.abs().unflatten(1, (world.num_kv_heads, -1))
        terms = torch.einsum("rhgd,htd->rhgt", grouped, k.abs()).flatten(1, 2) / world.head_dim**0.5
        largest = terms.amax(dim=-1, keepdim=True)
        assert ((result - wanted).abs() <= ERROR * (3 + 2 * largest) * total).all()


@given(world=worlds, length=st.sampled_from([5, 64, 70, 261]), chance=st.integers(0, 10**6))
@properties
def test_a_row_is_the_same_bits_however_the_work_is_cut(world: World, length: int, chance: int) -> None:
    """Chunks of a prompt, batch mates, places of pages, tiles, a program a chunk or for all of them: anything that
    changed the order of a sum would show, and with it prefix hits, batching and verification would change the text."""
    draw, begin = Random(chance), max(0, length - 7)
    most = tile_rows(world.num_heads, world.num_kv_heads)
    mate = world.text(draw.choice([1, 17, 260]), [])
    places = draw.sample(range(11), blocks_of(length) + blocks_of(len(mate)))
    straight = world.text(length, list(range(blocks_of(length))))
    text, mate = replace(straight, table=places[: blocks_of(length)]), replace(mate, table=places[blocks_of(length) :])
    pages, pieces = _pages(world, [text, mate]), []
    for first, end in pairwise(sorted({begin, *draw.choices(range(begin, length), k=draw.randint(0, 2)), length})):
        parts = [(text, first, end), (mate, len(mate) - 1, len(mate))]
        order = draw.choice([slice(None), slice(None, None, -1), slice(1)])
        rows = draw.randint(1, most)
        pieces.append(_attend(world, pages, parts[order], draw.choice([True, False]), rows)[-1 if order.step else 0])
    [alone] = _attend(world, _pages(world, [straight]), [(straight, begin, length)], split=False)
    assert torch.equal(torch.cat(pieces), alone)


@pytest.mark.parametrize("kv_format", PAGES)
@pytest.mark.parametrize("length", [1, 17, 64, 257])
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy's, in the interpreter
def test_what_an_earlier_use_left_in_a_page_is_not_seen(kv_format: str, length: int) -> None:
    """0 * NaN is NaN: a slot beyond the context that is read into the sums poisons the row."""
    world = World(3, 1, 48, kv_format, 5)
    text = world.text(length, list(range(blocks_of(length) + 1)))
    parts = [(text, max(0, length - 3), length)]
    [clean] = _attend(world, _pages(world, [text]), parts)
    assert clean.isfinite().all()
    for stale in (float("nan"), float("inf")):
        for split in (True, False):
            assert torch.equal(_attend(world, _pages(world, [text], stale), parts, split)[0], clean)


@pytest.mark.parametrize("kv_format", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize(("name", "broken"), [("k", float("nan")), ("v", float("nan")), ("v", float("inf"))])
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy's, in the interpreter
def test_what_is_not_finite_comes_out_of_the_rows_that_see_it(kv_format: str, name: str, broken: float) -> None:
    """A maximum that ignores NaN would answer fluently with broken weights; and rows of a prompt share the loads of
    their last block: one that weighs a later token's overflow with 0 gets NaN, alone it would not."""
    world = World(3, 1, 64, kv_format, 6)
    text = world.text(70, [1, 0])
    [clean] = _attend(world, _pages(world, [text]), [(text, 30, 45)])
    getattr(text, name)[40, 0, 3] = broken
    [out] = _attend(world, _pages(world, [text]), [(text, 30, 45)])
    assert torch.equal(out[:10], clean[:10])
    [later] = _attend(world, _pages(world, [text]), [(text, 68, 70)])
    assert not torch.cat([out[10:], later]).isfinite().all(dim=-1).any()


def test_a_step_may_have_sequences_without_new_tokens() -> None:
    """A sequence of no rows shifts the blocks or rows of those after it, or is launched over nothing."""
    world = World(4, 2, 32, "fp16", 8)
    first, second = world.text(65, [0, 1]), world.text(3, [2])
    pages = _pages(world, [first, second])
    empty = Text(first.q[:0], first.k[:0], first.v[:0], [])
    results = _attend(world, pages, [(empty, 0, 0), (first, 65, 65), (second, 0, 3), (empty, 0, 0)])
    assert torch.equal(results[2], _attend(world, pages, [(second, 0, 3)])[0])
    assert _attend(world, pages, [(empty, 0, 0)])[0].shape == (0, 4, 32)


@pytest.mark.parametrize(
    ("sequences", "context", "way"),
    [(1, 256, "whole"), (1, 257, "split"), (86, 257, "whole"), (85, 257, "split"), (40, 200_000, "whole")],
)
def test_few_programs_are_split(monkeypatch: pytest.MonkeyPatch, sequences: int, context: int, way: str) -> None:
    """One program for a long context leaves a GPU idle; parts of a step with many rows would not fit its memory."""
    launched: list[Any] = []
    monkeypatch.setattr(runtime, "launch", lambda kernel, grid, *args, **options: launched.append((kernel, grid)))
    world, blocks = World(9, 3, 64, "fp16", 0), blocks_of(context)
    lists = [0] * sequences, [1] * sequences, [context] * sequences, [[0] * blocks] * sequences
    step = make_step(Batch(*lists), BLOCK_SIZE, 1, runtime.device())
    q = torch.zeros(sequences, 9, 64, device=runtime.device())
    attention(q, world.pages([], device=runtime.device()).layer(0), step, scale=1.0)
    grid = (sequences, 3) if way == "whole" else (sequences, 3, 2)
    assert [kernel.__name__ for kernel, _ in launched] == (["attend"] if way == "whole" else ["attend", "merge"])
    assert launched[0][1] == grid


@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (14, 2), (28, 4), (64, 8), (17, 1), (80, 1)])
def test_a_tile_is_what_one_product_takes(heads: tuple[int, int]) -> None:
    """More rows, and the product is another instruction, with other bits; none, and no step ends."""
    group = heads[0] // heads[1]
    assert 1 <= tile_rows(*heads) <= max(1, gpu.STACKED / group)
    assert (tile_rows(*heads) + 1) * group > gpu.STACKED


def _refused(world: World, **changes: Any) -> str:
    pages = world.pages([], device=runtime.device()).layer(0)._replace(**changes.pop("pages", {}))
    step = replace(make_step(Batch([0], [1], [1], [[0]]), BLOCK_SIZE, 1, runtime.device()), **changes.pop("step", {}))
    q = torch.zeros(changes.pop("q", (1, world.num_heads, world.head_dim)), device=runtime.device())
    with pytest.raises(ParameterError) as refused:
        attention(q, pages, step, scale=1.0)
    return str(refused.value)


@pytest.mark.parametrize("q", [(1, 3, 32), (1, 4, 24), (1, 4, 16), (1, 4, 0), (2, 4, 32), (0, 4, 32), (4, 32)])
def test_queries_that_do_not_fit_are_refused(q: tuple[int, ...]) -> None:
    """A kernel goes by the rows of the step and by the heads of the pages, and would read beyond them."""
    assert "fit" in (said := _refused(World(4, 2, 32, "int8", 0), q=q)) or "not for the kernel" in said


@pytest.mark.parametrize("kv_format", PAGES)
def test_pages_that_do_not_fit_are_refused(kv_format: str) -> None:
    """Pages of other blocks, in another type, without their scales or with a neighbour's."""
    world = World(4, 2, 32, kv_format, 0)
    keys, values, key_scales, _ = world.pages([], device=runtime.device()).layer(0)
    assert "blocks of 48" in _refused(world, step={"block_size": 48})
    assert "keys" in _refused(world, step={"block_size": 128})
    assert "values" in _refused(world, pages={"values": values.repeat(2, 1, 1, 1, 1)})
    assert "values" in _refused(world, pages={"values": values.to(torch.float64)})
    assert "unknown format" in _refused(world, pages={"keys": keys.to(torch.float64)})
    for name in ("key_scales", "value_scales"):
        other = torch.zeros(1, 2, 64, device=runtime.device()) if key_scales is None else None
        assert "have scales" in _refused(world, pages={name: other})
        if key_scales is not None:
            assert "scales" in _refused(world, pages={name: key_scales[..., :32]})
