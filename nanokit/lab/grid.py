"""A grid of parameters over one notebook: every combination once, and only what is not there yet.

    run_grid("speculative_depth", ["k=1,3,7", "bits=4,8"], {"preset": "quick"}, report=print)

Each point is a run of its own with its own kernel, so that no point finds the caches that the one before it
left. A point is skipped when the run folder holds a good record of the same notebook code, package code,
versions, parameters and input files. A failing point does not stop the others: a grid runs over night, and
one combination that does not fit into memory should not cost the rest.
"""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanokit.errors import NotebookRunError, ParameterError
from nanokit.lab.cell import content_hash, find_notebook, read_notebook, resolve
from nanokit.lab.machine import versions
from nanokit.lab.params import Value
from nanokit.lab.provenance import code_hash, input_files
from nanokit.lab.records import default_runs_dir, read_records
from nanokit.lab.runner import CELL_TIMEOUT_S, run_notebook
from nanokit.lab.table import Table


@dataclass(frozen=True)
class Point:
    """One combination. params: the grid's. status: "ok", "skipped" (an older run counts) or "failed"."""

    params: dict[str, Value]
    status: str
    run_id: str | None
    message: str = ""


@dataclass(frozen=True)
class Grid:
    """All points in order."""

    points: tuple[Point, ...]

    @property
    def failed(self) -> int:
        """Number of points without a result; the command line's exit code says whether it is 0."""
        return sum(point.status == "failed" for point in self.points)

    def table(self) -> Table:
        """One row a point."""
        names = list(self.points[0].params) if self.points else []
        rows = [
            (*(str(point.params[name]) for name in names), point.status, point.run_id or "", point.message)
            for point in self.points
        ]
        return Table((*names, "status", "run", "message"), rows)


def parse_grid(axes: Sequence[str]) -> dict[str, list[str]]:
    """`["k=1,3,7"]` -> {"k": ["1", "3", "7"]}; commas inside a list's brackets do not split. Raises
    ParameterError.
    """
    grid: dict[str, list[str]] = {}
    for axis in axes:
        name, equals, values = axis.partition("=")
        if not equals or not name or not values or name in grid:
            raise ParameterError(
                f"{axis!r} is no axis of a grid", needed="name=value,value,… and each name once", found=axis
            )
        grid[name] = re.split(r",(?![^\[]*\])", values)
    return grid


def run_grid(
    notebook: str | Path,
    axes: Sequence[str] | Mapping[str, Sequence[str | Value]],
    params: Mapping[str, str | Value] | None = None,
    *,
    runs: Path | None = None,
    cell_timeout_s: int = CELL_TIMEOUT_S,
    report: Callable[[str], None] = lambda line: None,
    before: Callable[[Mapping[str, Value]], None] = lambda params: None,
) -> Grid:
    """Run every point that has no good record yet; the last axis varies fastest.

    axes: as typed ("k=1,3,7"), or name -> values. params: those that all points share. report: told a line
    when a point begins and one when it ends. before: see `run_notebook`; not called for skipped points.
    Raises ParameterError before the first run when any point is invalid. Points that fail are in the result.
    """
    source = find_notebook(str(notebook))
    nb = read_notebook(source)
    grid = axes if isinstance(axes, Mapping) else parse_grid(axes)
    if twice := grid.keys() & (params or {}).keys():
        raise ParameterError(f"{', '.join(sorted(twice))} is both in the grid and a single parameter")
    runs = (runs or default_runs_dir()).resolve()
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    resolved = [resolve(nb, {**(params or {}), **combination}, source.parent) for combination in combinations]
    points = []
    for number, (combination, one) in enumerate(zip(combinations, resolved, strict=True), start=1):
        shown = {name: one.injected[name] for name in combination}
        report(f"[{number}/{len(resolved)}] " + " ".join(f"{name}={value}" for name, value in shown.items()))
        wanted = {
            "status": "ok",
            "notebook_sha256": content_hash(nb),
            "code_sha256": code_hash(),
            "params": one.full,
            "inputs": input_files(one.full),
            "versions": versions(),
        }
        if (done := _good_record(wanted, runs)) is not None:
            point = Point(shown, "skipped", done)
        else:
            try:
                run = run_notebook(source, one.injected, runs=runs, cell_timeout_s=cell_timeout_s, before=before)
                point = Point(shown, "ok", run.record["run_id"])
            except NotebookRunError as error:
                point = Point(shown, "failed", None, f"{error.what}: {error.found}")
        report(f"[{number}/{len(resolved)}] {point.status} {point.run_id or ''} {point.message}".rstrip())
        points.append(point)
    return Grid(tuple(points))


def _good_record(wanted: Mapping[str, Any], runs: Path) -> str | None:
    """Run id of the newest record that stands for a point; wanted: what it must hold."""
    for old in reversed(read_records(runs)[0]):
        if all(old.get(name) == value for name, value in wanted.items()):
            return str(old["run_id"])
    return None
