"""Broken copies of a model: that sharing passes between them changes no figure, and what verdicts follow from."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import save_tiny_gguf, tiny_model

from nanokit.errors import ParameterError
from nanokit.gguf.faults import FAULTS, inject
from nanokit.lab import lock, plots
from nanokit.lab.experiments.trap import TrapParams, trap
from nanokit.lab.experiments.trap_detectors import (
    ALONE,
    BESIDE,
    BOUND,
    CAUGHT,
    CIRCLE,
    FALSE,
    LOADS,
    MISSED,
    NOT_RUN,
    QUIET,
    ROPES,
    SLOW,
    UNSURE,
    detector_table,
    outcome,
    rule,
    rule_table,
)
from nanokit.lab.experiments.trap_files import good_file, predicted
from nanokit.lab.experiments.trap_params import GOOD, HALF_SCALE, ONE_LAYER, ROUNDED, WRONG_BASE, TrapFile, TrapsParams
from nanokit.lab.experiments.trap_result import TrapsResult, figures
from nanokit.lab.experiments.trap_verdicts import (
    verdict_q14,
    verdict_q15,
    verdict_q16,
    verdict_q21,
    verdict_t4,
    verdict_t5,
)
from nanokit.lab.experiments.traps import traps
from nanokit.lab.progress import CallbackProgress
from nanokit.lab.repeat import comparable
from nanokit.model.load import open_model
from nanokit.model.rope import Rope
from nanokit.model.source import GGUFSource
from nanokit.model.verify.report import Check
from nanokit.model.verify.run import verify
from nanokit.model.verify.variants import AS_IS
from nanokit.model.weights import find_weights


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With another rope base than 10,000, and a size that the C kernels take."""
    model = tiny_model("llama", tied=True, heads=8, kv_heads=2, hidden=64, head_dim=16, vocab=331,
                       rope_parameters={"rope_type": "default", "rope_theta": 5e4})  # fmt: skip
    return str(save_tiny_gguf(tmp_path_factory.mktemp("traps") / "tiny.gguf", model, types="Q4_1"))


def params(tiny: str = "", **changes: Any) -> TrapsParams:
    small: dict[str, Any] = {"preset": "smoke", "model": tiny, "faults": ["all"], "tokens": 40, "answer": 16}
    return TrapsParams.from_mapping(small | changes)


@pytest.fixture(scope="module")
def found(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrapsResult]:
    """All faults, put in once."""
    copies = tmp_path_factory.mktemp("copies")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lock, "lock_path", lambda: copies.parent / "measuring.lock")
        patch.setattr("tempfile.tempdir", str(copies))
        yield traps(params(tiny), progress=CallbackProgress(lambda *_: nothing_left(copies)))
    nothing_left(copies)


def nothing_left(folder: Path) -> None:
    """Copies of a real model are large: each has to be gone before the next one is written."""
    assert not list(folder.rglob("*.gguf")), "a copy is left behind"


@pytest.fixture(autouse=True)
def own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "lock_path", lambda: tmp_path / "measuring.lock")


# -- the experiment ---------------------------------------------------------------------------------------------------


def test_every_fault_is_put_in_and_caught_beside_the_good_file(found: TrapsResult) -> None:
    """A fault that is left out, or a good file that is accused, would make the notebook's table a wrong one."""
    assert list(found.files) == [GOOD, *FAULTS]
    assert not found.files[GOOD].failed()
    assert not found.files[GOOD].failed(beside=True)
    for file in found.faulty:
        assert outcome(found, BESIDE, file) == CAUGHT, file.name
        assert (file.losses is None) == bool(file.refused), file.name
        assert bool(file.answer) != bool(file.refused), file.name
    assert set(found.rope_of) == {GOOD, WRONG_BASE, HALF_SCALE}


