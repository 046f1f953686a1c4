"""Whole tiny models in Triton: against the reference in the same activation mode, and bit for bit against themselves.

tests/whole_models.py says how the former is meant. Without a GPU all of it runs in Triton's interpreter, some
milliseconds a program: texts are short, and each file of FILES is seen in one mode or two.
"""

from functools import lru_cache
from itertools import pairwise
from random import Random

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor
from whole_models import (
    FILES,
    Open,
    Text,
    assert_equals_the_reference,
    calibrate,
    logits_of,
    opener,
    pages_for,
    plan_all,
    step,
    tokens,
)  # fmt: skip

from nanokit.errors import ParameterError
from nanokit.kernels import cpu, gpu, reference
from nanokit.kernels.activations import MODES, no_peaks, note_peak
from nanokit.kernels.gpu.bound import PAGES, Bound
from nanokit.kernels.gpu.runtime import device
from nanokit.kv.pages import BLOCK_SIZE, PagedKV

OWN_ROW = [mode for mode in MODES if mode != "tensor"]  # which is about the whole step


@pytest.fixture(scope="session")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Open:
    return opener(tmp_path_factory.mktemp("triton"))


@pytest.fixture(scope="session")
def bind(opened: Open):
    """Bind one of FILES in a mode, once. Static is calibrated."""

    @lru_cache
    def once(name: str, mode: str) -> Bound:
        bound = gpu.bind(*opened(name), activations=mode)
        if mode == "static":
            reference_peaks = reference.bind(*opened(name), activations="static")
            calibrate(reference_peaks, opened(name)[0])
            bound.calibrate(reference_peaks.peaks)
        return bound

    return once


def copy_pages(config, written: PagedKV, into: PagedKV) -> None:
    """Byte for byte, wherever they lie."""
    for index in range(config.num_layers):
        for mine, theirs in zip(into.layer(index), written.layer(index), strict=True):
            if mine is not None:
                mine.copy_(theirs)


@pytest.mark.parametrize(("name", "mode"), [*zip(FILES, [*MODES, "fp32"], strict=True), ("qwen3-mixed", "a8g32")])
def test_equals_the_reference_in_the_same_mode(bind, opened: Open, name: str, mode: str) -> None:
    """A layer's input quantized twice or not at all, a norm, bias or residual lost or added twice, another place's
    peak, heads or rows in the wrong order."""
    config, weights = opened(name)
    texts = tokens(2, 4)
    theirs = reference.bind(config, weights, activations=mode)
    if mode == "static":
        theirs.calibrate(bind(name, mode).peaks)
    wanted, plain = logits_of(theirs, config, texts), logits_of(reference.bind(config, weights), config, texts)
    got = logits_of(bind(name, mode), config, texts, device=device())
    assert_equals_the_reference(got, wanted, plain, mode, few=True)


