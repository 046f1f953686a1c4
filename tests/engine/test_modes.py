"""Activation modes by request: each answer is what it would be alone in its mode, and KV of two modes never meets.

The scripted model stores the mode beside each token, so that a page of another mode changes the answer; the compiled
tiny models show that the mode really is the kernels', bit for bit.
"""

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import VOCAB, ScriptedModel, make_engine, next_logits
from tiny import compiled_model, save_tiny, save_tiny_gguf, tiny_model

from nanokit.engine import load as load_module
from nanokit.engine.load import LoadedEngine, load
from nanokit.engine.sampling import Sampling
from nanokit.errors import ParameterError, RequestError
from nanokit.kernels.activations import MODES
from nanokit.kernels.gpu import runtime
from nanokit.kv.pages import PagedKV
from nanokit.kv.pool import BlockPool
from nanokit.kv.prefix import PrefixCache
from nanokit.model.batch import Batch

GREEDY = Sampling(max_tokens=6, ignore_eos=True)
INTEGER = MODES[1:]  # of the C kernels
PROMPTS = [[5, 9, 2, 7] * 20, [7], list(range(70)), [3] * 65, [8, 1], [200, 100]]


def asked(mode: str | None, **changes: Any) -> Sampling:
    return dataclasses.replace(GREEDY, activations=mode, **changes)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_gguf(tmp_path_factory.mktemp("modes") / "tiny.gguf", compiled_model("llama"), types="Q4_1")


# -- the scheduler, with a scripted model -----------------------------------------------------------------------------


def expected(prompt: list[int], count: int, spans: list[tuple[int, int]]) -> list[int]:
    """Greedy tokens when KV from token `first` on is written in mode `number`, for each (first, number) of spans."""
    tokens = list(prompt)
    for _ in range(count):
        modes = [[number for first, number in spans if first <= i][-1] for i in range(len(tokens))]
        history = [token + VOCAB * number for token, number in zip(tokens, modes, strict=True)]
        tokens.append(int(next_logits(history).argmax()))
    return tokens[len(prompt) :]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_answers_of_mixed_modes_are_those_of_each_alone(seed: int) -> None:
    """Requests of several modes over common prompts, a pool too small for all, modes that change on the way: a page of
    another mode that is hit, a chunk computed in the mode of a neighbour, a preempted answer or half of a prompt
    computed again in the mode that it has by now, all give another token."""
    rng = random.Random(seed)
    engine = make_engine(num_blocks=rng.choice([8, 10, 12, 40]), max_seqs=4, token_budget=rng.choice([5, 9, 64]))
    stem = [rng.randrange(30) for _ in range(20)]
    prompts = [stem[: rng.randrange(1, 21)] + [rng.randrange(30)] * rng.randrange(3) for _ in range(6)]
    starts = [rng.randrange(3) for _ in prompts]
    spans = [[(0, number)] for number in starts]
    ids = [engine.add(p, asked(MODES[number])) for p, number in zip(prompts, starts, strict=True)]
    done: dict[int, list[int]] = {}
    drawn, computed = dict.fromkeys(ids, 0), dict.fromkeys(ids, 0)  # computed: ever, of what has not drawn yet
    while engine.has_work:
        for chunk in engine.step():
            drawn[chunk.request_id] += len(chunk.token_ids)
            if chunk.completion:
                done[chunk.request_id] = chunk.completion.token_ids
        for request in engine.scheduler.running:
            computed[request.id] = max(computed[request.id], request.num_computed)
        own = rng.randrange(len(ids))
        if rng.random() < 0.3 and ids[own] not in done:
            number, count = rng.randrange(3), drawn[ids[own]]
            assert engine.update(ids[own], asked(MODES[number]))
            spans[own].append((len(prompts[own]) + count - 1 if count else computed[ids[own]], number))
    for own, prompt in enumerate(prompts):
        assert done[ids[own]] == expected(prompt, 6, spans[own])