@pytest.mark.parametrize("fault", [WRONG_BASE, HALF_SCALE, "q-k-permuted"])
def test_checks_and_losses_are_those_of_the_file_itself(
    fault: str, found: TrapsResult, tiny: str, tmp_path: Path
) -> None:
    """Verify's steps are called one by one, and wrong ropes run over the good file's weights: both have to give what
    the file gives by itself."""
    inject(fault, Path(tiny), tmp_path / "bad.gguf")
    source, file = open_model(tmp_path / "bad.gguf"), found.files[fault]
    assert isinstance(source, GGUFSource)
    assert file.alone == verify(tmp_path / "bad.gguf").checks
    beside = verify(tmp_path / "bad.gguf", open_model(tiny), long=False).checks
    assert list(file.beside) == [each for each in beside if not each.name.startswith("predictions")]
    losses = predicted(source, find_weights(source.config, source), good_file(tiny, "evaluation", 40).ids)
    assert file.losses is not None
    torch.testing.assert_close(file.losses, losses)


def test_everything_can_be_shown_and_repeats(found: TrapsResult, tiny: str) -> None:
    """Tables, figures and verdicts of all files and of few; what is no time is equal in a second run."""
    few = ["alignment-13", "rope-base-text", WRONG_BASE]
    again = traps(params(tiny, faults=few))
    assert list(again.files) == [GOOD, *(name for name in FAULTS if name in few)]
    whole, part = comparable(found.to_record()), comparable(again.to_record())
    assert {name for name, value in part.items() if whole.get(name) != value} <= {"param faults"}
    for result in (found, again):
        tables = (result.faults(), result.answers(), result.perplexities(), result.table(), result.rope_table())
        assert all(str(each) for each in (*tables, detector_table(result), rule_table(result)))
        for name in ("trap_detectors", "trap_undone", "trap_gates", "trap_positions"):
            fig = getattr(plots, name)(result)
            assert fig.data
            assert fig.layout.title.text
        for verdict in (verdict_q14, verdict_q15, verdict_q16, verdict_q21, verdict_t4, verdict_t5):
            assert verdict(result)
    assert "not measured: frequency-scale-half" in verdict_q14(again)
    assert "50000" in str(found.said(WRONG_BASE, beside=True))
    assert str(Path(tiny).parent) not in str(found.answers())


def test_one_fault_under_a_slider(tiny: str) -> None:
    """One that runs and one that is refused: figures of both, and a cost of the first only."""
    runs = trap(TrapParams(preset="smoke", model=tiny, fault=HALF_SCALE, tokens=32))
    assert runs.undone is not None
    assert runs.beside["rope scaling"].verdict == "failed"
    assert runs.alone["rope scaling"].verdict == "not checked"
    refused = trap(TrapParams(preset="smoke", model=tiny, fault="alignment-0"))
    assert refused.undone is None
    for result, name in ((runs, "rope scaling"), (refused, "alignment")):
        assert name in str(result.table())
        assert f"{name}" in plots.trap(result).layout.title.text


def test_what_cannot_be_looked_at_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="unknown text"):
        TrapsParams(text="nothing")
    with pytest.raises(ParameterError, match="unknown text"):
        TrapParams(text="nothing")
    with pytest.raises(ParameterError, match="faults"):
        TrapsParams(faults=["a-fault-that-there-is-not"])


# -- detectors and verdicts, on made-up files -------------------------------------------------------------------------


def check(name: str, verdict: Any, said: str = "") -> Check:
    return Check("meaning", name, verdict, said)


def made(name: str, cost: float = 0.0, late: float = 0.0, *, noise: float = 0.1, **fields: Any) -> TrapFile:
    """A file that runs, with `cost` nats more a token than the good one, and `late` more in the last quarter."""
    losses = (
        3 + cost + noise * torch.randn(400, generator=torch.Generator().manual_seed(len(name)), dtype=torch.float64)
    )
    losses[300:] += late
    given: dict[str, Any] = {"alone": (), "beside": (), "first_token_ms": 50.0, "losses": losses, "answer": "a"}
    return TrapFile(name, "", "", **(given | fields))


