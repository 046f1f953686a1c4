"""What every committed notebook must look like, so that readers see it and nbval compares it."""

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from nanokit.lab.cell import differences, params_class
from nanokit.paths import notebooks_dir

NOTEBOOKS = sorted(notebooks_dir().glob("*.ipynb"))
SOLUTIONS = sorted(notebooks_dir().glob("solutions/*.ipynb"))


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def code_cells(path: Path) -> list[Any]:
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


each = pytest.mark.parametrize("path", NOTEBOOKS + SOLUTIONS, ids=lambda path: path.stem)
ordered = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_there_are_notebooks() -> None:
    """Every other test here would pass over an empty folder."""
    assert [path.name for path in NOTEBOOKS][:1] == ["00_tour.ipynb"]


@each
def test_runs_on_any_machine_and_was_run_in_order(path: Path) -> None:
    """A private kernel name is found on one machine only; missing counts make nbval compare nothing."""
    notebook = read(path)
    assert notebook.metadata.kernelspec.name == "python3"
    assert [cell.execution_count for cell in code_cells(path)] == list(range(1, len(code_cells(path)) + 1))
    assert not [o for cell in code_cells(path) for o in cell.outputs if o.output_type == "error"]


@each
def test_carries_no_widget_state_papermill_notes_or_bulk(path: Path) -> None:
    """Widget state is 5 MB a figure; papermill's notes differ in every run."""
    notebook = read(path)
    assert "widgets" not in notebook.metadata
    assert "papermill" not in notebook.metadata
    assert not [cell for cell in notebook.cells if "papermill" in cell.metadata or "injected-parameters" in tags(cell)]
    assert path.stat().st_size < 500_000


@each
def test_names_no_machine(path: Path) -> None:
    """Paths, process ids and addresses of whoever ran it last."""
    text = re.sub(r'"image/png": "[^"]*"', "", path.read_text("utf-8"))
    assert not re.search(r"/(root|home|tmp|work|Users)/|ipykernel_\d+|0x[0-9a-f]{8,}", text)


@each
def test_figures_can_be_seen_without_javascript(path: Path) -> None:
    """GitHub shows nothing of a plotly output unless a PNG lies beside it."""
    for cell in code_cells(path):
        for output in cell.outputs:
            if "application/vnd.plotly.v1+json" in output.get("data", {}):
                assert "image/png" in output.data, cell.source
                assert output.data["text/plain"].strip(), cell.source


@ordered
def test_header_names_question_and_time(path: Path) -> None:
    first = read(path).cells[0]
    assert first.cell_type == "markdown"
    assert first.source.startswith("# ")
    for part in ("**Question.**", "**You will measure.**", "**Time.**", "**Next.**"):
        assert part in first.source
    headings = [line for cell in read(path).cells if cell.cell_type == "markdown"
                for line in cell.source.splitlines() if line.startswith("#")]  # fmt: skip
    assert sum(line.startswith("# ") for line in headings) == 1


@ordered
def test_parameters_cell_is_the_dataclass(path: Path) -> None:
    """One source: the cell that papermill reads and the dataclass that validates must not drift apart."""
    notebook = read(path)
    tagged = [cell for cell in notebook.cells if "parameters" in tags(cell)]
    assert len(tagged) == 1
    params = params_class(notebook, path.parent)
    assert params is not None
    assert differences(notebook, params) == []
    assert tagged[0].source.strip() == params.parameter_lines()


@ordered
def test_cells_that_are_not_compared_end_in_an_assert(path: Path) -> None:
    """A timing cell whose output nbval ignores must say itself what has to hold."""
    ignored = [cell for cell in code_cells(path) if "nbval-ignore-output" in tags(cell)]
    assert ignored
    assert len(ignored) < len(code_cells(path)) / 2
    for cell in ignored:
        assert cell.source.strip().splitlines()[-1].startswith("assert "), cell.source


@each
def test_pictures_have_alternative_text(path: Path) -> None:
    markdown = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    assert not re.search(r"!\[\s*\]\(", markdown)
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", markdown):
        assert (path.parent / target).exists(), target


def tags(cell: Any) -> list[str]:
    return cell.metadata.get("tags", [])
