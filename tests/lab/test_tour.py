"""The tour's experiment on a tiny model: what is timed is computed, what does not depend on time repeats."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny import save_tiny, tiny_model

from nanokit.errors import ParameterError
from nanokit.lab import lock
from nanokit.lab.engines import engine_for
from nanokit.lab.experiments import tour as module
from nanokit.lab.experiments.tour import DECODED, TourParams, tour
from nanokit.lab.experiments.tuning import TuningParams, TuningStepper
from nanokit.lab.progress import StoppedError
from nanokit.lab.repeat import comparable
from nanokit.model.transformer import Transformer

TEMPLATE = "{% for m in messages %}<s>{{ m.role }} {{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = save_tiny(tmp_path_factory.mktemp("tour") / "tiny", tiny_model("llama"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    yield str(folder)
    engine_for.cache_clear()


@pytest.fixture(autouse=True)
def own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "lock_path", lambda: tmp_path / "measuring.lock")


def test_every_timed_prompt_is_computed(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up's prompt came again as the second repeat (random seeds -1 and 1 are one), and pressing Run again
    brought all of them again: with a prefix cache, prefill then looks three times as fast as it is."""
    engine = engine_for(tiny)
    seen = []
    generate = engine.generate

    def watched(prompts, sampling):  # type: ignore[no-untyped-def]
        done = generate(prompts, sampling)
        seen.extend((tuple(prompt), d.cached_tokens) for prompt, d in zip(prompts, done, strict=True))
        return done

    monkeypatch.setattr(engine, "generate", watched)
    p = TourParams(model=tiny, preset="smoke", prompt_tokens=128)
    for _ in range(2):
        tour(p)
    timed = [(prompt, cached) for prompt, cached in seen if len(prompt) == 128]
    assert len(timed) == 2 * (1 + p.repeats)
    assert {cached for _, cached in timed} == {0}
    assert len({prompt for prompt, _ in timed}) == 1 + p.repeats


def test_what_does_not_depend_on_time_repeats(tiny: str) -> None:
    p = TourParams(model=tiny, preset="smoke", temperature=0.9, seed=3)
    first, again = tour(p), tour(p)
    a, b = (comparable({"metrics": r.metrics, "samples": r.samples, "texts": r.texts}) for r in (first, again))
    assert a == b
    assert "text answer" in a
    assert len(first.samples["decode_ms_per_token"]) == p.repeats * DECODED


def test_a_busy_machine_gets_fewer_repeats_and_a_remark(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`quick` promises a minute; ten times slower steps must not make it ten."""
    monkeypatch.setattr(module, "TIMING_S", {"smoke": 0.0})
    result = tour(TourParams(model=tiny, preset="smoke", repeats=9))
    assert len(result.samples["prefill_tok_per_s"]) == 2
    assert "2 of 9 repeats: the time of the preset was over" in result.remarks


def test_a_limit_that_is_beaten_is_remarked(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the weights cannot take longer than decoding with them: a share above 1 is a fault of measurement."""
    monkeypatch.setattr(Transformer, "stream", lambda _: 1e9)
    result = tour(TourParams(model=tiny, preset="smoke"))
    assert result.metrics["decode_limit_share"] > 1
    assert any("faster than memory allows" in remark for remark in result.remarks)


def test_stop_is_heard_between_repeats(tiny: str) -> None:
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(StoppedError):
        tour(TourParams(model=tiny, preset="smoke"), cancel=cancel)
    engine_for(tiny).check_integrity()


def test_parameters_out_of_range_are_refused() -> None:
    with pytest.raises(ParameterError, match="prompt_tokens"):
        TourParams(prompt_tokens=4)


def test_a_live_answer_is_steered_between_two_tokens(tiny: str) -> None:
    """max_tokens and temperature lowered while it runs take effect; closing the iterator frees the request."""
    stepper = TuningStepper()
    p = TuningParams(model=tiny, question="ab", temperature=2.0, top_p=1.0, max_tokens=40)
    steps = stepper.start(p)
    for _ in range(5):
        next(steps)
    stepper.update(TuningParams(model=tiny, question="ab", temperature=0.0, max_tokens=8))
    assert sum(event.tokens for event in steps) <= 3
    another = stepper.start(p)
    next(another)
    assert engine_for(tiny).scheduler.has_work
    another.close()
    assert not engine_for(tiny).scheduler.has_work
