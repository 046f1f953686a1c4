"""The small network on digits: its data, what is compared with what, and what the verdict says of which figures."""

import hashlib
import re
import threading
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest
import torch

from nanokit import quant
from nanokit.errors import ParameterError
from nanokit.lab import lock, plots
from nanokit.lab.experiments import digits as experiment
from nanokit.lab.experiments.digits import CALLED, DigitsParams, DigitsResult, difference, digits
from nanokit.lab.experiments.digits_net import TESTED, Course, Digits, copied, digits_data, residual_network
from nanokit.lab.progress import CallbackProgress, StoppedError
from nanokit.lab.repeat import comparable
from nanokit.paths import data_dir


@pytest.fixture(autouse=True)
def own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "lock_path", lambda: tmp_path / "measuring.lock")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the pictures to train on: seconds instead of tens."""
    train, test = digits_data()
    part = Digits(train.pictures[:256], train.labels[:256]), test
    monkeypatch.setattr(experiment, "digits_data", lambda: part)


def params(**changes: object) -> DigitsParams:
    small: dict[str, object] = {"preset": "smoke", "width": 4, "epochs": 2, "more_epochs": 1, "batch": 32}
    return DigitsParams.from_mapping(small | changes)


def test_the_digits_are_the_recorded_ones() -> None:
    """Other bytes, a pickle, or pictures that both train and test would make every figure another one."""
    path = data_dir() / "digits.npz"
    listed = re.search(r"^([0-9a-f]{64})  digits.npz$", (data_dir() / "README.md").read_text("utf-8"), re.M)
    assert listed
    assert hashlib.sha256(path.read_bytes()).hexdigest() == listed[1]
    with np.load(path, allow_pickle=False) as stored:
        images, labels = stored["images"], stored["labels"]
    assert (images.dtype, images.shape, labels.dtype, labels.shape) == (np.uint8, (1797, 8, 8), np.uint8, (1797,))
    assert (images.max(), sorted(set(labels.tolist()))) == (16, list(range(10)))
    train, test = digits_data()
    assert (train.pictures.shape, test.pictures.shape) == ((1797 - TESTED, 1, 8, 8), (TESTED, 1, 8, 8))
    joined = torch.cat([train.pictures, test.pictures]) * 16
    assert torch.equal(joined[:, 0].to(torch.uint8), torch.from_numpy(images))
    assert torch.equal(torch.cat([train.labels, test.labels]), torch.from_numpy(labels).long())


def test_all_stages_and_what_repeats(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every figure but times is equal in a repetition; a network that leaves another one's weights changed by what it
    does (a copy that is none) shows in the stages before."""
    calls: list[tuple[int, int]] = []
    progress = CallbackProgress(lambda done, total, text: calls.append((done, total)))
    result = digits(params(seeds=2), progress=progress)
    assert calls[-1][0] == calls[-1][1] == 2 * 5 + 1
    assert comparable(digits(params(seeds=2)).to_record()) == comparable(result.to_record())
    m = result.metrics
    assert all(len(result.samples[f"points_of_{stage}"]) == 2 for stage in CALLED)
    assert m["pruned_rate"] == pytest.approx(0.5, abs=0.01)
    assert 0.5 <= m["zero_rate"] < 0.9
    assert m["gained_points_over_ptq"] == pytest.approx(m["points_of_qat"] - m["points_of_ptq"])
    assert m["lost_points"] == pytest.approx(m["points_of_pruned"] - m["points_of_ptq"])
    assert [row[0] for row in result.table().rows] == list(CALLED.values())
    assert isinstance(plots.digits(result), go.Figure)
    monkeypatch.setattr(quant, "prune", lambda model, share: model)
    unpruned = digits(params(seeds=1)).metrics
    assert unpruned["pruned_rate"] == 0
    assert unpruned["points_of_pruned"] != result.samples["points_of_pruned"][0]


def test_further_training_with_and_without_rounding_sees_the_same_batches(
    few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control is one only if rounding is all that differs: where nothing is rounded both are one network."""
    monkeypatch.setattr(quant, "prepare", lambda model, policy: model)
    monkeypatch.setattr(quant, "convert", lambda model: model)
    monkeypatch.setattr(experiment, "_facts", lambda model: {})
    result = digits(params(more_epochs=2))
    assert result.metrics["points_of_more"] == result.metrics["points_of_qat"]
    assert result.gained("more") == (0.0, 0.0, 0.0)
    assert result.metrics["points_of_more"] != result.metrics["points_of_pruned"]


def test_the_interval_of_a_difference() -> None:
    """Against sums by hand: pictures alone of one seed; both variances of several."""
    before, after = np.array([True, False, False, True]), np.array([True, True, False, True])
    middle, low, high = difference([before], [after])
    assert middle == 25.0
    half = 1.96 * (np.var([0, 100, 0, 0], ddof=1) / 4) ** 0.5
    assert (low, high) == pytest.approx((25 - half, 25 + half))
    middle, low, high = difference([before, before], [after, before])
    half = (1.96**2 * np.var([0, 50, 0, 0], ddof=1) / 4 + 12.71**2 * np.var([25, 0], ddof=1) / 2) ** 0.5
    assert (middle, low, high) == pytest.approx((12.5, 12.5 - half, 12.5 + half))


def test_verdict_follows_the_figures() -> None:
    """Extra training must not pass for QAT, nor a difference within the error for one."""

    def verdict(over: float, own: float, ratio: float, seeds: int = 2) -> str:
        metrics = {"rounding_time_ratio": ratio, "points_of_more_ptq": 90.0, "points_of_more_search": 91.0}
        for stage, gain in (("ptq", over), ("more_search", own), ("more_ptq", 9.0)):
            for end, shift in (("", 0.0), ("_low", -1.0), ("_high", 1.0)):
                metrics[f"gained_points{end}_over_{stage}"] = gain + shift
        return DigitsResult(params(seeds=seeds), metrics).verdict_q6

    assert verdict(3.0, 2.0, 1.45).startswith("holds here: QAT is +3.0 points (+2.0 to +4.0)")
    assert verdict(3.0, 2.0, 2.5).startswith("holds here in its direction")
    assert verdict(6.0, 2.0, 1.45).startswith("holds here in its direction")
    assert verdict(3.0, 0.5, 1.45).startswith("holds here, but not beyond")
    assert verdict(0.5, 0.2, 1.45).startswith("is not shown here")
    assert verdict(3.0, 2.0, 1.45, seeds=1).startswith("is not shown here by one seed")
    assert "+150% (claimed: +47 %)" in verdict(3.0, 2.0, 2.5)


def test_times_move_nothing_and_training_stops(few: None) -> None:
    """A rate of 0 leaves every weight; cancel ends a run at an epoch; threads are as before."""
    model = residual_network(4, 0)
    before = copied(model).state_dict()
    course = Course(model, digits_data()[0], 16, 0)
    course.step(torch.arange(16), 0.0)
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name])
    cancel = threading.Event()
    progress = CallbackProgress(lambda done, total, text: cancel.set() if done == 2 else None)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with pytest.raises(StoppedError):
            digits(params(), progress=progress, cancel=cancel)
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
    assert progress.done == 2
    with pytest.raises(ParameterError, match="out of range"):
        params(pruned=1.0)
