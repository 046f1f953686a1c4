"""Run records: whole lines or none, under concurrent writers, full disks and broken neighbours."""

import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanokit import lab
from nanokit.lab import records
from nanokit.lab.params import Params
from nanokit.lab.provenance import git_state, input_files, without_paths
from nanokit.lab.records import RecordError, append_record, default_runs_dir, find_record, read_records
from nanokit.lab.result import Result


def line(run_id: str = "a", **more) -> dict:
    return {"run_id": run_id, "notebook": "demo", "params": {}, "metrics": {}, "status": "ok", **more}


def test_what_is_no_file_is_written_into_and_a_link_stays_one(tmp_path: Path) -> None:
    """As root, --json /dev/full made a file of a device, and the system's own programs broke."""
    file, link, pipe = tmp_path / "file", tmp_path / "link", tmp_path / "pipe"
    file.write_text("old")
    link.symlink_to(file)
    records.write_atomically(link, "new")
    assert link.is_symlink()
    assert file.read_text() == "new"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    records.write_atomically(pipe, "through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert pipe.is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "pipe"]


def test_a_record_reads_back(tmp_path):
    append_record(tmp_path, line(metrics={"x": 1.5}, texts={"answer": "naïve\nlines ☾"}))
    found, problems = read_records(tmp_path)
    assert problems == []
    assert found[0]["metrics"] == {"x": 1.5}
    assert found[0]["texts"] == {"answer": "naïve\nlines ☾"}
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 1


def test_the_file_is_strict_json_and_non_finite_numbers_come_back(tmp_path):
    """Python would write a bare NaN, which no other reader of JSON takes."""
    append_record(tmp_path, line(metrics={"a": math.nan, "b": -math.inf}, samples={"c": [math.inf, 1.0]}))

    def refuse(name):
        raise AssertionError(f"bare {name} in the file")

    json.loads((tmp_path / "records.jsonl").read_text(), parse_constant=refuse)
    found = read_records(tmp_path)[0][0]
    assert math.isnan(found["metrics"]["a"])
    assert found["metrics"]["b"] == -math.inf
    assert found["samples"]["c"] == [math.inf, 1.0]


def test_scalars_of_numpy_and_torch_are_numbers_and_anything_else_is_refused(tmp_path):
    append_record(tmp_path, line(metrics={"n": np.float32(0.5), "t": torch.tensor(3)}))
    assert read_records(tmp_path)[0][0]["metrics"] == {"n": 0.5, "t": 3}
    with pytest.raises(RecordError, match="not JSON"):
        append_record(tmp_path, line(settings={"where": Path("x")}))
    assert len(read_records(tmp_path)[0]) == 1, "a refused record must leave nothing behind"


def test_half_a_character_does_not_lose_the_record(tmp_path):
    """An error's message may hold a file name that is no UTF-8; the record of the failure went down with it."""
    append_record(tmp_path, line(error={"cell": 1, "type": "OSError", "message": "no \udcff.gguf, é"}))
    [found], problems = read_records(tmp_path)
    assert (found["error"]["message"], problems) == ("no \udcff.gguf, é", [])


def edited(**changes) -> str:
    """A line whose parts a person has changed by hand."""
    return json.dumps(line(schema=records.SCHEMA, **changes))


@pytest.mark.parametrize(
    "bad",
    ["{half", '{"schema": "other"}', '{"schema": "nanokit.run/1"}', "[]", "null",
     edited(run_id=7), edited(metrics=[]), edited(params=None), edited(samples=3), edited(metrics={"x": [1]}),
     edited(metrics={"x": "fast"}), edited(samples={"x": [{}]}), edited(samples={"x": None})],
)  # fmt: skip
def test_a_corrupt_line_is_named_and_the_others_are_read(tmp_path, bad):
    append_record(tmp_path, line("first"))
    with open(tmp_path / "records.jsonl", "a") as file:
        file.write(bad)  # no line break: the writer was cut off
    append_record(tmp_path, line("last"))
    found, problems = read_records(tmp_path)
    assert [r["run_id"] for r in found] == ["first", "last"]
    assert len(problems) == 1
    assert problems[0].startswith("records.jsonl line 2: ")


def test_a_line_that_is_no_text_is_named_too(tmp_path):
    (tmp_path / "records.jsonl").write_bytes(b"\xff\xfe\n")
    append_record(tmp_path, line())
    found, problems = read_records(tmp_path)
    assert (len(found), len(problems)) == (1, 1)


WRITE = """
import sys
from pathlib import Path
from nanokit.lab.records import append_record
for i in range(40):
    append_record(Path(sys.argv[1]), {"run_id": f"{sys.argv[2]}-{i}", "params": {}, "metrics": {}, "status": "ok",
                                      "texts": {"long": sys.argv[2] * 5000}})
"""


def test_concurrent_writers_lose_and_mix_nothing(tmp_path):
    writers = [subprocess.Popen([sys.executable, "-c", WRITE, str(tmp_path), name]) for name in "pqr"]
    assert [w.wait(60) for w in writers] == [0, 0, 0]
    found, problems = read_records(tmp_path)
    assert problems == []
    assert {r["run_id"] for r in found} == {f"{name}-{i}" for name in "pqr" for i in range(40)}
    assert all(r["texts"]["long"] == r["run_id"][0] * 5000 for r in found)


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    append_record(tmp_path, line("first"))
    before = (tmp_path / "records.jsonl").read_bytes()

    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)  # the write itself may have gone through in part
    with pytest.raises(RecordError, match="No space left on device"):
        append_record(tmp_path, line("second"))
    assert (tmp_path / "records.jsonl").read_bytes() == before


