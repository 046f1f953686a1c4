"""Run records: one JSON line per run in the run folder's `records.jsonl`, also for runs that failed.

    {"schema": "nanokit.run/1", "run_id": ..., "notebook": "00_tour", "notebook_sha256": ...,
     "code_sha256": ..., "git": {"commit": ..., "dirty": false} | null, "params": {...}, "inputs": {...},
     "metrics": {...}, "samples": {...}, "settings": {...}, "texts": {...}, "machine": {...},
     "versions": {...}, "started": ..., "duration_s": ..., "status": "ok" | "failed" | "interrupted",
     "error": {"cell": 3, "type": ..., "message": ...} | null, "output": "....ipynb" | null}

One record, two writers: a notebook's last cell says `lab.record(result)`. Under `nanokit run` the environment
variable NANOKIT_RECORD names a file: the cell leaves the result's part there and the runner, which also knows
how the run ended, writes the line. In plain Jupyter or papermill the cell appends the line itself. Reading
figures out of the executed notebook was rejected: it would tie the record to how a table looks.

JSON lines, because they can be appended, compared with diff and read without a library. NaN and infinities,
which JSON does not know, are the strings "NaN", "Infinity" and "-Infinity" and become floats again when read.
The record holds no path of this machine: files are named relative to the run folder, and known folders in an
error's text are replaced. An append is one write under a lock and is undone when it does not fit, so that a
line is whole or absent.
"""

import json
import math
import os
import secrets
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock

from nanokit.errors import NanokitError
from nanokit.lab.result import Result
from nanokit.paths import PACKAGE, cache_dir, notebooks_dir, replacing, runs_dir

SCHEMA = "nanokit.run/1"
PART_VARIABLE = "NANOKIT_RECORD"
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class RecordError(NanokitError):
    """A record cannot be written, found or read."""


def default_runs_dir() -> Path:
    """NANOKIT_RUNS, or `runs/` in the working directory, but never inside the notebooks' own folder.

    A notebook opened in JupyterLab works in its folder: its records go to the checkout's `runs/`, or for an
    installed wheel to the user cache. Not created here.
    """
    here = Path.cwd().resolve()
    try:
        notebooks = notebooks_dir()
    except NanokitError:
        return runs_dir()
    if "NANOKIT_RUNS" in os.environ or not here.is_relative_to(notebooks):
        return runs_dir()
    return cache_dir() / "runs" if notebooks.is_relative_to(PACKAGE) else notebooks.parent / "runs"


def new_run_id(started: datetime) -> str:
    """Sortable by time and unique without coordination: `20261129T215612Z-3f9a1c`."""
    return f"{started:%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"


def record(result: Result, *, notebook: str | None = None) -> None:
    """Keep the result as this run's record and say so in one line that is the same in every run.

    notebook: its name, for front ends that do not tell the kernel (JupyterLab does). Raises RecordError when
    the run has its record already, or when it cannot be written.
    """
    from nanokit.lab.provenance import provenance

    part = {**result.to_record(), **provenance()}
    target = os.environ.get(PART_VARIABLE)
    if target is not None:
        if os.path.exists(target):
            raise RecordError("this run has its record already", do="put all figures into one Result")
        write_atomically(Path(target), dumps(part))
    else:
        started = datetime.now(UTC)
        session = os.environ.get("JPY_SESSION_NAME")
        line = {
            "run_id": new_run_id(started),
            "notebook": notebook or (Path(session).stem if session else None),
            **part,
            "started": started.isoformat(timespec="seconds"),
            "duration_s": None,
            "status": "ok",
            "error": None,
            "output": None,
        }
        append_record(default_runs_dir(), line)
    count = len(result.metrics)
    sys.stdout.write(f"recorded {count} figure{'s' * (count != 1)} in runs/records.jsonl\n")