def test_a_mode_that_is_the_engines_own_shares_its_batches_and_pages() -> None:
    """Spelled out or not, it is the same computation: one forward, and one entry in the cache."""
    engine = make_engine()
    engine.generate([[1] * 9, [2] * 9], [asked(None), asked(engine.model.activations)])
    assert not engine.model.others
    assert engine.model.batches[0].query_lens == [9, 9]
    assert engine.generate([[2] * 9], asked(None))[0].cached_tokens == 8


def test_a_mode_that_changes_in_the_middle_of_a_prompt_holds_from_there() -> None:
    """Half of the prompt is in its pages; they stay, and nobody else gets the second half's."""
    engine = make_engine(token_budget=16, max_seqs=2)
    prompt = [i % 30 for i in range(30)]
    own = engine.add(prompt, asked("fp32"))
    engine.step()
    engine.update(own, asked("token"))
    [done] = [chunk.completion for _ in range(9) for chunk in engine.step() if chunk.completion]
    assert done.token_ids == expected(prompt, 6, [(0, 0), (16, MODES.index("token"))])
    for mode, cached in (("fp32", 16), ("token", 0)):
        [again] = engine.generate([prompt], asked(mode))
        assert again.cached_tokens == cached
        assert again.token_ids == expected(prompt, 6, [(0, MODES.index(mode))])


def test_a_mode_changed_and_changed_back_at_once_changes_nothing() -> None:
    engine = make_engine()
    own = engine.add([1] * 9, asked(None))
    engine.step()
    engine.update(own, asked("token"))
    engine.update(own, asked(None))
    while engine.has_work:
        engine.step()
    assert engine.generate([[1] * 9 + expected([1] * 9, 6, [(0, 0)])], asked(None))[0].cached_tokens == 12


@pytest.mark.parametrize("own", ["fp32", "tensor"])
def test_pages_that_depend_on_batch_mates_are_not_shared(own: str) -> None:
    """Tensor's scale is that of the step, so another request would get what this one's neighbours made of the prompt:
    by request, as the engine's own mode, and before a change of the mode."""
    model = ScriptedModel()
    model.activations = own
    engine = make_engine(token_budget=8, max_seqs=2, model=model)
    asks = asked("tensor"), asked("tensor" if own == "fp32" else None)
    for sampling in (*asks, *asks):
        assert engine.generate([[1] * 9], sampling)[0].cached_tokens == 0
    changed = engine.add([2] * 17, asks[1])
    engine.step()
    engine.update(changed, asked("token"))
    while engine.has_work:
        engine.step()
    assert engine.scheduler.prefix.num_cached == 0
    assert [engine.generate([[1] * 9], asked("token"))[0].cached_tokens for _ in range(2)] == [0, 8]


@pytest.mark.parametrize("hash_function", [lambda parent, tokens: 0, lambda parent, tokens: hash((parent, tokens))])
def test_chains_of_two_salts_are_strangers(hash_function) -> None:
    """The hash does not know the salt, so equal tokens always collide: the comparison has to tell them apart."""
    pool = BlockPool(8)
    cache = PrefixCache(pool, 2, hash_function)
    tables = {salt: [pool.allocate(), pool.allocate()] for salt in ("", "static")}
    for salt, table in tables.items():
        assert cache.match([1, 2, 3, 4, 5], salt) == []
        cache.register(None, [1, 2, 3, 4], table, salt)
    for salt, table in tables.items():
        assert [node.block for node in cache.match([1, 2, 3, 4, 5], salt)] == table
    cache.check_integrity()
    cache.match([1, 2, 3, 4, 5], "static")[1].salt = ""
    with pytest.raises(AssertionError, match="two salts"):
        cache.check_integrity()


def test_a_cleared_cache_keeps_what_is_held() -> None:
    pool = BlockPool(4)
    cache = PrefixCache(pool, 2)
    held = [pool.allocate(), pool.allocate()]
    cache.register(None, [1, 2, 3, 4], held)
    loose = [pool.allocate()]
    cache.register(None, [5, 6], loose)
    pool.release(loose)
    cache.clear()
    cache.check_integrity()
    pool.check_integrity([held])
    assert (cache.num_cached, pool.available) == (0, 2)


