"""Formats of KV pages under random schedules: what a row sees depends on its position alone, whatever the engine did.

Sealed pages are where that is hard: a page that is sealed a step too early or too late, or from what a rolled back
draft left there, changes a few bits of the rows that follow, and nothing else would tell.
"""

from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from tiny import compiled_model, save_tiny_gguf
from watched import Watcher

from nanokit.engine.load import LoadedEngine, load
from nanokit.engine.sampling import Sampling
from nanokit.errors import ParameterError, RequestError
from nanokit.kv.calibrate import kv_peaks
from nanokit.kv.open_pages import DEEPEST_SPECULATION, KEPT
from nanokit.kv.pages import BLOCK_SIZE, DTYPES, PagedKV
from nanokit.model.batch import Batch


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_gguf(tmp_path_factory.mktemp("formats") / "tiny.gguf", compiled_model("llama"), types="Q4_1")


@lru_cache
def model_of(path: Path, kv_format: str, activations: str | None = None) -> LoadedEngine:
    return load(path, ctx=512, kv_format=kv_format, activations=activations, prefix_cache=False, max_seqs=1)


def texts(draw: Random) -> list[list[int]]:
    common = [draw.randrange(331) for _ in range(200)]
    lengths = [draw.choice((1, 17, 63, 64, 65, 128, 150, 250)) for _ in range(draw.randint(1, 5))]
    return [
        common[: draw.choice((0, 64, 130, 200))] + [draw.randrange(331) for _ in range(length)] for length in lengths
    ]


@given(kv_format=st.sampled_from(list(DTYPES)), chance=st.integers(0, 10**6))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_schedule_changes_a_bit(file: Path, kv_format: str, chance: int) -> None:
    """Chunks of one token to all, batch mates, prefix hits, preemption in too small a pool, greedy and drawn."""
    draw = Random(chance)
    asked = texts(draw)
    samplings = [
        Sampling(max_tokens=draw.randint(1, 70), ignore_eos=True, temperature=draw.choice((0.0, 0.9)), seed=3)
        for _ in asked
    ]
    alone = [
        model_of(file, kv_format).generate([ids], sampling)[0].token_ids
        for ids, sampling in zip(asked, samplings, strict=True)
    ]
    budget = draw.choice((1, 7, 48, 100, 512))
    options = {"max_seqs": min(budget, draw.randint(1, 4)), "token_budget": budget, "kv_format": kv_format}
    sizes = PagedKV.pool_bytes(model_of(file, kv_format).model.config, kv_format, options["max_seqs"], budget)
    blocks = draw.choice((8, 12, 40))
    engine = load(file, ctx=512, kv_memory=sizes.of(blocks), prefix_cache=draw.random() < 0.7, **options)
    assert engine.pool.num_blocks == blocks
    if budget > 1 and draw.random() < 0.3:  # each row against its whole history, which costs a forward a step
        engine.model = Watcher(engine.model, kv_format)  # type: ignore[assignment]
    for _ in range(2):
        assert [c.token_ids for c in engine.generate(asked, samplings)] == alone
    engine.check_integrity()


def step(engine: LoadedEngine, pages: PagedKV, ids: list[int], first: int, table: list[int]) -> torch.Tensor:
    """Hidden states of the tokens from `first` on."""
    return engine.model.forward(Batch(ids[first:], [len(ids) - first], [len(ids)], [table]), pages)


def pages_of(engine: LoadedEngine, blocks: int) -> PagedKV:
    pages = PagedKV(engine.model.config, blocks, engine.kv.kv_format)
    if engine.kv.kv_peaks is not None:
        pages.calibrate(engine.kv.kv_peaks)
    return pages


