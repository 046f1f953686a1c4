"""`nanokit run` at a terminal: run a notebook, a grid or a repetition, and say in a few lines what came of it."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanokit.lab.params import Value
from nanokit.lab.records import default_runs_dir
from nanokit.lab.result import figure
from nanokit.lab.table import Table


def run(notebook: str, params: Mapping[str, str], timeout_s: int) -> int:
    """Run one notebook and print its summary."""
    from nanokit.lab.runner import run_notebook

    done = run_notebook(notebook, params, cell_timeout_s=timeout_s, before=_fetch_if_needed)
    _summary(done.record, done.output)
    return 0


def repeat(reference: str, notebook: str | None, timeout_s: int) -> int:
    """Run a record again; the figures that do not depend on the clock must be equal."""
    from nanokit.lab.repeat import repeat_run

    done = repeat_run(reference, notebook, cell_timeout_s=timeout_s, before=_fetch_if_needed)
    _summary(done.run.record, done.run.output)
    print(f"repeated {reference}: {done.compared} figures and texts that do not depend on time are equal")
    return 0


def grid(notebook: str, axes: list[str], params: Mapping[str, str], timeout_s: int) -> int:
    """Run every combination that has no good record yet; 1 when a point failed."""
    from nanokit.lab.grid import run_grid

    done = run_grid(
        notebook,
        axes,
        params,
        cell_timeout_s=timeout_s,
        report=lambda line: print(line, file=sys.stderr),
        before=_fetch_if_needed,
    )
    print(done.table())
    print(f"records: {_near(default_runs_dir() / 'records.jsonl')}")
    return 1 if done.failed else 0


def _fetch_if_needed(params: Mapping[str, Value]) -> None:
    """A notebook that takes a model and was given none needs the default one; here its progress shows."""
    if params.get("model") != "":
        return
    from nanokit.model.fetch import TerminalProgress, resolve_default

    with TerminalProgress() as progress:
        resolve_default(progress)


def _summary(record: Mapping[str, Any], output: Path) -> None:
    for name, text in record.get("texts", {}).items():
        print(f"{name}: {text}")
    rows = [(name, figure(value)) for name, value in record["metrics"].items()]
    if rows:
        print(Table(("figure", "value"), rows, right=("value",)))
    for remark in record.get("remarks", []):
        print(f"note: {remark}")
    print(f"{record['notebook']} ({record['duration_s']:.0f} s): {_near(output)}")
    print(f"record {record['run_id']}: {_near(output.parent / 'records.jsonl')}")
    print("next: `nanokit lab` opens the notebooks in JupyterLab")


def _near(path: Path) -> str:
    """A path as short as it can be written from here."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
