"""Headless runs through papermill, with real kernels: every way a run can end leaves a record that says so."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import nbformat
import pytest
from demo_notebook import write_demo

from nanokit.errors import NotebookRunError, ParameterError
from nanokit.lab import repeat, runner
from nanokit.lab.cell import find_notebook, params_class, read_notebook
from nanokit.lab.records import RecordError, append_record, read_records
from nanokit.lab.repeat import repeat_run
from nanokit.lab.runner import run_notebook


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab") / "with {braces} and blanks"
    yield write_demo(folder)
    assert str(folder) not in sys.path
    sys.modules.pop("demo_experiment", None)


@pytest.fixture(scope="module")
def good(demo):
    """One run that went well, shared by the tests that only look at it. The run folder has braces in its name."""
    return run_notebook(demo, {"k": "3", "name": "007", "depths": "[2]"}, runs=demo.parent / "runs {k}")


def records(runs: Path) -> list[dict]:
    found, problems = read_records(runs)
    assert problems == []
    return found


def left_over(runs: Path) -> list[str]:
    """Names that are neither an executed notebook nor the records."""
    known = {"records.jsonl", ".records.lock"}
    return [p.name for p in runs.iterdir() if p.name not in known and not p.name.startswith("20")]


def test_values_have_the_types_of_the_dataclass(good):
    """papermill alone turns the name 007 into 7 and the list into a text."""
    assert good.record["params"] == {"preset": "quick", "k": 3, "name": "007", "depths": [2], "size": 2}
    assert good.record["metrics"]["square"] == 9
    assert good.record["texts"] == {"answer": "007"}


def test_the_record_is_complete_and_free_of_paths(good, demo):
    record = records(good.output.parent)[0]
    assert record["status"] == "ok"
    assert record["error"] is None
    assert record["output"] == good.output.name
    assert record["duration_s"] > 0
    assert record["machine"]["threads"] >= 1
    assert record["versions"]["papermill"]
    assert record["metrics"]["loss"] != record["metrics"]["loss"], "NaN must come back as NaN"
    for place in (str(demo.parent), str(Path.home()), sys.prefix):
        assert place not in str(record)


def test_the_executed_notebook_is_small_clean_and_ran_in_its_folder(good, demo):
    """A saved widget state is 5 MB per figure; papermill's timestamps make every copy differ."""
    nb = nbformat.read(good.output, as_version=4)
    assert "widgets" not in nb.metadata
    assert "papermill" not in nb.metadata
    assert not any("papermill" in cell.metadata for cell in nb.cells)
    assert good.output.stat().st_size < 20_000
    outputs = [o for cell in nb.cells for o in cell.get("outputs", [])]
    assert f"('1', '{demo.parent.name}')" in outputs[0].data["text/plain"]
    assert outputs[-1].text == "recorded 3 figures in runs/records.jsonl\n"
    assert left_over(good.output.parent) == []


def test_the_source_is_untouched_and_nothing_lies_beside_it(good, demo):
    assert "injected-parameters" not in demo.read_text()
    assert {p.name for p in demo.parent.iterdir()} <= {
        "demo.ipynb",
        "demo_experiment.py",
        "__pycache__",
        "runs {k}",
        ".ipynb_checkpoints",
    }


def test_this_process_keeps_its_environment_and_directory(good):
    assert "NANOKIT_HEADLESS" not in os.environ
    assert "NANOKIT_RECORD" not in os.environ


@pytest.mark.parametrize(
    ("params", "says"),
    [({"kk": "1"}, "did you mean 'k'"), ({"k": "x"}, "whole number"), ({"k": "10"}, "0 to 9")],
)
def test_a_wrong_parameter_stops_before_anything_runs(demo, tmp_path, params, says):
    """papermill only warns of an unknown parameter and measures the default."""
    with pytest.raises(ParameterError, match=says) as error:
        run_notebook(demo, params, runs=tmp_path / "runs")
    assert error.value.exit_code == 2
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("k", "kind", "message", "limit_s"),
    [
        (0, "ValueError", "first line; k is zero in", 60),
        (7, "timeout", "longer than 2 s", 2),
        (8, "dead kernel", "the kernel died", 60),
    ],
)
def test_a_run_that_fails_says_where_and_leaves_its_copy_and_record(demo, tmp_path, capfd, k, kind, message, limit_s):
    start = time.monotonic()
    with pytest.raises(NotebookRunError) as error:
        run_notebook(demo, {"k": k}, runs=tmp_path, cell_timeout_s=limit_s)
    assert time.monotonic() - start < 20, "a dead kernel must not wait for the timeout of the cell"
    record = records(tmp_path)[0]
    assert record["status"] == "failed"
    assert (record["error"]["cell"], record["error"]["type"]) == (5, kind)
    assert message in record["error"]["message"]
    assert str(demo.parent) not in record["error"]["message"], "no path of this machine in a record"
    assert record["params"]["k"] == k
    assert record["machine"]["cores"] >= 1
    copy = tmp_path / record["output"]
    assert "import demo_experiment" in copy.read_text()
    for part in ("cell 5", kind, str(copy), record["run_id"]):
        assert part in str(error.value)
    assert left_over(tmp_path) == []
    assert capfd.readouterr() == ("", ""), "no warning of TCP, no log of papermill or the kernel"


def test_an_interrupt_is_recorded_and_passed_on(demo, tmp_path):
    def interrupt():
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and not list(tmp_path.glob(".*.ipynb")):
            time.sleep(0.1)
        time.sleep(1.5)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run_notebook(demo, {"k": 7}, runs=tmp_path)
    assert [r["status"] for r in records(tmp_path)] == ["interrupted"]
    assert left_over(tmp_path) == []


