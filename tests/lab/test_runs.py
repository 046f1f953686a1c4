"""Lists, views and comparisons of records as text."""

import math

import pytest

from nanokit.lab.records import RecordError, append_record
from nanokit.lab.runs import diff_runs, list_runs, show_run


@pytest.fixture
def runs(tmp_path):
    common = {
        "notebook": "00_tour",
        "params": {"preset": "smoke", "k": 1},
        "status": "ok",
        "duration_s": 3.14,
    }
    append_record(
        tmp_path,
        common
        | {
            "run_id": "run-a",
            "metrics": {"decode_tok_per_s": 20.0, "tokens": 40.0, "loss": math.nan},
            "samples": {"decode_tok_per_s": [19.0, 20.0, 22.0]},
            "texts": {"answer": "the moon"},
            "machine": {"cpu": "one", "isa": ["avx2"]},
            "versions": {"torch": "1"},
            "git": {"commit": "0" * 40, "dirty": True},
        },
    )
    append_record(
        tmp_path,
        common
        | {
            "run_id": "run-b",
            "params": {"preset": "smoke", "k": 2},
            "metrics": {"decode_tok_per_s": 30.0, "tokens": 40.0, "loss": math.nan, "extra": 1.0},
            "texts": {"answer": "the sun"},
            "machine": {"cpu": "one", "isa": ["avx2"]},
            "versions": {"torch": "2"},
        },
    )
    failed = {"status": "failed", "metrics": {}, "error": {"cell": 3, "type": "ValueError", "message": "no"}}
    append_record(tmp_path, common | failed | {"run_id": "run-c", "notebook": "10_x", "duration_s": None})
    return tmp_path


def test_the_list_shows_failed_runs_and_names_bad_lines(runs):
    with open(runs / "records.jsonl", "a") as file:
        file.write("{half\n")
    table, problems = list_runs(runs)
    assert str(table).splitlines() == [
        "run    notebook  status  seconds  preset  figures",
        "run-a  00_tour   ok          3.1  smoke         3",
        "run-b  00_tour   ok          3.1  smoke         4",
        "run-c  10_x      failed           smoke         0",
    ]
    assert len(problems) == 1
    assert [row[0] for row in list_runs(runs, notebook="00_tour", last=1)[0].rows] == ["run-b"]
    assert len(list_runs(runs, last=0)[0].rows) == 3


def test_an_empty_folder_is_no_error(tmp_path):
    assert str(list_runs(tmp_path)[0]) == "(no rows)"


def test_one_run_in_full(runs):
    text = show_run("run-a", runs)
    for part in (
        "decode_tok_per_s     20  19 to 22 of 3",
        "with changes",
        "the moon",
        "avx2",
        "nan",
        "preset",
    ):
        assert part in text
    assert "cell 3: ValueError: no" in show_run("run-c", runs)
    with pytest.raises(RecordError):
        show_run("run-x", runs)


def test_a_diff_shows_what_differs_and_nothing_else(runs):
    assert [(row[0], row[1]) for row in diff_runs("run-a", "run-b", runs).rows] == [
        ("params", "k"),
        ("texts", "answer"),
        ("versions", "torch"),
        ("timing", "decode_tok_per_s"),
        ("figure", "extra"),
    ]
    assert "1.5x" in str(diff_runs("run-a", "run-b", runs))
    assert diff_runs("run-a", "run-a", runs).rows == []