def append_record(runs: Path, line: Mapping[str, Any]) -> None:
    """Append one record to runs/records.jsonl: safe among threads and processes, whole or not at all.

    Raises RecordError when the disk is full, the folder cannot be written or the record is not JSON.
    """
    data = dumps({"schema": SCHEMA, **line}).encode() + b"\n"
    path = runs / "records.jsonl"
    try:
        runs.mkdir(parents=True, exist_ok=True)
        with FileLock(runs / ".records.lock"), open(path, "ab") as file:
            end = file.tell()
            if end and not _ends_line(path):
                data = b"\n" + data  # what a crashed writer of another version left stays its own bad line
            try:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                os.truncate(path, end)
                raise
    except OSError as error:
        raise RecordError(
            "the run's record cannot be written",
            found=f"{error.strerror} ({path})",
            do="free space or set NANOKIT_RUNS to a folder that can be written",
        ) from error


def _ends_line(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def read_records(runs: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """All records, oldest first, and one sentence for each line that is none."""
    path = runs / "records.jsonl"
    records: list[dict[str, Any]] = []
    problems = []
    if not path.exists():
        return records, []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            records.append(_loads(line))
        except (ValueError, RecordError) as error:
            problems.append(f"{path.name} line {number}: {str(error).splitlines()[0]}")
    return records, problems


def find_record(runs: Path, reference: str) -> dict[str, Any]:
    """The record whose run id is or starts with reference; "last" is the newest. Raises RecordError."""
    records, problems = read_records(runs)
    if reference == "last" and records:
        return records[-1]
    matches = [r for r in records if r["run_id"] == reference] or [
        r for r in records if r["run_id"].startswith(reference)
    ]
    if len(matches) == 1:
        return matches[0]
    newest = ", ".join(r["run_id"] for r in records[-3:])
    raise RecordError(
        f"{len(matches)} runs start with {reference!r}" if matches else f"no run {reference!r}",
        found="; ".join([f"{len(records)} records, newest {newest or 'none'}", *problems]),
        needed="a run id, its beginning, or `last`",
        do="`nanokit runs list` shows them",
    )


def dumps(value: Mapping[str, Any]) -> str:
    """Readable JSON that is always UTF-8: half a character (of a broken file name, say) stays an escape."""
    try:
        text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)
        return text.encode("utf-8", "backslashreplace").decode()
    except TypeError as error:
        raise RecordError("the record is not JSON", found=str(error), needed="numbers, texts, lists, dicts") from error


def _finite(value: Any) -> Any:
    """The value with every non-finite float as its name; numpy and torch scalars as Python numbers."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if hasattr(value, "item") and not isinstance(value, int | float):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _loads(line: bytes) -> dict[str, Any]:
    """One line as a record of our schema."""
    found = json.loads(line)
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise RecordError(f"not a record of schema {SCHEMA}")
    found.setdefault("samples", {})
    for key, kind in (
        ("run_id", str),
        ("status", str),
        ("params", dict),
        ("metrics", dict),
        ("samples", dict),
    ):
        if not isinstance(found.get(key), kind):
            raise RecordError(f"without a usable {key}")
    return _with_numbers(found)


def _with_numbers(found: dict[str, Any]) -> dict[str, Any]:
    """Metrics and samples hold numbers only, so a text among them is the name of one that is not finite."""
    found["metrics"] = {name: _number(value) for name, value in found["metrics"].items()}
    found["samples"] = {
        name: [_number(value) for value in (values if isinstance(values, list) else [values])]
        for name, values in found["samples"].items()
    }
    return found


def _number(value: Any) -> float:
    number = NOT_FINITE.get(value) if isinstance(value, str) else value
    if not isinstance(number, int | float):
        raise RecordError(f"with {value!r:.60} for a number")
    return number


def read_part(path: Path) -> dict[str, Any]:
    """What the notebook's `record(result)` left for the runner, {} when it left nothing."""
    return _with_numbers(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def write_atomically(path: Path, text: str) -> None:
    """Write a file that is either the old one or the new one, never half. A symbolic link stays one, and what is there
    and no file (a pipe, a device) is written into. Raises OSError."""
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8") as sink:
            sink.write(text)
        return
    with replacing(path.resolve()) as scratch:
        scratch.write_text(text, encoding="utf-8")
