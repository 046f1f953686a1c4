"""Profiles of activations and the monitor that compares with them: figures against numpy, hooks against
transformers."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import compiled_model, save_tiny, save_tiny_gguf, tiny_model
from torch import Tensor, nn

from nanokit.engine.load import load
from nanokit.engine.sampling import Sampling
from nanokit.errors import ParameterError
from nanokit.kernels.activations import quantize
from nanokit.quant.drift import DriftMonitor, Profile, Spread, Watch


def rows(seed: int, count: int = 64, columns: int = 24) -> Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(seed)) * 3 + 1


def profile_of(x: Tensor, model: str = "m", place: str = "p", **how: Tensor) -> Profile:
    watch = Watch(model)
    watch.observe(place, x, **how)
    return watch.profile("a text")


# -- figures ----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 40), max_size=3))
def test_figures_are_numpys_however_the_rows_arrive(seed: int, cuts: list[int]) -> None:
    """Moments about the mean from sums about zero, with a mean that is not zero; a text in chunks is the same text."""
    x = rows(seed, 40)
    watch = Watch("m")
    for part in torch.tensor_split(x, sorted(cuts)):
        watch.observe("p", part, torch.arange(1, len(part) + 1))
    found, values = watch.profile().places["p"]["later"], x.double().numpy()
    ordered = np.sort(np.abs(values), axis=1)
    ratios = ordered[:, -1] / ordered[:, (values.shape[1] - 1) // 2]
    centred = values - values.mean()
    expected = (values.std(), ordered.max(), ratios.max(), np.median(ratios), (centred**4).mean() / values.var() ** 2)
    got = (found.std, found.absmax, found.token_ratio_max, found.token_ratio_median, found.kurtosis)
    assert got == pytest.approx(expected, rel=1e-9)
    assert (found.tokens, found.count) == (40, 960)


def test_the_first_position_stands_apart() -> None:
    """A healthy model's first token is a thousand times the others: in one column with them, it would be the column."""
    x, positions = rows(1), torch.arange(64)
    large = x.clone()
    large[0] *= 1000
    for each in (x, large):
        assert profile_of(each, positions=positions).places["p"]["later"] == profile_of(x[1:]).places["p"]["later"]
    assert profile_of(large, positions=positions).peak("p") == float(large.abs().max())
    assert profile_of(x[:1], positions=positions[:1]).places["p"].keys() == {"first"}


def test_shares_are_those_of_static_codes() -> None:
    """Clipped and vanishing, against the codes that static activations of the profile's peaks have."""
    profile, x = profile_of(rows(1)), rows(2, 200) ** 3 / 20
    x[0, :5] = 0
    monitor = DriftMonitor(profile)
    monitor.observe("p", x)
    [row] = monitor.report()
    peak = profile.peak("p")
    codes = quantize(x, "static", peak).codes
    assert row.found.vanishing == float(((codes == 0) & (x != 0)).double().mean()) > 0
    assert row.found.clipped == float((x.abs() > peak).double().mean()) > 0


def test_zeros_and_constants_have_finite_figures() -> None:
    """Of a dead place: no division by zero, and none of its ratios is an alarm."""
    for x in (torch.zeros(40, 8), torch.ones(40, 8)):
        spread = profile_of(x).places["p"]["later"]
        assert all(np.isfinite(value) for value in vars(spread).values())
        monitor = DriftMonitor(profile_of(x))
        monitor.observe("p", x)
        assert monitor.alarms() == []
    with pytest.raises(ParameterError, match="p are not finite"):
        Watch("m").observe("p", torch.tensor([[1.0, float("nan")]]))


# -- alarms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e5])
@pytest.mark.parametrize(("change", "alarm"), [(1.0, False), (1.4, False), (1.6, True), (0.6, True)])
def test_alarms_are_about_ratios_alone(size: float, change: float, alarm: bool) -> None:
    """The same model in other units: an absolute bound (a std of .6 to 1.0 is normal, 1.5 is not) would see another."""
    monitor = DriftMonitor(profile_of(rows(1) * size))
    monitor.observe("p", rows(1) * size * change)
    assert [row.place for row in monitor.alarms()] == ["p"] * alarm
    assert monitor.report()[0].ratios["std"] == pytest.approx(change, rel=1e-5)


def test_a_peak_alarms_by_its_own_bound() -> None:
    """One value of many leaves std where it was."""
    for factor, alarm in ((2, False), (4, True)):
        x = rows(1, 2000)
        at = np.unravel_index(int(x.abs().argmax()), x.shape)
        monitor = DriftMonitor(profile_of(x))
        changed = x.clone()
        changed[at] *= factor
        monitor.observe("p", changed)
        assert bool(monitor.alarms()) == alarm
        assert monitor.report()[0].ratios["std"] < 1.1


def test_what_raises_no_alarm() -> None:
    """The first position, and a few tokens; a place that the profile lacks is named."""
    monitor = DriftMonitor(profile_of(rows(1), positions=torch.arange(64)))
    monitor.observe("p", rows(2, 3) * 9, torch.zeros(3))
    monitor.observe("p", rows(2, 8) * 9, torch.arange(1, 9))
    monitor.observe("q", rows(1))
    assert {row.positions for row in monitor.report()} == {"first", "later"}
    assert monitor.alarms() == []
    assert monitor.unknown() == ["q"]


