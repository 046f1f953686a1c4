"""What was run: a list, one run in full, and two runs side by side, as text for a terminal."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanokit.errors import ParameterError
from nanokit.lab.records import default_runs_dir, find_record, read_records
from nanokit.lab.result import figure, is_timing
from nanokit.lab.table import Table


def list_runs(runs: Path | None = None, *, notebook: str | None = None, last: int = 20) -> tuple[Table, list[str]]:
    """The newest runs, oldest first, and one sentence for each line of the file that is no record.

    notebook: only runs of this one. last: at most so many, 0 for all. Raises ParameterError when it is negative.
    """
    if last < 0:
        raise ParameterError("the number of runs to list is negative", found=last, needed="0 for all, or more")
    records, problems = read_records(runs or default_runs_dir())
    chosen = [r for r in records if notebook in (None, r.get("notebook"))]
    rows = [
        (
            r["run_id"],
            r.get("notebook") or "",
            r["status"],
            _seconds(r.get("duration_s")),
            str(r["params"].get("preset", "")),
            str(len(r["metrics"])),
        )
        for r in chosen[-last:]
    ]
    columns = ("run", "notebook", "status", "seconds", "preset", "figures")
    return Table(columns, rows, right=("seconds", "figures")), problems


def show_run(reference: str, runs: Path | None = None) -> str:
    """One run in full: head, error, parameters, figures with their spread, texts, machine. Raises
    RecordError.
    """
    record = find_record(runs or default_runs_dir(), reference)
    git = record.get("git")
    head = [
        ("run", record["run_id"]),
        ("notebook", record.get("notebook") or "unknown"),
        ("status", record["status"]),
        ("started", record.get("started", "")),
        ("seconds", _seconds(record.get("duration_s"))),
        ("executed copy", record.get("output") or "none"),
        ("commit", f"{git['commit'][:12]}{' with changes' if git['dirty'] else ''}" if git else "unknown"),
    ]
    if error := record.get("error"):
        head.append(("error", f"cell {error['cell']}: {error['type']}: {error['message']}"))
    figures = [(name, figure(value), _spread(record, name)) for name, value in record["metrics"].items()]
    parts = [str(Table(("", ""), head)).strip("\n")]
    for title, facts in (("parameters", record["params"]), ("settings", record.get("settings", {}))):
        if facts:
            parts.append(str(Table((title, ""), [(name, str(value)) for name, value in facts.items()])))
    if figures:
        parts.append(str(Table(("figure", "value", "samples"), figures, right=("value",))))
    parts += [f"{name}\n  {text}" for name, text in record.get("texts", {}).items()]
    parts += [f"note: {remark}" for remark in record.get("remarks", [])]
    about = {**record.get("machine", {}), **record.get("versions", {})}
    parts.append(str(Table(("machine", ""), [(name, _plain(value)) for name, value in about.items()])))
    return "\n\n".join(part for part in parts)


def diff_runs(first: str, second: str, runs: Path | None = None) -> Table:
    """What differs between two runs: parameters, texts, machine, versions, and every figure with its ratio.

    Equal figures and facts are left out. Raises RecordError.
    """
    runs = runs or default_runs_dir()
    a, b = find_record(runs, first), find_record(runs, second)
    rows = []
    for part in ("params", "settings", "texts", "machine", "versions"):
        before, after = a.get(part, {}), b.get(part, {})
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name):
                rows.append((part, name, _plain(before.get(name)), _plain(after.get(name)), ""))
    for name in sorted(a["metrics"].keys() | b["metrics"].keys()):
        x, y = a["metrics"].get(name), b["metrics"].get(name)
        if repr(x) != repr(y):
            kind = "timing" if is_timing(name) else "figure"
            rows.append((kind, name, _number(x), _number(y), f"{y / x:.3g}x" if x and y is not None else ""))
    return Table(("", "", a["run_id"], b["run_id"], "ratio"), rows, right=(a["run_id"], b["run_id"], "ratio"))


def _spread(record: Mapping[str, Any], name: str) -> str:
    values = record.get("samples", {}).get(name, [])
    return f"{figure(min(values))} to {figure(max(values))} of {len(values)}" if values else ""


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _number(value: float | None) -> str:
    return "absent" if value is None else figure(value)


def _plain(value: Any) -> str:
    """A fact for a cell of a table: lists joined, long texts cut."""
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
