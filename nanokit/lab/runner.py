"""Run a notebook headless, thin over papermill's Python API, and keep what came of it.

    run = run_notebook("tour", {"preset": "smoke"})      # str values are read by the parameter's type
    run.output    runs/20261129T215612Z_00_tour_3f9a1c.ipynb, the executed notebook
    run.record    the line that was appended to runs/records.jsonl

papermill's own command line was rejected because it cannot drop widget state (megabytes per figure), takes an
unknown parameter for a warning, types values by how they look, works in the caller's directory and never
times out. Here:

- The kernel is the Python that runs this, whatever kernel the notebook names: a private kernel name would be
  missing on every other machine. It works in the notebook's folder and sees NANOKIT_HEADLESS=1; the
  environment is handed to the kernel and this process's own is left alone.
- The executed notebook is written to a scratch name and renamed when the run is over, without papermill's
  timestamps in every cell, so that two executed copies can be compared.
- However the run ends (done, failing cell, timeout, dead kernel, Ctrl-C) there is an executed notebook as far
  as it got and a record, and the error names both.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nbformat

from nanokit.errors import NotebookRunError, ParameterError
from nanokit.lab.cell import content_hash, find_notebook, read_notebook, resolve
from nanokit.lab.params import Value
from nanokit.lab.provenance import code_hash, input_files, provenance, without_paths
from nanokit.lab.records import (
    PART_VARIABLE,
    append_record,
    default_runs_dir,
    new_run_id,
    read_part,
    write_atomically,
)

CELL_TIMEOUT_S = 300
INSERTED = {"injected-parameters", "papermill-error-cell-tag"}  # tags of the cells that papermill adds


@dataclass(frozen=True)
class Run:
    """A finished run: the executed notebook and the record's line."""

    output: Path
    record: dict[str, Any]


def run_notebook(
    notebook: str | Path,
    params: Mapping[str, str | Value] | None = None,
    *,
    runs: Path | None = None,
    cell_timeout_s: int = CELL_TIMEOUT_S,
    before: Callable[[Mapping[str, Value]], None] = lambda params: None,
) -> Run:
    """Execute a notebook and return its executed copy and record.

    notebook: a path, or a shipped one's name ("00_tour", "tour"). params: by name; a str is read as the
    parameter's type, other values are checked against it. runs: default `default_runs_dir()`. before: called
    with all parameters once everything is checked and before the clock starts. Raises ParameterError before
    anything runs; NotebookRunError when a cell fails, times out or kills its kernel, after the executed copy
    and a record of status "failed" are written. KeyboardInterrupt passes through, after a record of status
    "interrupted".
    """
    source = find_notebook(str(notebook))
    nb = read_notebook(source)
    resolved = resolve(nb, params or {}, source.parent)
    if cell_timeout_s < 1:  # nbclient reads these as no limit
        raise ParameterError("the cell timeout is out of range", found=f"{cell_timeout_s} s", needed="at least 1 s")
    runs = (runs or default_runs_dir()).resolve()
    try:
        runs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(runs, error) from error
    before(resolved.full)
    started, clock = datetime.now(UTC), time.perf_counter()
    run_id = new_run_id(started)
    stamp, _, short = run_id.partition("-")
    output = runs / f"{stamp}_{source.stem}_{short}.ipynb"
    part = runs / f".{run_id}.part.json"
    line: dict[str, Any] = {
        "run_id": run_id,
        "notebook": source.stem,
        "notebook_sha256": content_hash(nb),
        "code_sha256": code_hash(),  # before the kernel imports it, not when the last cell records
        "params": resolved.full,
        "inputs": input_files(resolved.full),
        "started": started.isoformat(timespec="seconds"),
    }
    found: dict[str, Any] = {}
    status, failure = "failed", None
    try:
        failure = _execute(nb, source, output, part, resolved.injected, cell_timeout_s)
        found = read_part(part)
        if failure is None and resolved.declared and found.get("params", resolved.full) != resolved.full:
            failure = Failure(0, "other parameters", f"the notebook measured with {found['params']}")
        status = "failed" if failure else "ok"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    except OSError as error:
        raise _unwritable(runs, error) from error
    finally:
        part.unlink(missing_ok=True)
        line = {"metrics": {}} | (found or provenance()) | line
        line |= {
            "duration_s": round(time.perf_counter() - clock, 3),
            "status": status,
            "error": failure.to_record() if failure else None,
            "output": output.name if output.exists() else None,
        }
        append_record(runs, line)
    if failure:
        raise failure.to_error(source, output, runs, run_id)
    return Run(output, line)


