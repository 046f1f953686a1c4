"""A running engine from outside: settings that change, aborts, streams left early, and what it refuses."""

import gc
import threading
import time

import pytest
from scripted import VOCAB, make_engine, script

from nanokit.engine.request import FinishReason
from nanokit.engine.sampling import Sampling
from nanokit.engine.turns import TurnLock
from nanokit.errors import ParameterError, RequestError

# --- live control ---


def test_settings_change_between_steps_of_a_running_request():
    engine = make_engine(script([0], 1))
    stream = engine.stream([9], Sampling(max_tokens=50))
    assert next(stream).token_ids == (0,)
    assert engine.update(stream.request_id, Sampling(suppress=(0,), max_tokens=50))
    assert next(stream).token_ids == (1,)
    assert engine.update(stream.request_id, Sampling(max_tokens=3))
    assert next(stream).finish_reason is FinishReason.LENGTH
    assert engine.update(stream.request_id, Sampling()) is False
    stream = engine.stream([9], Sampling(max_tokens=50))
    next(stream)
    assert engine.update(stream.request_id, Sampling(max_tokens=50, stop="aa"))
    assert [next(stream).text, next(stream).finish_reason] == ["", FinishReason.STOP]


def test_an_update_cannot_smuggle_in_what_add_would_refuse():
    engine = make_engine(num_blocks=3)
    request = engine.add([1, 2], Sampling(max_tokens=5, seed=4))
    for sampling in (Sampling(max_tokens=50), Sampling(suppress=(VOCAB,)), Sampling(seed=5), {"top_k": 3}):
        with pytest.raises(RequestError):
            engine.update(request, sampling)
    assert engine.update(request, Sampling(max_tokens=6, seed=4))
    with pytest.raises(RequestError, match="no such request"):
        engine.update(99, Sampling())


@pytest.mark.parametrize("steps", [0, 1, 2, 4, 7], ids=["waiting", "chunk", "chunk", "chunk", "decoding"])
def test_an_abort_at_any_stage_gives_every_block_back(steps):
    """vLLM #46283, SGLang #20182: KV leaked on abort."""
    engine = make_engine(token_budget=4, max_seqs=2)
    request = engine.add([2] * 14, Sampling(max_tokens=30, ignore_eos=True))
    for _ in range(steps):
        engine.step()
    assert engine.abort(request)
    engine.check_integrity()
    assert engine.pool.held == 0
    chunks = engine.step()
    assert [chunk.finish_reason for chunk in chunks] == [FinishReason.ABORT]
    assert not engine.has_work
    assert engine.abort(request) is False


def test_a_stream_that_is_left_early_aborts_its_request():
    engine = make_engine()
    for chunk in engine.stream([1, 2, 3], Sampling(max_tokens=50, ignore_eos=True)):
        assert chunk.text
        break
    gc.collect()
    with engine.stream([1, 2, 3], Sampling(max_tokens=50, ignore_eos=True)) as stream:
        next(stream)
    unstarted = engine.stream([1], Sampling(max_tokens=50))
    unstarted.close()
    assert list(unstarted) == list(stream) == []
    engine.stream([1])  # dropped at once, never started
    gc.collect()
    assert engine.step() == []
    assert not engine.has_work
    assert engine.pool.held == 0
    assert engine._inboxes == {}


def test_an_abort_from_outside_ends_a_stream_with_what_was_drawn():
    """A stop button: the reader of the stream gets its last chunk, not a hang."""
    engine = make_engine(script([0], 1))
    stream = engine.stream([9], Sampling(max_tokens=50))
    next(stream)
    assert engine.abort(stream.request_id)
    last = next(stream)
    assert (last.finish_reason, last.completion.text) == (FinishReason.ABORT, "a")
    assert list(stream) == []


def test_an_abort_from_another_thread_ends_generate():
    engine = make_engine(script([0], 1), max_context=5000, num_blocks=2000)
    forward = engine.model.forward

    def aborting(batch, kv):
        if len(engine.model.batches) == 3:
            thread = threading.Thread(target=engine.abort, args=(0,))  # blocks until this step is over
            thread.start()
            threads.append(thread)
        return forward(batch, kv)

    threads: list[threading.Thread] = []
    engine.model.forward = aborting
    completion = engine.generate([[9]], Sampling(max_tokens=4000))[0]
    assert completion.finish_reason is FinishReason.ABORT
    assert 3 <= len(completion.token_ids) < 4000
    threads[0].join(timeout=30)


def test_a_thread_that_waits_gets_the_next_turn():
    """With a plain lock the stepping loop wins it back many times before a slider's update gets in."""
    lock, order = TurnLock(), []
    entered, waiting = threading.Event(), threading.Event()

    def wait_for_turn() -> None:
        entered.wait()
        waiting.set()
        with lock:
            order.append("waited")

    thread = threading.Thread(target=wait_for_turn)
    thread.start()
    with lock, lock:  # re-entrant
        entered.set()
        waiting.wait()
        time.sleep(0.05)  # until it stands at the lock
    for _ in range(100):
        with lock:
            order.append("looped")
    thread.join(timeout=30)
    assert order[0] == "waited"


# --- refusals ---


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"), ([], "empty"), ([1, VOCAB], "outside the vocabulary"), ([-1], "outside the vocabulary"),
        ([1.5], "something else"), ([True], "something else"), (["a"], "something else"), (None, "text or a list"),
        (b"abc", "text or a list"), (7, "text or a list"), ([1] * 120, "longer than the context"),
        ([1] * 60, "never fit into the KV pool"),
    ],
)  # fmt: skip
def test_one_bad_prompt_leaves_nothing_running(prompt, message):
    engine = make_engine(num_blocks=12)
    with pytest.raises(RequestError, match=message):
        engine.generate(["abc", prompt, "def"], Sampling(max_tokens=5))
    with pytest.raises(RequestError, match=message):
        engine.stream(prompt, Sampling(max_tokens=5))
    assert not engine.has_work
    assert engine.pool.held == 0


def test_refusals_carry_numbers_and_a_way_out():
    with pytest.raises(RequestError) as caught:
        make_engine().generate([[1] * 300])
    assert "300" in str(caught.value)
    assert "119" in str(caught.value)
    assert "ctx" in caught.value.do


def test_a_request_that_fits_exactly_is_served():
    """The last token is drawn but never computed: 12 blocks of 4 hold 48 of 49 tokens."""
    engine = make_engine(num_blocks=12)
    sampling = Sampling(max_tokens=9, ignore_eos=True)
    assert len(engine.generate([[1] * 40], sampling)[0].token_ids) == 9
    with pytest.raises(RequestError, match="never fit"):
        engine.generate([[1] * 41], sampling)


def test_common_slips_in_generate_are_refused():
    """A string is a sequence of one-letter prompts; a list of ids is a list of bad prompts."""
    engine = make_engine()
    with pytest.raises(RequestError, match="list of prompts"):
        engine.generate("hello")
    with pytest.raises(RequestError, match="text or a list"):
        engine.generate([1, 2, 3])
    with pytest.raises(RequestError, match="2 samplings for 1"):
        engine.generate(["a"], [Sampling(), Sampling()])
    with pytest.raises(RequestError, match="all are suppressed"):
        engine.generate(["a"], Sampling(suppress=tuple(range(VOCAB))))
    with pytest.raises(ParameterError):
        Sampling(max_tokens=-1)
    assert not engine.has_work
