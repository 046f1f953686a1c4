"""The tour executed as users execute it: nbval that can fail, papermill with another parameter, repetition."""

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from nanokit.lab.records import read_records
from nanokit.lab.repeat import comparable
from nanokit.lab.runner import run_notebook
from nanokit.paths import notebooks_dir

pytestmark = pytest.mark.model

TOUR = notebooks_dir() / "00_tour.ipynb"


def test_nbval_fails_on_a_changed_answer(tmp_path: Path, default_model: Path) -> None:
    """A stripped or uncounted notebook passes nbval with nothing compared: one changed word has to fail."""
    notebook = nbformat.read(TOUR, as_version=4)
    answer = next(i for i, cell in enumerate(notebook.cells) if "print(result.answer)" in cell.source)
    notebook.cells = notebook.cells[: answer + 1]
    [output] = notebook.cells[answer].outputs
    assert "language" in output.text
    nbformat.write(notebook, tmp_path / "good.ipynb")
    output.text = output.text.replace("language", "luggage", 1)
    nbformat.write(notebook, tmp_path / "changed.ipynb")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env", "-q", "-p", "no:cacheprovider",
         "--rootdir", str(tmp_path), "-c", "/dev/null", str(tmp_path)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert len(failed) == 1, done.stdout
    assert "changed.ipynb" in failed[0]


def test_plain_papermill_takes_a_parameter_and_stays_small(tmp_path: Path, default_model: Path) -> None:
    """papermill's own command line keeps working, says another thing when asked another, and stores no widgets."""
    output, runs = tmp_path / "out.ipynb", tmp_path / "runs"
    subprocess.run(
        [sys.executable, "-m", "papermill", str(TOUR), str(output), "-p", "preset", "smoke",
         "-p", "question", "How many days has a week?", "--cwd", str(tmp_path), "--no-progress-bar"],
        check=True, capture_output=True, env=_environment(runs),
    )  # fmt: skip
    notebook = nbformat.read(output, as_version=4)
    texts = "\n".join(o.get("text", "") for c in notebook.cells if c.cell_type == "code" for o in c.outputs)
    assert "7 days" in texts
    assert "language model" not in texts
    assert output.stat().st_size < 1_000_000
    [record], _ = read_records(runs)
    assert record["params"]["question"] == "How many days has a week?"


def test_a_run_is_repeated_by_its_record(tmp_path: Path, default_model: Path) -> None:
    """`nanokit run` and a later run with the same parameters agree in everything that does not depend on time."""
    first = run_notebook("tour", {"preset": "smoke", "max_tokens": "12"}, runs=tmp_path)
    again = run_notebook("tour", {"preset": "smoke", "max_tokens": 12}, runs=tmp_path)
    assert comparable(first.record) == comparable(again.record)
    assert {"text answer", "metric answer_tokens", "metric bytes_per_token"} <= set(comparable(first.record))
    assert first.record["status"] == "ok"
    assert first.record["machine"]["cores"] >= 1
    executed = json.loads(first.output.read_text("utf-8"))
    assert "widgets" not in executed["metadata"]
    figures = [
        o["data"] for c in executed["cells"] for o in c.get("outputs", [])
        if "application/vnd.plotly.v1+json" in o.get("data", {})
    ]  # fmt: skip
    assert figures
    assert all("text/plain" in data for data in figures)


def _environment(runs: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    return kept | {"NANOKIT_RUNS": str(runs)}
