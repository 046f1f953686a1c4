"""The JSON of a benchmark, one schema for all kinds.

    {"schema": "nanokit.bench/1",
     "kind": "decode",                    prefill | decode | batch | verify-cost
     "params": {...},                     what was asked, presets resolved
     "setting": {...},                    what held meanwhile: model, kernels (avx512, …, torch), activations,
                                          kv_format, threads, peers, sizes of the engine
     "metrics": {"tok_per_s": ..., ...},  the figures
     "samples": {"step_ms_at_64": [...]}, every single measurement, in order
     "spread": {"step_ms_at_64": {"min", "median", "max", "n"}},
     "remarks": [...],                    why a reader should not trust some of this; [] is good
     "machine": {...}, "versions": {...}, the machine card, its load at the start, and what is installed
     "git": {...} | null, "code_sha256": ..., "started": ..., "duration_s": ...}

Names. A unit is the end or the middle of a name; `_at_<n>` is a context or prompt length, `_with_<n>` a number of
sequences, `_of_<n>` a number of rows; without one of these the figure belongs to the first setting that was asked for.
Times are medians of the series of the same name, speeds and ratios are made of medians.

    all but verify-cost: tok_per_s
    decode        ms_per_token, c_step_ms (forward and head alone), c_step_share (of the step), bytes_per_token,
                  stream_gb_s, share_of_limit, c_step_share_of_limit, ratio_to_first_at_<ctx> (speed),
                  sampled_vs_greedy (speed), neighbour_ratio (speed, of medians), neighbour_mean_ratio (of means),
                  vs_<peer> (speed; above 1: nanokit is faster), vs_<peer>_at_<ctx>
    prefill       ttft_ms, ms_per_token, vs_<peer>
    batch         tok_per_s_with_<n> (of all sequences), ratio_to_first_with_<n>
    verify-cost   ms_of_one_row_at_<ctx>, v_ratio_of_<rows>_at_<ctx>, and the same as the map v: {ctx: {rows: ratio}}

Peers: transformers, llama_cpp_<type of the weights>. Against `llama_cpp_q4_0` nanokit runs on the same Q4_0 file; its
times are the series `beside_llama_cpp_q4_0_ms_at_<n>`.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from nanokit.lab.bench.common import BenchResult
from nanokit.lab.bench.limit import BenchError
from nanokit.lab.records import dumps, write_atomically

SCHEMA = "nanokit.bench/1"
KINDS = ("prefill", "decode", "batch", "verify-cost")
KEYS = frozenset({"schema", "kind", "params", "setting", "metrics", "samples", "spread", "remarks", "machine",
                  "versions", "git", "code_sha256", "started", "duration_s"})  # fmt: skip


def document(
    result: BenchResult, provenance: Mapping[str, Any], started: datetime, duration_s: float
) -> dict[str, Any]:
    """The result as JSON values. provenance: of `lab.provenance`, taken before the measurement: its machine card
    holds the load that was there already."""
    record = result.to_record()
    return {
        "schema": SCHEMA,
        "kind": result.kind,
        "params": record["params"],
        "setting": record["settings"],
        "metrics": result.figures(),
        "samples": record["samples"],
        "spread": result.spread,
        "remarks": record["remarks"],
        **provenance,
        "started": started.isoformat(timespec="seconds"),
        "duration_s": round(duration_s, 2),
    }


def text(made: Mapping[str, Any]) -> str:
    """The document as one line of JSON."""
    return dumps(made) + "\n"


def check_target(path: Path) -> None:
    """Raise BenchError when a file could not be written there, before minutes are spent on its content."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise BenchError(
            "the JSON cannot be written there",
            found=f"{path} is a folder" if path.is_dir() else f"no folder {path.absolute().parent}",
            needed="the name of a file in a folder that exists",
        )


def write(path: Path, made: Mapping[str, Any]) -> None:
    """The whole document or nothing. Raises BenchError."""
    check_target(path)
    try:
        write_atomically(path, text(made))
    except OSError as error:
        raise BenchError("the JSON cannot be written", found=f"{error.strerror} ({path})") from error


def read(path: Path) -> dict[str, Any]:
    """A document that `write` left. Raises BenchError for anything else."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BenchError(f"{path.name} is no benchmark", found=str(error), needed=f"JSON of {SCHEMA}") from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA or set(found) != KEYS or found["kind"] not in KINDS:
        raise BenchError(
            f"{path.name} is no benchmark",
            found=found.get("schema", "no schema") if isinstance(found, dict) else type(found).__name__,
            needed=f"{SCHEMA} with the keys {', '.join(sorted(KEYS))}",
            do="make it anew with `nanokit bench … --json FILE`",
        )
    return found