def test_a_monitor_refuses_what_it_cannot_compare() -> None:
    profile = profile_of(rows(1), model="this")
    with pytest.raises(ParameterError, match=r"(?s)another model.*this.*other"):
        DriftMonitor(profile, model="other")
    for bad in (1.0, 0.5, float("nan"), float("inf")):
        with pytest.raises(ParameterError, match="above 1"):
            DriftMonitor(profile, bad)


# -- files ------------------------------------------------------------------------------------------------------------


def test_a_profile_comes_back_from_its_file(tmp_path: Path) -> None:
    profile = profile_of(rows(1), positions=torch.arange(64))
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda c: c.update(version=2), "another version"),
        (lambda c: c.pop("model"), "KeyError"),
        (lambda c: c["places"]["p"].update(middle={}), "ValueError"),
        (lambda c: c["places"]["p"]["later"].pop("std"), "std"),
        (lambda c: c["places"]["p"]["later"].update(std=float("nan")), "std is nan"),
        (lambda c: c["places"]["p"]["later"].update(absmax=-1.0), "absmax is -1"),
        (lambda c: c["places"]["p"]["later"].update(more=1), "more"),
        (lambda c: c.update(places=[1]), "AttributeError"),
    ],
)
def test_a_broken_file_is_refused_by_name(tmp_path: Path, change, why: str) -> None:
    """A NaN in a reference makes every comparison with it quietly false."""
    path = tmp_path / "p.json"
    profile_of(rows(1)).save(path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ParameterError, match=rf"(?s)p\.json.*{why}"):
        Profile.load(path)
    path.write_text("{")
    with pytest.raises(ParameterError, match=r"p\.json is no profile"):
        Profile.load(path)


# -- hooks ------------------------------------------------------------------------------------------------------------


def test_a_plain_network_has_no_positions_and_loses_its_hooks() -> None:
    network = nn.Sequential(nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 4))
    watch = Watch("net")
    with watch.attach(network):
        network(rows(1))
    network(rows(2))
    places = watch.profile().places
    assert places.keys() == {"0", "2"}
    assert places["0"] == profile_of(rows(1)).places["p"]
    assert not any(part._forward_pre_hooks for part in network.modules())


def near(a: Spread, b: Spread) -> bool:
    pairs = zip(vars(a).values(), vars(b).values(), strict=True)
    return all(x == pytest.approx(y, rel=2e-4) for x, y in pairs)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
def test_the_kits_engine_and_transformers_see_the_same(tmp_path: Path) -> None:
    """Places, positions and values of a whole model in two implementations, in chunks, then token by token."""
    theirs = tiny_model("llama")
    engine = load(save_tiny(tmp_path / "m", theirs), activations="fp32", ctx=128, token_budget=16)
    prompt = list(range(40))
    ours, hooked = Watch("m"), Watch("m")
    with engine.model.observing(ours.observe):
        [done] = engine.generate([prompt], Sampling(max_tokens=6, ignore_eos=True))
    with hooked.attach(theirs), torch.no_grad():
        past = None
        for part in (prompt[:16], prompt[16:], *([token] for token in done.token_ids[:-1])):
            past = theirs(torch.tensor([part]), past_key_values=past, use_cache=True).past_key_values
    a, b = ours.profile().places, hooked.profile().places
    names = {"attention input": "self_attn.k_proj", "attention output": "self_attn.o_proj",
             "feed-forward input": "mlp.up_proj", "feed-forward middle": "mlp.down_proj"}  # fmt: skip
    pairs = {f"layer {i}, {x}": f"model.layers.{i}.{y}" for i in range(2) for x, y in names.items()}
    pairs["the head's input"] = "lm_head"
    assert a.keys() == pairs.keys()
    for mine, other in pairs.items():
        assert a[mine].keys() == b[other].keys() == {"later", "first"}
        assert (a[mine]["first"].tokens, a[mine]["later"].tokens) == (1, 44)
        assert all(near(a[mine][kind], b[other][kind]) for kind in ("later", "first")), mine
    engine.generate([prompt], Sampling(max_tokens=2))
    assert ours.profile().places == a, "observed after the context had ended"


def test_positions_of_a_padded_batch_are_the_callers() -> None:
    """Left padding: the first token of a sequence is not the first of its row."""
    theirs, watch = tiny_model("llama"), Watch("m")
    with watch.attach(theirs), torch.no_grad():
        theirs(torch.ones(2, 5, dtype=torch.long), position_ids=torch.tensor([[1, 1, 0, 1, 2], [0, 1, 2, 3, 4]]))
    assert {kinds["first"].tokens for kinds in watch.profile().places.values()} == {2}


def test_the_engine_shows_requests_of_other_modes_and_c_shows_nothing(tmp_path: Path) -> None:
    """What a static request's products would see before it is clipped; and a refusal instead of silence."""
    path = save_tiny_gguf(tmp_path / "m.gguf", compiled_model("llama"), types="Q4_0")
    engine, watch = load(path, activations="fp32", ctx=128), Watch("m")
    engine.calibrate([1, 2, 3])
    with engine.model.observing(watch.observe):
        engine.generate([[5] * 40], Sampling(max_tokens=1, activations="static"))
    assert watch.profile().places["the head's input"]["later"].tokens == 39
    with (
        pytest.raises(ParameterError, match=r"(?s)do not show.*fp32"),
        load(path, ctx=128).model.observing(watch.observe),
    ):
        pass