def _unwritable(runs: Path, error: OSError) -> NotebookRunError:
    return NotebookRunError(
        "the run folder cannot be written",
        found=f"{error.strerror} ({error.filename or runs})",
        do="free space, or set NANOKIT_RUNS to a folder that can be written",
    )


@dataclass(frozen=True)
class Failure:
    """Where and how a notebook stopped. cell: its number in the source notebook, from 1; 0 for none."""

    cell: int
    kind: str
    message: str

    def to_record(self) -> dict[str, Any]:
        """The record's `error`."""
        return {"cell": self.cell, "type": self.kind, "message": without_paths(self.message)}

    def to_error(self, source: Path, output: Path, runs: Path, run_id: str) -> NotebookRunError:
        """What the caller sees."""
        return NotebookRunError(
            f"{source.stem} failed" + (f" in cell {self.cell}" if self.cell else ""),
            found=f"{self.kind}: {self.message}" if self.message else self.kind,
            do=f"look into {output}; the record is {run_id} in {runs / 'records.jsonl'}",
        )


def _execute(
    nb: nbformat.NotebookNode,
    source: Path,
    output: Path,
    part: Path,
    params: Mapping[str, Value],
    cell_timeout_s: int,
) -> Failure | None:
    """Run nb through papermill; write the executed copy to output whatever happens."""
    import papermill
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    from nanokit.lab.kernel import kernel_manager

    scratch = output.with_name(f".{output.name}")  # papermill wants the suffix .ipynb
    logging.getLogger("papermill").setLevel(logging.CRITICAL)  # its failures are raised, too
    environment = {**os.environ, "NANOKIT_HEADLESS": "1", PART_VARIABLE: str(part)}
    try:
        papermill.execute_notebook(
            nb,
            str(scratch).replace("{", "{{").replace("}", "}}"),  # papermill formats its output path
            parameters=dict(params),
            kernel_name="python3",
            language="python",
            progress_bar=sys.stderr.isatty(),
            execution_timeout=cell_timeout_s,
            store_widget_state=False,
            kernel_manager_class=kernel_manager(environment),
            resources={"metadata": {"path": str(source.parent)}},
        )
    except PapermillExecutionError as error:
        # All lines, as one: those of a NanokitError say what was found and what to do.
        message = "; ".join(part.strip() for part in error.evalue.splitlines() if part.strip())
        return Failure(_failed_cell(scratch), error.ename, message[:1000])
    except CellTimeoutError:
        return Failure(_failed_cell(scratch), "timeout", f"the cell ran longer than {cell_timeout_s} s")
    except DeadKernelError:
        return Failure(_failed_cell(scratch), "dead kernel", "the kernel died: out of memory, or a crash")
    except RuntimeError as error:  # how nbclient says that the kernel did not start
        return Failure(0, "no kernel", str(error))
    finally:
        _keep(scratch, output)
    return None


def _failed_cell(scratch: Path) -> int:
    """Number of the cell that ended the run, as counted in the source notebook from 1; 0 for none.

    It is the first one that shows an error, else (timeout, dead kernel) the last one that was started. The
    cells that papermill inserts (parameters, error marks) are not counted.
    """
    nb = _read(scratch)
    last = 0
    ours = [c for c in nb.cells if not INSERTED & set(c.metadata.get("tags", []))] if nb else []
    for number, cell in enumerate(ours, start=1):
        if any(o.output_type == "error" for o in cell.get("outputs", [])):
            return number
        if cell.metadata.get("papermill", {}).get("start_time"):
            last = number
    return last


def _read(scratch: Path) -> nbformat.NotebookNode | None:
    """The executed copy as papermill left it, None when it left none or was cut off while writing."""
    try:
        return nbformat.read(scratch, as_version=4)
    except (FileNotFoundError, nbformat.reader.NotJSONError, UnicodeDecodeError):
        return None


def _keep(scratch: Path, output: Path) -> None:
    """Write the executed copy under its name, without papermill's timestamps, and drop the scratch file."""
    nb = _read(scratch)
    if nb is not None:
        nb.metadata.pop("papermill", None)
        for cell in nb.cells:
            cell.metadata.pop("papermill", None)
            if cell.metadata.get("tags") == []:
                del cell.metadata["tags"]
        write_atomically(output, nbformat.writes(nb) + "\n")
    scratch.unlink(missing_ok=True)