def result_of(*files: TrapFile, ropes: dict[str, float] | None = None, **settings: Any) -> TrapsResult:
    """ropes: of others that were tried on the good file's weights, by cost; a file of that name has that rope."""
    every = {file.name: file for file in (made(GOOD), *files)}
    own = every[GOOD].losses
    assert own is not None
    tried = {AS_IS: own, **{name: made(name, cost).losses for name, cost in (ropes or {}).items()}}
    metrics, samples = figures(every, own + 0.2)
    return TrapsResult(
        params(), metrics, samples, {"text_tokens": 401, "rope_base": 1e5, **settings}, files=every,
        ropes=dict.fromkeys(tried, Rope(1.0)), rope_losses=tried, override="no",
        rope_of={GOOD: AS_IS, **{name: name for name in every if name in tried}},
    )  # fmt: skip


def refused(name: str) -> TrapFile:
    return TrapFile(name, "", "it is broken", (check("x", "failed"),), (check("x", "failed"),))


def test_outcomes_follow_the_figures() -> None:
    """Silence is missed, rightly kept or admitted; nothing that does not run is counted as silent."""
    unsure = made(WRONG_BASE, 0.1, alone=(check("rope base", "not checked"),), beside=(check("rope base", "failed"),))
    found = result_of(
        unsure,
        made(ONE_LAYER, 1.0, circle_from=60.0, first_token_ms=801.0, alone=(check("l", "failed"),)),
        refused("alignment-0"),
        ropes={WRONG_BASE: 0.1},
    )
    by = {(each, name): outcome(found, each, found.files[name]) for name in found.files
          for each in (LOADS, SLOW, CIRCLE, BOUND, ALONE, ROPES, BESIDE)}  # fmt: skip
    assert [by[each, WRONG_BASE] for each in (LOADS, SLOW, CIRCLE, BOUND, ALONE, ROPES, BESIDE)] == [
        MISSED, MISSED, MISSED, MISSED, UNSURE, CAUGHT, CAUGHT,
    ]  # fmt: skip
    assert [by[each, ONE_LAYER] for each in (LOADS, SLOW, CIRCLE, BOUND, ALONE, ROPES, BESIDE)] == [
        MISSED, CAUGHT, CAUGHT, CAUGHT, CAUGHT, NOT_RUN, MISSED,
    ]  # fmt: skip
    assert [by[each, "alignment-0"] for each in (LOADS, SLOW, CIRCLE, BOUND, ALONE, ROPES, BESIDE)] == [
        CAUGHT, NOT_RUN, NOT_RUN, NOT_RUN, CAUGHT, NOT_RUN, CAUGHT,
    ]  # fmt: skip
    assert {by[each, GOOD] for each in (LOADS, SLOW, CIRCLE, BOUND, ALONE, ROPES, BESIDE)} == {QUIET}
    assert outcome(found, CIRCLE, replace(found.files[GOOD], circle_from=10.0)) == FALSE


def test_a_perplexity_that_is_no_number_is_an_alarm() -> None:
    """NaN is not above any bound, and must not pass as below it."""
    found = result_of(made(HALF_SCALE, math.nan))
    assert outcome(found, BOUND, found.files[HALF_SCALE]) == CAUGHT
    assert found.metrics[f"not_finite_{HALF_SCALE}"] == 400


def test_the_good_file_is_accused_by_a_rope_that_is_certainly_better() -> None:
    """Whatever a rope says of a file it would say of the good one as well."""
    assert outcome(result_of(ropes={"other": -0.5}), ROPES, made(GOOD)) == FALSE
    assert outcome(result_of(ropes={"other": 0.5}), ROPES, made(GOOD)) == QUIET