# -- the kernels ------------------------------------------------------------------------------------------------------


def hidden(engine: LoadedEngine, mode: str, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    model = engine.model.in_mode(mode)
    pages = PagedKV(model.config, 2, "fp16", model.device)
    found = model.forward(Batch(ids, [len(ids)], [len(ids)], [[0, 1]]), pages)
    return found, model.head.logits(found)


def test_peaks_are_of_the_model_whatever_mode_they_are_set_or_asked_in(file: Path) -> None:
    """A model in a mode that kept modes of its own would not know them, and an engine over it would be uncalibrated."""
    for own in ("a8g32", "fp32", "static"):
        engine = load(file, ctx=256, activations=own, kv_format="fp16")
        peaks = torch.full_like(load(file, ctx=64, activations="static").model.peaks, 3.0)
        engine.model.in_mode("token").calibrate(peaks)
        for path in (["static"], ["a16", "static"], ["static", "token", "static"]):
            model = engine.model
            for mode in path:
                model = model.in_mode(mode)
            assert torch.equal(model.peaks, peaks)
            assert torch.equal(engine.model.peaks, peaks)
            assert (model.activations, engine.model.activations) == ("static", own)


def test_a_calibration_text_is_refused_before_anything_is_forgotten_or_computed(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the context, where kernels have no scratch for it; and scales for pages that have none."""
    engine, scaled = load(file, ctx=128, max_seqs=4), load(file, ctx=128, max_seqs=4, kv_format="int8-static")
    for each in (engine, scaled):
        each.generate([PROMPTS[2]], GREEDY)
    monkeypatch.setattr(type(engine.model), "peaks_of", lambda *_: pytest.fail("a forward ran"))
    for calibrate in (engine.calibrate, scaled.calibrate, scaled.calibrate_kv):
        with pytest.raises(RequestError, match=r"(?s)129 tokens.*at most 128"):
            calibrate([1] * 129)
    with pytest.raises(ParameterError, match="only int8-static"):
        engine.calibrate_kv(PROMPTS[0])
    assert engine.scheduler.prefix.num_cached == scaled.scheduler.prefix.num_cached == 1


@pytest.mark.parametrize("mode", INTEGER)
def test_the_compiled_model_in_a_mode_is_the_model_loaded_in_it(file: Path, mode: str) -> None:
    """Hidden states and logits, whose input is quantized as well: the same bits from one packing of the weights."""
    engine = load(file, ctx=256, activations="a16" if mode != "a16" else "token")
    engine.calibrate()
    for got, wanted in zip(
        hidden(engine, mode, PROMPTS[2]), hidden(load(file, ctx=256, activations=mode), mode, PROMPTS[2]), strict=True
    ):
        assert torch.equal(got, wanted)


def test_a_batch_of_all_modes_answers_as_each_alone(file: Path) -> None:
    """Two steps more than one page long, drawn as well as greedy; with requests of the same mode beside each other."""
    engine = load(file, ctx=256, token_budget=48)
    engine.calibrate()
    modes = [*INTEGER, "a16", "static", None]
    samplings = [asked(mode, temperature=0.8, seed=i) for i, mode in enumerate(modes)]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(modes))]
    together = [each.token_ids for each in engine.generate(prompts, samplings)]
    for mode, prompt, sampling, found in zip(modes, prompts, samplings, together, strict=True):
        alone = load(file, ctx=256, token_budget=48, activations=mode, prefix_cache=False)
        own = dataclasses.replace(sampling, activations=None)
        if mode != "tensor":  # whose scale is that of the chunk, and chunks depend on who else is there
            assert alone.generate([prompt], own)[0].token_ids == found
    assert len({tuple(ids) for ids in together}) == len(together)
    engine.check_integrity()


def test_a_prompt_cached_in_one_mode_is_computed_in_another(file: Path) -> None:
    """Pages hold what the mode made of the prompt: handed to another mode they would change its answer unseen."""
    engine = load(file, ctx=256)
    engine.calibrate()
    prompt = PROMPTS[2]
    for mode in INTEGER:
        again = 0 if mode == "tensor" else 64
        assert [engine.generate([prompt], asked(mode))[0].cached_tokens for _ in range(2)] == [0, again]
    engine.calibrate(PROMPTS[0])
    again, fresh = engine.generate([prompt], asked("static"))[0], load(file, ctx=256, activations="static")
    assert again.cached_tokens == 0
    fresh.calibrate(PROMPTS[0])
    assert torch.equal(engine.model.peaks, fresh.model.peaks)
    assert fresh.generate([prompt], GREEDY)[0].token_ids == again.token_ids


def test_an_engine_in_fp32_computes_every_mode(file: Path) -> None:
    engine = load(file, ctx=256, activations="fp32", kv_format="fp16")
    engine.calibrate()
    exact, rounded = (hidden(engine, mode, PROMPTS[0])[1] for mode in ("fp32", "a8g32"))
    assert not torch.equal(exact, rounded)
    compiled = hidden(load(file, ctx=256), "a8g32", PROMPTS[0])[1]
    assert (rounded - compiled).abs().mean() < 0.2 * (rounded - exact).abs().mean()
    assert len(engine.generate(PROMPTS[:3], [asked(mode) for mode in ("a16", "token", None)])) == 3


def test_modes_that_an_engine_cannot_run_are_refused_by_name(file: Path, tmp_path: Path) -> None:
    """Where the request enters, and nothing is queued; `update` refuses alike."""
    with pytest.raises(ParameterError, match=r"(?s)activation mode.*'int8'.*a8g32"):
        asked("int8")
    engine = load(file, ctx=64)
    running = engine.add([1], GREEDY)
    for mode, why in (
        ("fp32", r'(?s)fp32 activations.*whole numbers.*activations="fp32"'),
        ("static", "(?s)static.*calibrate"),
    ):
        with pytest.raises(RequestError, match=why):
            engine.generate([[1], [2]], [GREEDY, asked(mode)])
        with pytest.raises(RequestError, match=why):
            engine.update(running, asked(mode))
    assert len(engine._requests) == 1
    with pytest.raises(RequestError, match="1 requests"):
        engine.calibrate()
    engine.abort(running)
    with pytest.raises(RequestError, match="pool"):
        engine.calibrate([1] * (engine.pool.num_blocks * 64 + 1))
    odd = load(save_tiny(tmp_path / "odd", tiny_model("llama")), activations="fp32", ctx=64)
    with pytest.raises(RequestError, match=r"(?s)a8g32.*60 columns"):
        odd.generate([[1]], asked("a8g32"))
    assert len(odd.generate([[1]], asked("token"))[0].token_ids) == 6


@pytest.mark.skipif(not runtime.INTERPRETED, reason="this process compiles kernels for a GPU")
@pytest.mark.filterwarnings("ignore:.*runs in Triton's interpreter")
def test_the_gpus_kernels_take_a_mode_by_request(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter: the mode of one of two requests, the peaks of static on the device; and fp32, which C
    lacks."""
    monkeypatch.setattr(load_module, "CALIBRATION_TOKENS", 2)
    options: dict[str, Any] = {"device": "interpreter", "ctx": 64, "max_seqs": 2}
    engine, alone = load(file, **options), load(file, activations="static", **options)
    engine.calibrate()
    [found, _] = engine.generate([[9], [7]], [asked("static", max_tokens=1), asked(None, max_tokens=1)])
    assert alone.generate([[9]], Sampling(max_tokens=1, ignore_eos=True))[0].token_ids == found.token_ids
    assert engine.model.in_mode("fp32").activations == "fp32"
