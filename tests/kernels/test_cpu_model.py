"""Whole models in C: against the reference in the same activation mode, and bit for bit against themselves.
tests/whole_models.py says how the former is meant.
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from random import Random

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from tiny import compiled_model, save_tiny_gguf
from torch import Tensor
from whole_models import (
    FILES,
    Open,
    Text,
    assert_equals_the_reference,
    calibrate,
    logits_of,
    opened_file,
    opener,
    pages_for,
    plan_all,
    step,
    tokens,
)  # fmt: skip

from nanokit.errors import ParameterError
from nanokit.kernels import cpu, reference
from nanokit.kernels.activations import no_peaks, note_peak
from nanokit.kernels.cpu.bound import KV_FORMATS, MODES, Bound
from nanokit.kernels.cpu.library import Library
from nanokit.kv.pages import BLOCK_SIZE, PagedKV

Bind = Callable[..., Bound]
properties = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="session")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Open:
    return opener(tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="module")
def bind(kernels: Library, opened: Open) -> Bind:
    """Bind one of FILES in a mode, with a number of threads; each once a variant. Static is calibrated."""

    @lru_cache
    def once(name: str, mode: str, threads: int = 1) -> Bound:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NANOKIT_THREADS", str(threads))
            bound = cpu.bind(*opened(name), activations=mode)
        assert bound.variant == kernels.variant
        if mode == "static":
            calibrate(bound, opened(name)[0])
        return bound

    return once


@pytest.mark.parametrize("name", FILES)
def test_equals_the_reference_in_the_same_mode(bind: Bind, opened: Open, name: str) -> None:
    """A layer's input left as it was or quantized twice, a norm, bias or residual lost, another place's peak, rows of q
    and k in the file's order instead of ours: see the module for how close is equal."""
    config, weights = opened(name)
    texts = tokens(24, 6)
    plain = logits_of(reference.bind(config, weights), config, texts)
    for mode in MODES:
        theirs = reference.bind(config, weights, activations=mode)
        if mode == "static":
            theirs.calibrate(bind(name, mode).peaks)
        wanted, got = logits_of(theirs, config, texts), logits_of(bind(name, mode), config, texts)
        assert got.shape == (144, 331)
        assert_equals_the_reference(got, wanted, plain, mode)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_pages_of_every_format_are_the_references(bind: Bind, opened: Open, kv_format: str) -> None:
    """Rows attend to what the page holds: fp16 or int8 that the one rounds and the other does not shows here."""
    config, weights = opened("qwen3-mixed")
    texts = tokens(3, 150)
    wanted = logits_of(reference.bind(config, weights, activations="a16"), config, texts, kv_format)
    got = logits_of(bind("qwen3-mixed", "a16"), config, texts, kv_format)
    bounds = {"fp32": 1e-4, "fp16": 2e-4, "int8": 2e-3, "int8-static": 2e-3, "int4": 5e-3, "kivi4": 5e-3}
    assert (got - wanted).abs().mean() < bounds[kv_format] * wanted.std()


def test_peaks_are_the_references(bind: Bind, opened: Open) -> None:
    """Static scales come from them: another place's would clip or coarsen a whole layer. Noted over several steps."""
    config, weights = opened("llama-Q4_0")
    for threads in (1, 3):
        found = []
        for bound in (bind("llama-Q4_0", "static", threads), reference.bind(config, weights, activations="static")):
            peaks, pages = no_peaks(2), PagedKV(config, 1)
            for text in (tokens(1, 20), tokens(1, 33, seed=1)):
                hidden = bound.run(plan_all(bound, text, pages), peaks)
                note_peak(peaks, 8, hidden)
            found.append(peaks)
        torch.testing.assert_close(*found, rtol=1e-3, atol=0)


def test_static_before_calibration_and_calibration_of_others_are_refused(opened: Open) -> None:
    config, weights = opened("llama-Q4_0")
    ours = cpu.bind(config, weights, activations="static")
    with pytest.raises(ParameterError, match="not been calibrated"):
        logits_of(ours, config, tokens(1, 3))
    with pytest.raises(ParameterError, match="only static"):
        cpu.bind(config, weights, activations="token").calibrate(torch.ones(9))


# -- the bitwise contract ----------------------------------------------------------------------------------------------

OWN_ROW = [mode for mode in MODES if mode != "tensor"]  # which is about the whole step
lengths = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 130]))