def test_rules_are_judged_by_what_they_are_said_to_mean() -> None:
    """An alarm on another kind of fault is a false one, whatever else is wrong with that file."""
    found = result_of(made(WRONG_BASE, 0.1, circle_from=20.0), made(ONE_LAYER, 0.1), made("q-k-permuted", 1.0),
                      refused("gate-up-fused"))  # fmt: skip
    circles = rule(found, CIRCLE)
    assert (circles.hits, circles.misses, circles.false_alarms) == ([], [ONE_LAYER], [WRONG_BASE])
    assert (circles.silent, circles.not_run) == ([GOOD, "q-k-permuted"], ["gate-up-fused"])
    assert verdict_t5(found).startswith("does not hold here: 0 of 1")
    assert verdict_t4(found).startswith("does not hold here: 0 of 1")
    right = result_of(made(WRONG_BASE, 0.1, first_token_ms=900.0), made(ONE_LAYER, circle_from=50.0))
    assert verdict_t4(right).startswith("holds here: 1 of 1")
    assert verdict_t5(right).startswith("holds here: 1 of 1")
    accused = replace(right, files={**right.files, GOOD: made(GOOD, circle_from=48.0)})
    assert "1 of 2 others, the good file among them" in verdict_t5(accused)
    assert verdict_t4(result_of(refused("rope-base-text"))).startswith("not measured")


@pytest.mark.parametrize(
    ("base", "half", "verdict"),
    [((0.0, 1.5), math.nan, "holds here:"), ((0.0, 1.5), 0.5, "holds here in part"),
     ((0.0, 0.2), math.nan, "holds here in part"), ((0.0, 0.2), 0.5, "does not hold here"),
     ((0.5, 1.5), 0.5, "does not hold here")],
)  # fmt: skip
def test_q14_needs_fine_beginnings_ruined_ends_and_nan(base: tuple[float, float], half: float, verdict: str) -> None:
    found = result_of(made(WRONG_BASE, *base, noise=0.0), made(HALF_SCALE, half, noise=0.0))
    assert verdict_q14(found).startswith(verdict)
    assert "were not reached" in verdict_q14(found)
    assert "were not reached" not in verdict_q14(replace(found, settings={**found.settings, "text_tokens": 2048}))


def test_q15_says_what_was_caught_and_by_what() -> None:
    """One that nothing catches must not be counted."""
    one = made(ONE_LAYER, 0.1, beside=(check("weights", "failed"),))
    found = result_of(one, made("gate-up-swapped-all", 5.0), refused("gate-up-fused"))
    assert "2 of 3 are caught" in verdict_q15(found)
    assert "caught by weights (beside the good file)" in verdict_q15(found)
    assert "times the perplexity, caught by nothing;" in verdict_q15(found)


def test_q16_needs_a_refusal_and_both_keys_by_name() -> None:
    base = made(WRONG_BASE, beside=(check("rope base", "failed", "llama.rope.freq_base is 1"),))
    half = made(HALF_SCALE, beside=(check("rope scaling", "failed", "llama.rope.scaling.factor …"),))
    assert verdict_q16(result_of(base, half)).startswith("holds")
    assert verdict_q16(replace(result_of(base, half), override="")).startswith("does not hold")
    assert verdict_q16(result_of(base, made(HALF_SCALE))).startswith("does not hold")


def test_q21_holds_for_no_file_that_is_refused() -> None:
    remedy = [refused("head-count-32"), refused("rope-base-text")]
    assert verdict_q21(result_of(*remedy)).startswith("does not hold: head-count-32: it is broken")
    assert verdict_q21(result_of(remedy[0], made("rope-base-text"))).startswith("may hold: rope-base-text loads")


def test_titles_are_computed() -> None:
    """A title typed in would say the same of other figures."""
    told = result_of(made(WRONG_BASE, 0.1), made(ONE_LAYER, 0.5), ropes={"other": 0.5})
    assert "with rope-base-10000 and gate-up-swapped-one undone; rope-base-10000 costs less" in title("undone", told)
    assert "with no fault undone" in title("undone", result_of(made(WRONG_BASE), ropes={"other": 0.5}))
    drift = {WRONG_BASE: [(0, 9, 0.1), (10, 19, 0.9)], ROUNDED: [(0, 9, 0.3), (10, 19, 0.3)]}
    assert "0.10 to 0.90 nats" in title("positions", replace(told, kl=drift))
    assert "accused by circles (T5)" in title("detectors", replace(told, files={
        **told.files, GOOD: made(GOOD, circle_from=1.0)}))  # fmt: skip


def title(name: str, result: TrapsResult) -> str:
    return getattr(plots, f"trap_{name}")(result).layout.title.text.replace("<br>", " ")
