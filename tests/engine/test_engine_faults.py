"""Failures in the middle of a step, interrupts, and several threads on one engine."""

import threading

import numpy as np
import pytest
import torch
from scripted import VOCAB, LetterDecoder, make_engine, next_logits, run, script, solo

from nanokit.engine.request import FinishReason, Request
from nanokit.engine.sampling import Sampling
from nanokit.engine.scheduler import Scheduler
from nanokit.engine.text import AnswerText
from nanokit.errors import NanokitError, TokenizerError

WARM = Sampling(temperature=1.0, seed=11, max_tokens=20)


def test_a_row_that_turns_to_nan_fails_its_own_request_only():
    def poisoned(history):
        row = next_logits(history)
        return row * np.nan if history[0] == 13 and len(history) > 5 else row

    engine = make_engine(poisoned)
    good, bad = engine.add([1, 2, 3], WARM), engine.add([13, 2, 3], WARM)
    done = run(engine)
    assert done[good].token_ids == solo([1, 2, 3], WARM)
    assert done[bad].finish_reason is FinishReason.ERROR
    with pytest.raises(NanokitError, match="not a number"):
        engine.generate([[1, 2], [13]], WARM)
    assert engine.pool.held == 0
    assert not engine.has_work


@pytest.mark.parametrize("exception", [RuntimeError, KeyboardInterrupt])
def test_an_exception_in_the_forward_leaves_a_usable_engine(exception):
    engine = make_engine()
    other = engine.add([4, 5, 6], WARM)
    forward, calls = engine.model.forward, []

    def failing(batch, kv):
        calls.append(batch)
        if len(calls) == 3:
            raise exception("as scripted")
        return forward(batch, kv)

    engine.model.forward = failing
    with pytest.raises(exception):
        engine.generate([[1, 2, 3]], WARM)
    engine.check_integrity()
    assert run(engine)[other].token_ids == solo([4, 5, 6], WARM)
    assert engine.pool.held == 0


@pytest.mark.parametrize("call", [2, 4, 5, 6])
@pytest.mark.parametrize("place", ["accept", "commit", "push"])
def test_an_interrupt_after_the_forward_leaves_other_requests_right(monkeypatch, place, call):
    """The interrupt of a notebook hits its own request's thread anywhere; a request of another thread that counted as
    computed without its token would draw the next one from a neighbour's row."""
    owner = {"accept": Request, "commit": Scheduler, "push": AnswerText}[place]
    engine = make_engine()
    other = engine.add([4, 5, 6], WARM)
    whole, calls = getattr(owner, place), []

    def interrupted(self, *args):
        calls.append(args)
        if len(calls) == call:
            raise KeyboardInterrupt
        return whole(self, *args)

    monkeypatch.setattr(owner, place, interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1, 2, 3], [7]], WARM)
    engine.check_integrity()
    assert run(engine)[other].token_ids == solo([4, 5, 6], WARM)
    assert engine.pool.held == 0


def test_a_token_that_the_tokenizer_does_not_know_fails_its_own_request_only(monkeypatch):
    """A model with more rows than its tokenizer has tokens may draw one."""

    def unknown(self, token_id):
        if token_id == 5:
            raise TokenizerError("a token id is outside of the vocabulary", found=token_id)
        return "x"

    monkeypatch.setattr(LetterDecoder, "push", unknown)
    engine = make_engine(lambda history: np.eye(VOCAB, dtype=np.float32)[5 if history[0] == 13 else 6])
    good, bad = engine.add([1], Sampling(max_tokens=3)), engine.add([13], Sampling(max_tokens=3))
    chunks = [chunk for _ in range(4) for chunk in engine.step()]
    ends = {chunk.request_id: chunk for chunk in chunks if chunk.completion}
    assert ends[good].completion.text == "xxx"
    assert ends[bad].finish_reason is FinishReason.ERROR
    assert isinstance(ends[bad].error, TokenizerError)
    assert engine.pool.held == 0


def test_threads_share_an_engine_and_each_gets_its_own_answers():
    engine = make_engine()
    prompts = [[i, i + 1, i + 2] for i in range(12)]
    added = engine.add([30, 31], WARM)
    got: dict[int, list[int]] = {}

    def ask(index: int) -> None:
        if index % 2:
            got[index] = engine.generate([prompts[index]], WARM)[0].token_ids
        else:
            got[index] = [token for chunk in engine.stream(prompts[index], WARM) for token in chunk.token_ids]

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert got == {index: solo(prompt, WARM) for index, prompt in enumerate(prompts)}
    # Chunks of a request that was added wait for step(), whoever drove the engine meanwhile.
    assert run(engine)[added].token_ids == solo([30, 31], WARM)


def test_a_stream_read_or_closed_by_several_threads_ends_for_each_of_them():
    """Whoever takes the last chunk must not leave the other readers waiting for one more, for ever."""
    engine = make_engine(script([0], 1), max_context=2000, num_blocks=600)
    for close_early in (False, True):
        stream = engine.stream([9], Sampling(max_tokens=300))
        got: list[list[int]] = [[], [], []]

        def read(index: int) -> None:
            for chunk in stream:  # noqa: B023 - the threads end before the next round
                got[index] += chunk.token_ids  # noqa: B023

        threads = [threading.Thread(target=read, args=(index,), daemon=True) for index in range(3)]
        for thread in threads:
            thread.start()
        if close_early:
            stream.close()
        for thread in threads:
            thread.join(timeout=30)
        assert not any(thread.is_alive() for thread in threads)
        assert close_early or sum(map(len, got)) == 300
        assert engine.pool.held == 0
        assert engine._inboxes == {}


def test_two_engines_side_by_side_do_not_meet():
    one, two = make_engine(), make_engine(script([0, 1, 38], 2))
    first, second = one.stream([1, 2], WARM), two.stream([1, 2])
    interleaved = [next(first), next(second), next(first), next(second)]
    assert [chunk.token_ids[0] for chunk in interleaved[1::2]] == [0, 1]
    assert [chunk.token_ids[0] for chunk in interleaved[::2]] == solo([1, 2], WARM)[:2]


def test_the_engine_enters_inference_mode_itself():
    engine = make_engine()
    forward, seen = engine.model.forward, []
    engine.model.forward = lambda batch, kv: (
        seen.append(torch.is_inference_mode_enabled()),
        forward(batch, kv),
    )[1]
    thread = threading.Thread(target=lambda: engine.generate(["abc"], Sampling(max_tokens=2)))
    thread.start()
    thread.join(timeout=30)
    assert seen == [True, True]
    assert not torch.is_inference_mode_enabled()