@given(
    name=st.sampled_from(list(FILES)),
    mode=st.sampled_from(OWN_ROW),
    kv_format=st.sampled_from(list(KV_FORMATS)),
    wanted=st.lists(lengths, min_size=1, max_size=4),
    chance=st.integers(0, 10**6),
)
@properties
def test_a_row_is_the_same_bits_however_the_work_is_cut(
    bind: Bind, opened: Open, name: str, mode: str, kv_format: str, wanted: list[int], chance: int
) -> None:
    """Chunks of the prompt, its tokens one by one, batch mates, places of pages, threads: hidden states and logits. It
    is what makes batching, prefix hits, speculation and hand-over testable by equality."""
    config, _ = opened(name)
    draw = Random(chance)
    count = [-(-length // BLOCK_SIZE) for length in wanted]
    blocks = draw.sample(range(20), sum(count))
    texts = [Text(tokens(1, length, seed=length)[0], [blocks.pop() for _ in range(n)])
             for length, n in zip(wanted, count, strict=True)]  # fmt: skip
    pages = pages_for(config, 20, kv_format)
    pieces: list[list[Tensor]] = [[] for _ in texts]
    cuts = []
    for length in wanted:
        inner = draw.choices(range(length), k=draw.randint(0, 3))
        tail = range(max(0, length - draw.randint(0, 9)), length)  # the last tokens one by one
        cuts.append(list(pairwise(sorted({0, *inner, *tail, length}))))
    while live := [i for i, left in enumerate(cuts) if left]:
        now = draw.sample(live, draw.randint(1, len(live)))
        cut = bind(name, mode, draw.randint(1, 3))
        for i, piece in zip(now, step(cut, pages, [(texts[i], *cuts[i].pop(0)) for i in now]), strict=True):
            pieces[i].append(piece)
    whole = bind(name, mode)
    for text, got in zip(texts, pieces, strict=True):
        alone = Text(text.ids, list(range(len(text.table))))
        [expected] = step(whole, pages_for(config, len(text.table), kv_format), [(alone, 0, len(text.ids))])
        assert torch.equal(torch.cat(got), expected)
        logits = whole.logits(expected)
        for piece, rows in zip(got, logits.split([len(piece) for piece in got]), strict=True):
            assert torch.equal(bind(name, mode, draw.randint(1, 3)).logits(piece), rows)


def test_a_context_that_outgrows_the_rope_table_changes_no_bit(opened: Open, kernels: Library) -> None:
    """The table grows between two steps: angles of early positions, or an address that a plan still holds, would not
    be what they were. Also the longest step here, of a thousand rows."""
    config, weights = opened("llama-Q4_0")
    text, last = Text(tokens(1, 1060)[0], list(range(17))), [(0, 1000), (1000, 1023), (1023, 1026), (1026, 1060)]
    whole, grown = (cpu.bind(config, weights, activations="a8g32") for _ in range(2))
    [expected] = step(whole, PagedKV(config, 17), [(text, 0, 1060)])
    pages = PagedKV(config, 17)
    assert torch.equal(torch.cat([step(grown, pages, [(text, *part)])[0] for part in last]), expected)
    theirs = reference.bind(config, weights, activations="a16")
    wanted = logits_of(theirs, config, [text.ids])[-40:]
    got = cpu.bind(config, weights, activations="a16")
    assert (logits_of(got, config, [text.ids])[-40:] - wanted).abs().max() < 1e-3 * wanted.std()


@pytest.mark.parametrize("name", ["llama-Q4_0", "llama-Q8_0-tied", "qwen3-mixed", "qwen3-K-tied"])
def test_logits_of_ids_are_those_of_all(bind: Bind, opened: Open, name: str) -> None:
    """Repeated, unsorted and last ids, and none; one row and many. A verifier that asks for few must see what a sampler
    that asks for all saw."""
    config, _ = opened(name)
    for mode in MODES:
        bound = bind(name, mode, 2)
        hidden = bound.run(plan_all(bound, tokens(2, 11), PagedKV(config, 2)))
        everything = bound.logits(hidden)
        assert everything.shape == (22, 331)
        for ids in ([330, 0, 16, 15, 0, 330], [7], [], list(range(331))):
            for rows in (hidden, hidden[4:5]) if mode != "tensor" else (hidden,):
                ours = everything if rows is hidden else everything[4:5]
                assert torch.equal(bound.logits(rows, torch.tensor(ids, dtype=torch.int64)), ours[:, ids])
        assert bound.logits(hidden[:0]).shape == (0, 331)
        assert bound.argmax(hidden[:0]).shape == (0,)


def test_argmax_is_that_of_the_logits_and_the_lowest_among_equals(kernels: Library, tmp_path: Path) -> None:
    """Equal logits happen (rows of an embedding that were never trained): greedy must not hang on a thread's turn."""
    model = compiled_model("llama")
    rows = model.lm_head.weight.data
    rows[100:331] = rows[:100].repeat(3, 1)[:231]  # each row three or four times
    config, weights = opened_file(save_tiny_gguf(tmp_path / "m.gguf", model, types="Q4_1"))
    for mode, threads in (("a16", 1), ("a8g32", 3)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NANOKIT_THREADS", str(threads))
            bound = cpu.bind(config, weights, activations=mode)
        hidden = bound.run(plan_all(bound, tokens(4, 30), PagedKV(config, 4)))
        logits, best = bound.logits(hidden), bound.argmax(hidden)
        assert torch.equal(best, torch.from_numpy(logits.numpy().argmax(1)))  # numpy's is the first
        assert (best < 100).all()
        assert len(best.unique()) > 20
        assert torch.equal(torch.cat([bound.argmax(row[None]) for row in hidden]), best)
        assert bound.argmax(torch.zeros(3, 64)).tolist() == [0, 0, 0]
        hidden[1, 5] = torch.nan  # nothing can be drawn of this row, and of its neighbours what could before
        assert bound.argmax(hidden).tolist() == [best[0], -1, *best[2:]]
        assert reference.bind(config, weights).argmax(hidden)[1] == -1


def test_two_models_share_threads_and_nothing_else(bind: Bind, opened: Open) -> None:
    """Steps of two engines in turns, their pages and scratch apart."""
    names = ("llama-Q4_0", "qwen2-Q5_0")
    alone = [logits_of(bind(name, "a8g32", 2), opened(name)[0], tokens(2, 70)) for name in names]
    pages = [PagedKV(opened(name)[0], 2) for name in names]
    text = Text(tokens(2, 70)[0], [1, 0])
    got: list[list[Tensor]] = [[], []]
    for first, end in ((0, 30), (30, 69), (69, 70)):
        for i, name in enumerate(names):
            bound = bind(name, "a8g32", 2)
            got[i].append(bound.logits(step(bound, pages[i], [(text, first, end)])[0]))
    for ours, wanted in zip(got, alone, strict=True):
        assert torch.equal(torch.cat(ours), wanted[:70])
