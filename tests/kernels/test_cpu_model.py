"""Whole models in C: against the reference in the same activation mode, and bit for bit against themselves.

How the two backends are compared. A rounding difference of 1e-7 in a norm moves a number across the middle between two
codes now and then; that code differs by one, and from there on the row by part of what quantization costs it. So
equality to float rounding holds for every row in which no code tipped over, and for no other. With eight bits that is
nearly every row of a short text: asserted are 85 % to 1e-5 of the logits' spread, and the mean of all to a fifth of the
mode's own effect. (`tensor` scales a whole step by one number, whose last bit touches every row: there the mean only.)
In a16 some code tips over in every row, and each is a 65,000th: asserted is 1e-3.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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

from nanokit.errors import ParameterError
from nanokit.kernels import cpu, reference
from nanokit.kernels.activations import no_peaks, note_peak
from nanokit.kernels.cpu.bound import KV_FORMATS, MODES, Bound
from nanokit.kernels.cpu.library import Library
from nanokit.kv.pages import BLOCK_SIZE, PagedKV
from nanokit.model.batch import Batch
from nanokit.model.load import open_model
from nanokit.model.weights import find_weights

K_TYPES = {
    "token_embd": "Q6_K", "attn_q": "Q2_K", "attn_k": "Q3_K", "attn_v": "Q4_K", "attn_output": "Q5_K",
    "ffn_gate": "Q6_K", "ffn_up": "IQ4_XS", "ffn_down": "Q4_K", "output": "Q5_K",
}  # fmt: skip
MIXED = {
    "token_embd": "Q8_0", "attn_q": "Q4_0", "attn_k": "Q4_1", "attn_v": "Q8_0", "attn_output": "Q5_0",
    "ffn_gate": "IQ4_NL", "ffn_up": "MXFP4", "ffn_down": "Q5_1", "output": "Q4_0",
}  # fmt: skip
FILES: dict[str, tuple[str, bool, str | Mapping[str, str]]] = {
    "llama-Q4_0": ("llama", False, "Q4_0"),
    "llama-Q4_1-tied": ("llama", True, "Q4_1"),
    "llama-Q8_0-tied": ("llama", True, "Q8_0"),
    "qwen2-Q5_0": ("qwen2", False, "Q5_0"),
    "qwen2-Q5_1-tied": ("qwen2", True, "Q5_1"),
    "qwen3-mixed": ("qwen3", False, MIXED),
    "qwen3-K-tied": ("qwen3", True, K_TYPES),
    "llama-K": ("llama", False, K_TYPES),
}
Bind = Callable[..., Bound]
Open = Callable[[str], tuple]
properties = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="session")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Open:
    """Configuration and weights of one of FILES."""
    folder = tmp_path_factory.mktemp("compiled")

    @lru_cache
    def open_file(name: str) -> tuple:
        architecture, tied, types = FILES[name]
        columns = 256 if types is K_TYPES else 64
        path = save_tiny_gguf(folder / f"{name}.gguf", compiled_model(architecture, tied=tied, columns=columns),
                              types=types)  # fmt: skip
        return opened_file(path)

    return open_file


def opened_file(path: Path) -> tuple:
    source = open_model(path)
    return source.config, find_weights(source.config, source)


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


def calibrate(bound: Bound | reference.Bound, config: object) -> Tensor:
    """Peaks from a text, a tenth lower, so that some activations are clipped."""
    peaks = no_peaks(config.num_layers)
    texts = tokens(1, 60, seed=9)
    hidden = bound.run(plan_all(bound, texts, PagedKV(config, 1)), peaks)
    note_peak(peaks, 4 * config.num_layers, hidden)
    bound.calibrate(0.9 * peaks)
    return peaks


def tokens(count: int, length: int, seed: int = 0) -> list[list[int]]:
    return torch.randint(0, 331, (count, length), generator=torch.Generator().manual_seed(seed)).tolist()


def plan_all(bound: Bound | reference.Bound, texts: list[list[int]], pages: PagedKV) -> object:
    """Whole texts in one step, each in blocks of its own."""
    each = -(-max(map(len, texts)) // BLOCK_SIZE)
    lengths = [len(text) for text in texts]
    tables = [list(range(each * i, each * (i + 1))) for i in range(len(texts))]
    return bound.plan(Batch([token for text in texts for token in text], lengths, lengths, tables), pages)


def logits_of(
    bound: Bound | reference.Bound, config: object, texts: list[list[int]], kv_format: str = "fp32"
) -> Tensor:
    pages = PagedKV(config, len(texts) * -(-max(map(len, texts)) // BLOCK_SIZE), kv_format)
    return bound.logits(bound.run(plan_all(bound, texts, pages)))


@pytest.mark.parametrize("name", FILES)
def test_equals_the_reference_in_the_same_mode(bind: Bind, opened: Open, name: str) -> None:
    """A layer's input left as it was or quantized twice, a norm, bias or residual lost, another place's peak, rows of q
    and k in the file's order instead of ours: see the module for how close is equal."""
    config, weights = opened(name)
    texts = tokens(24, 6)
    plain = logits_of(reference.bind(config, weights), config, texts)
    size = plain.std()
    for mode in MODES:
        theirs = reference.bind(config, weights, activations=mode)
        if mode == "static":
            theirs.calibrate(bind(name, mode).peaks)
        wanted, got = logits_of(theirs, config, texts), logits_of(bind(name, mode), config, texts)
        assert got.shape == (144, 331)
        error, effect = (got - wanted).abs(), (wanted - plain).abs()
        if mode == "a16":
            assert error.max() < 1e-3 * size
            assert (got - plain).abs().mean() < 1e-4 * size
            continue
        assert error.mean() < 0.2 * effect.mean(), mode
        if mode != "tensor":
            assert (error.amax(1) < 1e-5 * size).float().mean() > 0.85, mode


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_pages_of_every_format_are_the_references(bind: Bind, opened: Open, kv_format: str) -> None:
    """Rows attend to what the page holds: fp16 or int8 that the one rounds and the other does not shows here."""
    config, weights = opened("qwen3-mixed")
    texts = tokens(3, 150)
    wanted = logits_of(reference.bind(config, weights, activations="a16"), config, texts, kv_format)
    got = logits_of(bind("qwen3-mixed", "a16"), config, texts, kv_format)
    assert (got - wanted).abs().mean() < {"fp32": 1e-4, "fp16": 2e-4, "int8": 2e-3}[kv_format] * wanted.std()


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


@dataclass(frozen=True)
class Text:
    ids: list[int]
    table: list[int]


def step(bound: Bound, pages: PagedKV, parts: list[tuple[Text, int, int]]) -> list[Tensor]:
    """Hidden states of the tokens first ... end - 1 of each text."""
    batch = Batch(
        [token for text, first, end in parts for token in text.ids[first:end]],
        [end - first for _, first, end in parts],
        [end for _, _, end in parts],
        [text.table for text, _, _ in parts],
    )
    batch.check(vocab_size=331, num_blocks=pages.num_blocks, block_size=BLOCK_SIZE)
    return list(bound.run(bound.plan(batch, pages)).split(batch.query_lens))


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
    pages = PagedKV(config, 20, kv_format)
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
        [expected] = step(whole, PagedKV(config, len(text.table), kv_format), [(alone, 0, len(text.ids))])
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