def test_two_notebooks_may_have_modules_of_the_same_name(tmp_path):
    """The second notebook of a session was checked against the parameters of the first."""
    ranges = []
    for number in ("1", "2"):
        notebook = write_demo(tmp_path / number)
        module = notebook.with_name("demo_experiment.py")
        module.write_text(module.read_text().replace("high=9)", f"high=9{number})", 1))
        params = params_class(read_notebook(notebook), notebook.parent)
        assert params is not None
        ranges.append(params.KNOBS["k"].high)
    assert ranges == [91, 92]


def test_a_notebook_that_ignores_its_parameters_is_found_out(demo, tmp_path):
    """Else `-p k=2` would file the figures of k=1 under k=2."""
    nb = nbformat.read(demo, as_version=4)
    nb.cells[2].source = nb.cells[2].source.replace("DemoParams.from_notebook(globals())", "DemoParams()")
    shutil.copy(demo.parent / "demo_experiment.py", tmp_path)
    nbformat.write(nb, tmp_path / "deaf.ipynb")
    with pytest.raises(NotebookRunError, match="other parameters"):
        run_notebook(tmp_path / "deaf.ipynb", {"k": 2}, runs=tmp_path / "runs")
    assert records(tmp_path / "runs")[0]["status"] == "failed"


def test_a_run_repeats_from_its_record(demo, good):
    """The record holds a NaN and resolved presets, and names neither the notebook's folder nor its defaults."""
    repeated = repeat_run(good.record["run_id"], demo, runs=good.output.parent)
    assert repeated.compared == 4  # square, loss, steps and the answer; not ttft_ms
    assert repeated.run.record["metrics"]["ttft_ms"] != good.record["metrics"]["ttft_ms"]


def test_a_figure_that_changed_is_listed(demo, good, tmp_path, monkeypatch):
    changed = good.record | {
        "metrics": good.record["metrics"] | {"square": 10, "ttft_ms": 0.0, "gone": 1.0},
        "samples": {"steps": [1, 2], "ttft_ms": []},
        "texts": {"answer": "008"},
    }
    append_record(tmp_path, changed)
    monkeypatch.setattr(repeat, "run_notebook", lambda *args, **options: good)
    with pytest.raises(NotebookRunError, match="differs in 3 place") as error:
        repeat_run("last", demo, runs=tmp_path)
    text = str(error.value)
    for part in (
        "metric square: was 10, is 9",
        "metric gone: was 1.0, is 'absent'",
        "text answer: was '008'",
    ):
        assert part in text
    assert "ttft_ms" not in text


def test_what_holds_nothing_to_compare_cannot_be_repeated(good, tmp_path):
    """Else a repetition could agree without a single figure compared."""
    for bad, says in (
        ({"status": "failed"}, "cannot be repeated"),
        ({"metrics": {"ttft_ms": 1.0}, "samples": {}, "texts": {}}, "only timings"),
    ):
        append_record(tmp_path, good.record | bad)
        with pytest.raises(RecordError, match=says):
            repeat_run("last", runs=tmp_path)
    with pytest.raises(RecordError, match="no run 'x'"):
        repeat_run("x", runs=tmp_path)


def test_plain_papermill_still_runs_the_notebook_and_records(demo, tmp_path):
    nb = nbformat.read(demo, as_version=4)
    nb.metadata["kernelspec"]["name"] = "python3"
    shutil.copy(demo.parent / "demo_experiment.py", tmp_path)
    nbformat.write(nb, tmp_path / "demo.ipynb")
    command = [
        sys.executable,
        "-m",
        "papermill",
        "demo.ipynb",
        "out.ipynb",
        "-p",
        "k",
        "4",
        "--no-progress-bar",
    ]
    runs = tmp_path / "runs"
    env = {**os.environ, "NANOKIT_RUNS": str(runs)}
    subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True, timeout=120)
    record = records(runs)[0]
    assert record["metrics"]["square"] == 16
    assert (record["status"], record["output"], record["duration_s"]) == ("ok", None, None)


def test_notebooks_are_found_by_number_name_or_path(tmp_path, monkeypatch):
    for stem in ("00_tour", "10_range_contract", "11_range_drift"):
        write_demo(tmp_path / stem).rename(tmp_path / f"{stem}.ipynb")
    monkeypatch.setattr("nanokit.lab.cell.notebooks_dir", lambda: tmp_path)
    for name in ("00_tour", "tour", "00", "00_tour.ipynb", str(tmp_path / "00_tour.ipynb")):
        assert find_notebook(name) == tmp_path / "00_tour.ipynb"
    with pytest.raises(NotebookRunError, match="did you mean 'tour'"):
        find_notebook("tuor")
    with pytest.raises(NotebookRunError, match="no notebook"):
        find_notebook(str(tmp_path / "missing" / "00_tour.ipynb"))
    (tmp_path / "broken.ipynb").write_text("{")
    with pytest.raises(NotebookRunError, match="cannot be read as a notebook"):
        run_notebook(tmp_path / "broken.ipynb", runs=tmp_path)


def test_a_run_folder_that_cannot_be_written_is_named(demo, tmp_path):
    (tmp_path / "runs").write_text("a file where the folder should be")
    with pytest.raises((NotebookRunError, RecordError), match="cannot be written"):
        run_notebook(demo, runs=tmp_path / "runs")


def test_a_disk_that_fills_up_during_a_run_is_named_and_recorded(demo, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device", "x.ipynb")

    monkeypatch.setattr(runner, "_execute", full)
    with pytest.raises(NotebookRunError, match="No space left on device"):
        run_notebook(demo, runs=tmp_path)
    assert [(r["status"], r["output"]) for r in records(tmp_path)] == [("failed", None)]
