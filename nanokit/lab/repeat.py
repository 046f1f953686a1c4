"""Repeat a recorded run and compare every figure that does not depend on the clock.

This is what makes a record evidence: whoever doubts a figure runs the same notebook with the same parameters,
and whatever is not a timing (`result.is_timing` tells by the name) has to be equal, bit for bit. A tolerance
was rejected: it would hide exactly the drift that the kit's contracts exclude.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanokit.errors import NotebookRunError
from nanokit.lab.cell import content_hash, find_notebook, read_notebook
from nanokit.lab.params import Value
from nanokit.lab.records import RecordError, default_runs_dir, find_record
from nanokit.lab.result import is_timing
from nanokit.lab.runner import CELL_TIMEOUT_S, Run, run_notebook


@dataclass(frozen=True)
class Repeat:
    """A repetition that agreed. compared: how many figures and texts were equal."""

    run: Run
    compared: int


def repeat_run(
    reference: str,
    notebook: str | Path | None = None,
    *,
    runs: Path | None = None,
    cell_timeout_s: int = CELL_TIMEOUT_S,
    before: Callable[[Mapping[str, Value]], None] = lambda params: None,
) -> Repeat:
    """Run the notebook of a record again with the record's parameters.

    reference: a run id, its beginning, or "last". notebook: where it is, if it is none of the shipped ones (a
    record holds its name only). before: see `run_notebook`. Raises RecordError when there is no such record
    or it has nothing to compare; NotebookRunError listing every difference; and what `run_notebook` raises.
    """
    runs = (runs or default_runs_dir()).resolve()
    recorded = find_record(runs, reference)
    if recorded["status"] != "ok" or not recorded["notebook"]:
        raise RecordError(
            f"run {recorded['run_id']} cannot be repeated",
            found=f"status {recorded['status']}, notebook {recorded['notebook']}",
            needed="a run of a notebook that went well",
        )
    if not comparable(recorded):
        raise RecordError(f"run {recorded['run_id']} holds only timings", do="there is nothing to compare")
    source = find_notebook(str(notebook or recorded["notebook"]))
    run = run_notebook(source, recorded["params"], runs=runs, cell_timeout_s=cell_timeout_s, before=before)
    differences = compare(recorded, run.record)
    if differences:
        changed = content_hash(read_notebook(source)) != recorded.get("notebook_sha256")
        raise NotebookRunError(
            f"the repetition of {recorded['run_id']} differs in {len(differences)} place(s)",
            found="\n    ".join(["", *differences]),
            needed="equal figures; only timings may differ",
            do="the notebook's code has changed since" if changed else f"look into {run.output}",
        )
    return Repeat(run, len(comparable(recorded)))


def comparable(record: Mapping[str, Any]) -> dict[str, Any]:
    """What has to be equal on repetition (metrics, sample lists, texts), by a readable name."""
    found = {f"metric {name}": value for name, value in record["metrics"].items() if not is_timing(name)}
    found |= {f"samples {name}": value for name, value in record["samples"].items() if not is_timing(name)}
    return found | {f"text {name}": value for name, value in record.get("texts", {}).items()}


def compare(recorded: Mapping[str, Any], repeated: Mapping[str, Any]) -> list[str]:
    """One sentence a difference; NaN equals NaN."""
    before, after = comparable(recorded), comparable(repeated)
    return [
        f"{name}: was {before.get(name, 'absent')!r}, is {after.get(name, 'absent')!r}"
        for name in sorted(before.keys() | after.keys())
        if name not in before or name not in after or repr(before[name]) != repr(after[name])
    ]
