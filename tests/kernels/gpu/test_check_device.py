"""What the check does on a GPU, on a made-up one: events, processes that compile first, what is kept, tuning."""

import json
import os
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanokit.kernels.gpu import configs, product, runtime
from nanokit.kernels.gpu.checks import program, run, timer, work
from nanokit.kernels.gpu.checks.timer import EventTimer
from nanokit.kernels.gpu.pack import CODES8
from nanokit.paths import gpu_file

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(not runtime.INTERPRETED, reason="the check is tested where kernels are interpreted"),
]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NANOKIT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def called(*arguments: str) -> int:
    return program.main(list(arguments))


class FakeEvent:
    """The first `early` waits are over before the launches are queued. An event's time is the launches so far."""

    launches = early = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = FakeEvent.launches

    def query(self) -> bool:
        FakeEvent.early -= 1
        return FakeEvent.early >= 0

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: "FakeEvent") -> float:
        return 0.25 * (end.at - self.at)


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """torch.cuda as far as the check asks it; gives the cycles that it was told to wait."""
    waited: list[int] = []
    facts = SimpleNamespace(name="NVIDIA Test 9000", major=9, minor=0, total_memory=1 << 34, multi_processor_count=132,
                            L2_cache_size=1000)  # fmt: skip
    FakeEvent.launches = FakeEvent.early = 0
    for name, value in {
        "Event": FakeEvent, "_sleep": waited.append, "synchronize": lambda: None,
        "get_device_properties": lambda device: facts, "get_device_capability": lambda device: (9, 0),
        "get_device_name": lambda device: facts.name,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    return waited


def launch() -> None:
    FakeEvent.launches += 1


def test_events_measure_a_full_queue(fake_cuda: list[int]) -> None:
    """An interval with gaps in it is taken again behind a longer wait; one that never closes is said."""
    clock = EventTimer()
    assert clock.rotated_bytes == timer.CACHES * 1000
    FakeEvent.early = 2
    timing = clock([launch])
    assert timing.ms == (0.25,) * EventTimer.samples
    assert not timing.gaps
    assert fake_cuda[:3] == [1 << 21, 1 << 22, 1 << 23]
    assert set(fake_cuda[3:]) == {1 << 23}
    FakeEvent.early = 1 << 20
    timing = clock([launch])
    assert timing.gaps
    assert timing.to_record()["gaps"] is True
    assert max(fake_cuda) == EventTimer.most_cycles


def test_every_copy_has_its_turn(fake_cuda: list[int]) -> None:
    """Launches that read one copy over and over would be served by the cache."""
    counts = [0] * 30

    def reader(i: int) -> Callable[[], None]:
        def read() -> None:
            counts[i] += 1

        return read

    EventTimer()([reader(i) for i in range(30)])
    assert max(counts) - min(counts) <= 1


def test_a_whole_check_of_a_device_is_kept_for_the_doctor(
    fake_cuda: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of a few operations would say of all kernels that they are right."""
    options = program._options(["--only", "select"])
    facts = program.device_facts()
    assert facts == {"name": "NVIDIA Test 9000", "capability": [9, 0], "memory_bytes": 1 << 34, "processors": 132,
                     "l2_bytes": 1000, "cuda": torch.version.cuda}  # fmt: skip
    made = {"device": facts, "faults": [], "skipped": [], "interrupted": False, "started": "2026-11-30T04:00:00+00:00"}
    made["versions"] = {name: metadata.version(name) for name in ("torch", "triton", "nanokit")}
    path = gpu_file("check", "NVIDIA Test 9000")
    program._keep("device", options, made)
    assert not path.exists()
    program._keep("device", program._options([]), made)
    assert json.loads(path.read_text("utf-8")) == made


def test_all_cores_compile_first(fake_cuda: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Real processes, which leave their kernels in Triton's cache. One that dies, or takes too long, is said."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert run._compile_ahead(work.Budget(1000), ["select"], 1) == []
    kernels = {path.stem for path in (tmp_path / "triton").rglob("*.cubin")}
    assert kernels == {"argmax_blocks", "argmax_fold"}
    assert run._compile_ahead(work.Budget(0), ["select"], 1) == ["2 of 2 processes that compile took too long"]
    monkeypatch.setattr(sys, "executable", "false")
    assert run._compile_ahead(work.Budget(1000), ["select"], 1) == []  # it ends with 1, as for a kernel that spills
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (13, 7))
    assert "sm_137" in run._compile_ahead(work.Budget(1000), [], None)[0]


# --- configurations ---


def test_tuning_runs_and_does_not_change_bits(
    capsys: pytest.CaptureFixture[str], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A configuration that changed a bit would make answers depend on who tuned."""
    monkeypatch.setattr(configs, "_measured", dict)
    assert called("--interpret", "--tune", "--json", str(tmp_path / "a.json")) == 0
    made = json.loads((tmp_path / "a.json").read_text("utf-8"))
    assert made["mode"] == "tune"
    assert {(each["format"], each["rows"]) for each in made["tuned"]} == {
        (name, bucket) for name in ("int4-sym-g32", "int8-sym-g32", "fp4-g16") for bucket in configs.DEFAULTS
    }
    assert all(each["equal"] and len(each["tried"]) == 2 for each in made["tuned"])
    assert not home.exists()
    right = product.multiply

    def wrong(weights: Any, x: Any) -> torch.Tensor:
        return right(weights, x) + configs.product_config(weights.kind, 1).stages

    monkeypatch.setattr("nanokit.kernels.gpu.checks.tune.FORMATS", ("int8-sym-g32",))
    monkeypatch.setattr("nanokit.kernels.gpu.checks.tune.multiply", wrong)
    monkeypatch.setattr(configs, "_measured", lambda table={}: table)
    assert called("--interpret", "--tune") == 1
    assert "bits depend on the configuration" in capsys.readouterr().out
    assert configs.in_use()[CODES8, 8] == configs.DEFAULTS[8]  # the only bucket whose stages `wrong` looks at


def test_what_was_measured_is_taken_and_what_is_broken_refused(
    fake_cuda: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file cut off in the middle, of another version, or with a tile that is no power of two."""
    name = "NVIDIA Test 9000"
    assert configs.read(name) == {}
    rows = [{"kind": 2, "rows": 16, "config": [16, 128, 8, 5], "ms": 1.0, "default_ms": 2.0, "tried": []}]
    program._keep(
        "tune",
        program._options(["--tune"]),
        {"device": {"name": name}, "tuned": rows, "interrupted": False, "started": "2026-11-30"},
    )
    table = configs.read(name)
    assert table == {(2, 16): configs.ProductConfig(16, 128, 8, 5)}
    monkeypatch.setattr(configs, "_measured", lambda: table)
    assert configs.product_config(2, 9) == (16, 128, 8, 5)
    assert configs.product_config(2, 8) == configs.DEFAULTS[8]
    assert configs.product_config(0, 9) == configs.DEFAULTS[16]
    assert configs.product_config(0, 5000) == configs.DEFAULTS[configs.MANY]
    whole = configs.place(name).read_text("utf-8")
    for text in (whole[:40], whole.replace("configs/1", "configs/2"), whole.replace("128", "96"), "[]",
                 whole.replace('"kind"', '"sort"')):  # fmt: skip
        configs.place(name).write_text(text)
        with pytest.raises(configs.ConfigError, match="delete it"):
            configs.read(name)


# --- compiled ---