def test_a_run_is_found_by_a_unique_beginning(tmp_path):
    for run_id in ("20260101T000000Z-aa", "20260101T000000Z-ab", "20260102T000000Z-aa"):
        append_record(tmp_path, line(run_id))
    assert find_record(tmp_path, "20260102")["run_id"] == "20260102T000000Z-aa"
    assert find_record(tmp_path, "20260101T000000Z-ab")["run_id"] == "20260101T000000Z-ab"
    assert find_record(tmp_path, "last")["run_id"] == "20260102T000000Z-aa"
    with pytest.raises(RecordError, match="2 runs start with"):
        find_record(tmp_path, "20260101")
    with pytest.raises(RecordError, match="newest 20260101T000000Z-aa"):
        find_record(tmp_path, "2027")


def test_a_notebook_of_the_checkout_records_into_the_checkouts_runs(tmp_path, monkeypatch):
    """Never beside the notebook: JupyterLab works in the notebook's folder."""
    (tmp_path / "notebooks").mkdir()
    monkeypatch.delenv("NANOKIT_RUNS", raising=False)
    monkeypatch.setattr(records, "notebooks_dir", lambda: tmp_path / "notebooks")
    monkeypatch.chdir(tmp_path / "notebooks")
    assert default_runs_dir() == tmp_path / "runs"
    monkeypatch.setattr(records, "PACKAGE", tmp_path)  # a wheel: the notebooks lie inside the package
    monkeypatch.setenv("NANOKIT_HOME", str(tmp_path / "cache"))
    assert default_runs_dir() == tmp_path / "cache" / "runs"
    monkeypatch.setenv("NANOKIT_RUNS", str(tmp_path / "mine"))
    assert default_runs_dir() == tmp_path / "mine"
    monkeypatch.delenv("NANOKIT_RUNS")
    monkeypatch.chdir(tmp_path)
    assert default_runs_dir() == tmp_path / "runs"


def test_a_cell_in_jupyter_appends_its_own_record(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NANOKIT_RUNS", str(tmp_path))
    monkeypatch.delenv(records.PART_VARIABLE, raising=False)
    monkeypatch.setenv("JPY_SESSION_NAME", "/somewhere/else/00_tour.ipynb")
    records.record(Result(Params(), {"tokens": 1.0}))
    assert capsys.readouterr().out == "recorded 1 figure in runs/records.jsonl\n"
    found = read_records(tmp_path)[0][0]
    assert found["notebook"] == "00_tour"
    assert found["params"] == {"preset": "quick"}
    assert "/somewhere" not in json.dumps(found)


def test_the_package_gives_every_name_it_lists():
    """A submodule named like a function would hide it once it is imported."""
    import nanokit.lab.runner  # noqa: F401 - imports most of the package

    for name in lab._HOME:
        assert callable(getattr(lab, name)), name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        lab.nothing  # noqa: B018


def test_a_second_record_of_one_run_is_refused(tmp_path, monkeypatch):
    """The runner writes one line: the first result would silently be lost."""
    monkeypatch.setenv(records.PART_VARIABLE, str(tmp_path / "part.json"))
    records.record(Result(Params(), {"tokens": 1.0}))
    with pytest.raises(RecordError, match="has its record already"):
        records.record(Result(Params(), {"tokens": 2.0}))
    assert records.read_part(tmp_path / "part.json")["metrics"] == {"tokens": 1.0}


def test_git_and_folders_of_this_machine():
    state = git_state()
    assert state is None or len(state["commit"]) == 40
    text = without_paths(f"{Path.home()}/models/x and {records.PACKAGE}/lab/a.py")
    assert str(Path.home()) not in text or str(Path.home()) == "/"
    assert str(records.PACKAGE) not in text


def test_another_file_at_the_same_path_is_noticed(tmp_path):
    model = tmp_path / "m.gguf"
    model.write_bytes(b"one")
    before = input_files({"model": str(model), "name": "not a file", "k": 3})
    assert before["model"]["name"] == "m.gguf"
    assert set(before) == {"model"}
    model.write_bytes(b"another")
    assert input_files({"model": str(model)}) != before


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_whatever_is_json_becomes_one_strict_line(settings):
    text = records.dumps({"settings": settings})
    assert "\n" not in text

    def refuse(name):
        raise AssertionError(name)

    json.loads(text, parse_constant=refuse)