@given(kv_format=st.sampled_from(list(DTYPES)), chance=st.integers(0, 10**6))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_tokens_rolled_back_leave_no_trace(file: Path, kv_format: str, chance: int) -> None:
    """Drafts of up to 64 tokens, over the border of a page or not, of which some are taken, and now and then a step
    that goes back further: what is written in their place gives the bits of a sequence that never saw them."""
    draw, engine = Random(chance), model_of(file, kv_format)
    ids = [draw.randrange(331) for _ in range(480)]
    table = draw.sample(range(12), 8)
    pages, done = pages_of(engine, 12), draw.choice((1, 60, 63, 64, 120, 200, 250))
    got, furthest = step(engine, pages, ids[:done], 0, table), 0
    while done < 400:
        furthest = max(furthest, done)
        done = max(1, done - draw.choice((0, 0, 0, 20, 64)), furthest - DEEPEST_SPECULATION)
        taken = draw.choice((1, 2, 5, 40, 64))
        drafted = [draw.randrange(331) for _ in range(draw.randint(0, 65 - taken))]
        tokens = ids[: done + taken] + drafted
        got = torch.cat((got[:done], step(engine, pages, tokens, done, table)[:taken]))
        done += taken
    straight = step(engine, pages_of(engine, 8), ids[:done], 0, list(range(8)))
    assert torch.equal(got, straight)


def test_a_rollback_that_is_too_deep_is_refused(file: Path) -> None:
    """Originals that were given back read as zeros: a page sealed from them would answer from nothing."""
    engine, table = model_of(file, "kivi4"), list(range(8))
    pages, ids = pages_of(engine, 8), [1] * 400
    step(engine, pages, ids[:300], 0, table)
    step(engine, pages, ids[:301], 300, table)
    deepest = (300 - KEPT) // BLOCK_SIZE * BLOCK_SIZE
    step(engine, pages, ids[:301], deepest + 1, table)  # what is kept may be written again
    with pytest.raises(Exception, match=r"(?s)sealed page.*begins at token 127.*64 tokens rolled back"):
        step(engine, pages, ids[:301], deepest - 1, table)
    step(engine, pages, ids[:301], deepest - BLOCK_SIZE, table)  # from its first token on a page is made anew


@pytest.mark.parametrize("kv_format", ["int8-static", "int4", "kivi4"])
def test_the_reference_computes_alike_however_a_prompt_is_cut(file: Path, kv_format: str) -> None:
    """The plain torch backend, whose sums are in another order for each cut: to rounding, and what that tips over."""
    engine, table = model_of(file, kv_format, "fp32"), [3, 1, 0, 2]
    assert not engine.model.compiled
    ids = [(7 * i * i) % 331 for i in range(230)]
    whole = step(engine, pages_of(engine, 4), ids, 0, [0, 1, 2, 3])
    pages, got, done = pages_of(engine, 4), [], 0
    for count in (1, 62, 1, 1, 64, 70, 20, 11):
        got.append(step(engine, pages, ids[: done + count], done, table))
        done += count
    assert done == 230
    assert (torch.cat(got) - whole).abs().mean() < 1e-3 * whole.std()


def test_static_scales_come_from_the_text_they_are_given(file: Path) -> None:
    """`load` calibrates on the kit's text; another text gives other scales, and others answers. Refused while a request
    would go on with pages of both."""
    first, second = (load(file, kv_format="int8-static", ctx=512) for _ in range(2))
    assert torch.equal(first.kv.kv_peaks, second.kv.kv_peaks)
    ids = [(5 * i) % 331 for i in range(100)]
    peaks = kv_peaks(first.model, ids)
    config = first.model.config
    assert peaks.shape == (config.num_layers, 2, config.num_kv_heads)
    pages = PagedKV(config, 2, "fp32")
    first.model.peaks_of(Batch(ids, [100], [100], [[0, 1]]), pages)
    for layer in range(config.num_layers):
        keys, values, *_ = pages.layer(layer)
        assert torch.equal(peaks[layer, 0], keys.abs().amax((0, 2, 3, 4)))
        assert torch.equal(peaks[layer, 1], values.abs().amax((0, 2, 3, 4)))
    second.calibrate_kv(ids)
    assert torch.equal(second.kv.kv_peaks, peaks)
    ask: dict[str, Any] = {"prompts": [ids[:90]], "sampling": Sampling(max_tokens=4, ignore_eos=True)}
    hidden = [step(each, each.kv, ids[:90], 0, [0, 1]) for each in (first, second)]
    assert not torch.equal(*hidden)
    second.generate(**ask)
    running = second.add(ids, Sampling(max_tokens=3))
    with pytest.raises(RequestError, match="cannot be calibrated now"):
        second.calibrate_kv(ids)
    second.abort(running)
    with pytest.raises(ParameterError, match="only int8-static"):
        load(file, kv_format="int8", ctx=512).calibrate_kv(ids)
