"""Parameter grids: every point once, resumed without repeating, one bad point does not cost the others."""

import sys

import pytest
from demo_notebook import write_demo

from nanokit.errors import NotebookRunError, ParameterError
from nanokit.lab import grid
from nanokit.lab.cell import content_hash, read_notebook, resolve
from nanokit.lab.grid import parse_grid, run_grid
from nanokit.lab.machine import versions
from nanokit.lab.provenance import code_hash, input_files
from nanokit.lab.records import append_record, read_records
from nanokit.lab.runner import Run


@pytest.fixture
def demo(tmp_path):
    yield write_demo(tmp_path / "lab")
    sys.modules.pop("demo_experiment", None)


@pytest.fixture
def scripted(monkeypatch):
    """run_notebook without a kernel: k=0 fails, anything else leaves the record that a run would leave."""
    ran = []

    def run(source, params, *, runs, cell_timeout_s, before):
        nb = read_notebook(source)
        full = resolve(nb, params, source.parent).full
        before(full)
        ran.append(full["k"])
        record = {
            "run_id": f"run-{len(ran)}",
            "notebook_sha256": content_hash(nb),
            "code_sha256": code_hash(),
            "params": full,
            "inputs": input_files(full),
            "versions": versions(),
            "metrics": {},
            "status": "failed" if full["k"] == 0 else "ok",
        }
        append_record(runs, record)
        if full["k"] == 0:
            raise NotebookRunError("demo failed in cell 5", found="ValueError: k is zero")
        return Run(runs / "x.ipynb", record)

    monkeypatch.setattr(grid, "run_notebook", run)
    return ran


def test_axes_are_split_at_commas_outside_lists():
    assert parse_grid(["k=1,3,7", "depths=[1,2],[3]", "name=a=b"]) == {
        "k": ["1", "3", "7"],
        "depths": ["[1,2]", "[3]"],
        "name": ["a=b"],
    }
    for bad in (["k"], ["=1"], ["k="], ["k=1", "k=2"]):
        with pytest.raises(ParameterError, match="axis"):
            parse_grid(bad)


def test_every_combination_runs_once_and_a_second_call_runs_none(demo, tmp_path, scripted):
    lines: list[str] = []
    axes = ["k=1,3", "preset=smoke,quick"]
    first = run_grid(demo, axes, {"name": "b"}, runs=tmp_path / "runs", report=lines.append)
    assert scripted == [1, 1, 3, 3]
    assert [(p.params["k"], p.params["preset"]) for p in first.points] == [
        (1, "smoke"),
        (1, "quick"),
        (3, "smoke"),
        (3, "quick"),
    ]
    assert lines[:2] == ["[1/4] k=1 preset=smoke", "[1/4] ok run-1"]
    again = run_grid(demo, axes, {"name": "b"}, runs=tmp_path / "runs")
    assert [p.status for p in again.points] == ["skipped"] * 4
    assert [p.run_id for p in again.points] == [p.run_id for p in first.points]
    assert len(scripted) == 4


def test_nothing_is_prepared_for_points_that_are_skipped(demo, tmp_path, scripted):
    """The command line fetches the model there: a resumed grid, or one over models, needs none."""
    prepared: list[int] = []
    for axes in (["k=1,3"], ["k=1,3,4"]):
        run_grid(demo, axes, runs=tmp_path / "runs", before=lambda full: prepared.append(full["k"]))
    assert prepared == [1, 3, 4]


def test_a_failed_point_is_counted_retried_and_does_not_stop_the_grid(demo, tmp_path, scripted):
    found = run_grid(demo, ["k=0,2"], runs=tmp_path / "runs")
    assert [p.status for p in found.points] == ["failed", "ok"]
    assert found.failed == 1
    assert "k is zero" in str(found.table())
    assert [p.status for p in run_grid(demo, ["k=0,2"], runs=tmp_path / "runs").points] == [
        "failed",
        "skipped",
    ]
    assert scripted == [0, 2, 0]


@pytest.mark.parametrize("change", ["notebook", "code", "parameter", "versions"])
def test_an_old_run_of_something_else_does_not_count(demo, tmp_path, scripted, monkeypatch, change):
    """A grid resumed over other code would mix figures of two programs in one table."""
    run_grid(demo, ["k=2"], runs=tmp_path / "runs")
    params = {}
    if change == "notebook":
        demo.write_text(demo.read_text().replace("p.k**2", "p.k**3"))
    elif change == "code":
        monkeypatch.setattr(grid, "code_hash", lambda: "other")
    elif change == "versions":
        monkeypatch.setattr(grid, "versions", lambda: {**versions(), "torch": "0.1"})
    else:
        params = {"name": "other"}
    assert [p.status for p in run_grid(demo, ["k=2"], params, runs=tmp_path / "runs").points] == ["ok"]
    assert scripted == [2, 2]


def test_an_invalid_point_stops_the_grid_before_its_first_run(demo, tmp_path, scripted):
    for axes, params in ((["k=1,10"], {}), (["kk=1"], {}), (["k=1,2"], {"k": 3})):
        with pytest.raises(ParameterError):
            run_grid(demo, axes, params, runs=tmp_path / "runs")
    assert scripted == []
    assert read_records(tmp_path / "runs") == ([], [])


def test_a_real_run_leaves_the_record_that_resuming_looks_for(demo, tmp_path):
    """The scripted runs above would agree with the grid even if the runner's record did not."""
    assert [p.status for p in run_grid(demo, {"k": [2, 2]}, runs=tmp_path / "runs").points] == [
        "ok",
        "skipped",
    ]