@pytest.mark.parametrize("kv_format", PAGES)
def test_pages_of_every_format_are_the_references(bind, opened: Open, kv_format: str) -> None:
    """Rows attend to what the page holds, the reference's and their own, across the end of a page."""
    config, weights = opened("qwen3-mixed")
    text = Text(tokens(1, 67)[0], [1, 0])
    theirs, ours = pages_for(config, 2, kv_format), pages_for(config, 2, kv_format, device())
    plain = reference.bind(config, weights)
    step(plain, theirs, [(text, 0, 62)])
    copy_pages(config, theirs, ours)
    [wanted] = step(plain, theirs, [(text, 62, 67)])
    got = step(bind("qwen3-mixed", "fp32"), ours, [(text, 62, 67)])[0].cpu()
    bounds = {"fp32": 1e-4, "fp16": 2e-4, "int8": 2e-3, "int8-static": 2e-3, "int4": 2e-2}
    assert (got - wanted).abs().mean() < bounds[kv_format] * wanted.std()


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["llama-Q4_1-tied", "qwen3-mixed"]),
    mode=st.sampled_from(OWN_ROW),
    kv_format=st.sampled_from(list(PAGES)),
    wanted=st.lists(st.integers(1, 6), min_size=1, max_size=2),
    chance=st.integers(0, 10**6),
)
def test_a_row_is_the_same_bits_however_the_work_is_cut(
    bind, opened: Open, name: str, mode: str, kv_format: str, wanted: list[int], chance: int
) -> None:
    """Chunks of the prompt, its tokens one by one, batch mates, places of pages: hidden states and logits. It is what
    makes batching, prefix hits, speculation and hand-over testable by equality."""
    config, _ = opened(name)
    draw, bound = Random(chance), bind(name, mode)
    count = [-(-length // BLOCK_SIZE) for length in wanted]
    blocks = draw.sample(range(6), sum(count))
    texts = [Text(tokens(1, length, seed=length)[0], [blocks.pop() for _ in range(n)])
             for length, n in zip(wanted, count, strict=True)]  # fmt: skip
    pages = pages_for(config, 6, kv_format, device())
    pieces: list[list[Tensor]] = [[] for _ in texts]
    cuts = [list(pairwise(sorted({0, draw.randrange(n), n - 1, n}))) for n in wanted]
    while live := [i for i, left in enumerate(cuts) if left]:
        now = draw.sample(live, draw.randint(1, len(live)))
        for i, piece in zip(now, step(bound, pages, [(texts[i], *cuts[i].pop(0)) for i in now]), strict=True):
            pieces[i].append(piece)
    for text, got in zip(texts, pieces, strict=True):
        alone = Text(text.ids, list(range(len(text.table))))
        own = pages_for(config, len(text.table), kv_format, device())
        [expected] = step(bound, own, [(alone, 0, len(text.ids))])
        assert torch.equal(torch.cat(got), expected)
        assert torch.equal(torch.cat([bound.logits(piece) for piece in got]), bound.logits(expected))


@pytest.mark.parametrize("kv_format", ["fp16", "int8"])
def test_pages_that_c_has_written_go_on_in_triton(bind, opened: Open, kv_format: str) -> None:
    """One layout and one way to quantize: prefill on the CPU, decode elsewhere."""
    config, weights = opened("llama-Q4_1-tied")
    text, c = Text(tokens(1, 67)[0], [1, 0]), cpu.bind(config, weights, activations="a16")
    pages, there = PagedKV(config, 2, kv_format), PagedKV(config, 2, kv_format, device())
    step(c, pages, [(text, 0, 66)])
    copy_pages(config, pages, there)
    [wanted] = step(c, pages, [(text, 66, 67)])
    [got] = step(bind("llama-Q4_1-tied", "a16"), there, [(text, 66, 67)])
    assert (got.cpu() - wanted).abs().max() < 1e-3 * wanted.std()


def test_peaks_are_the_references(bind, opened: Open) -> None:
    """Static scales come from them: another place's would clip or coarsen a whole layer. Noted over several steps."""
    config, weights = opened("llama-Q4_0")
    found = []
    for bound in (bind("llama-Q4_0", "static"), reference.bind(config, weights, activations="static")):
        peaks = no_peaks(2)
        pages = PagedKV(config, 1, device=device() if isinstance(bound, Bound) else "cpu")
        for text in (tokens(1, 5), tokens(1, 6, seed=1)):
            hidden = bound.run(plan_all(bound, text, pages), peaks)
            note_peak(peaks, 8, hidden)
        found.append(peaks)
    torch.testing.assert_close(*found, rtol=1e-3, atol=0)


def test_static_before_calibration_and_calibration_of_others_are_refused(opened: Open) -> None:
    """A scale of nothing would make zeros of everything."""
    config, weights = opened("llama-Q4_0")
    with pytest.raises(ParameterError, match="not been calibrated"):
        logits_of(gpu.bind(config, weights, activations="static"), config, tokens(1, 3), device=device())
    with pytest.raises(ParameterError, match="only static"):
        gpu.bind(config, weights, activations="token").calibrate(torch.ones(9))


@pytest.mark.parametrize("name", ["llama-Q4_0", "llama-Q8_0-tied"])
def test_logits_of_ids_are_those_of_all(bind, opened: Open, name: str) -> None:
    """Repeated, unsorted and last ids, and none. A verifier that asks for few must see what a sampler that asks for
    all saw."""
    config, _ = opened(name)
    bound = bind(name, "a8g32")
    hidden = bound.run(plan_all(bound, tokens(1, 3), PagedKV(config, 1, device=device())))
    everything = bound.logits(hidden)
    assert everything.shape == (3, 331)
    for ids in ([330, 0, 16, 15, 0, 330], [7], []):
        assert torch.equal(bound.logits(hidden, torch.tensor(ids, dtype=torch.int64)), everything[:, ids])
    for ids in ([-1], [331], [0, 10**9]):
        with pytest.raises(IndexError, match="330"):
            bound.logits(hidden, torch.tensor(ids))
    best, hidden = bound.argmax(hidden), hidden.clone()
    assert torch.equal(best, everything.cpu().argmax(1))
    hidden[1, 5] = torch.nan
    assert bound.argmax(hidden).tolist() == [best[0], -1, best[2]]


def test_nothing_to_do(bind, opened: Open) -> None:
    """A step of no rows launches nothing."""
    config, _ = opened("llama-Q4_0")
    bound = bind("llama-Q4_0", "a8g32")
    pages = PagedKV(config, 1, device=device())
    hidden = bound.run(plan_all(bound, [[5]], pages))[:0]
    assert bound.argmax(hidden).shape == (0,)
    assert bound.logits(hidden).shape == (0, 331)


def test_what_a_token_reads(bind) -> None:
    """Bytes of the packed matrices: half a byte a weight and its scales, the embedding only where it is the head."""
    bound = bind("llama-Q4_1-tied", "a8g32")
    # 331 rows fill 21 panels; 96 columns two units of 64.
    shapes = 2 * [(128, 64), (32, 64), (32, 64), (64, 128), (96, 64), (96, 64), (64, 128)] + [(336, 64)]
    assert bound.bytes_per_token == sum(rows * columns // 2 + rows * columns // 32 * 4 for rows, columns in shapes)
    assert bound.stream() > 0
