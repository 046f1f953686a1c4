"""`nanokit bench` at a terminal: options from the knobs, a table on standard output, JSON where it was asked for."""

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from nanokit.errors import ParameterError
from nanokit.lab.bench import schema
from nanokit.lab.bench.common import BenchParams, BenchResult
from nanokit.lab.params import Knob
from nanokit.lab.progress import CallbackProgress, Progress, Silent
from nanokit.lab.provenance import provenance

# kind -> module, its params and its function
KINDS = {
    "prefill": ("prefill", "PrefillParams", "prefill"),
    "decode": ("decode", "DecodeParams", "decode"),
    "batch": ("batch", "BatchParams", "batch"),
    "verify-cost": ("verify_cost", "VerifyCostParams", "verify_cost"),
}
TYPES = {"int": int, "float": float, "str": str, "list[int]": int, "list[str]": str}


@dataclass(frozen=True)
class Asked:
    """What a command line says besides the params."""

    params: BenchParams
    json: str | None
    threads: int | None


def main(kind: str, arguments: Sequence[str]) -> int:
    """Measure, print, and write the JSON. Exit codes are those of the errors raised."""
    module, _, function = KINDS[kind]
    asked = _parse(kind, arguments)
    if asked.json not in (None, "-"):
        schema.check_target(Path(str(asked.json)))
    if asked.threads is not None:
        use_threads(asked.threads)
    started, begun = datetime.now(UTC), time.perf_counter()
    where = provenance()
    benchmark = getattr(import_module(f"nanokit.lab.bench.{module}"), function)
    result: BenchResult = benchmark(asked.params, progress=terminal_progress())
    result = replace(result, remarks=[*crowded(where["machine"]), *result.remarks])
    made = schema.document(result, where, started, time.perf_counter() - begun)
    _print(result, made, sys.stderr if asked.json == "-" else sys.stdout)
    if asked.json == "-":
        sys.stdout.write(schema.text(made))
    elif asked.json is not None:
        schema.write(Path(asked.json), made)
    return 0


def crowded(machine: Mapping[str, Any]) -> list[str]:
    """A steady disturbance spreads no samples, so it is told by the load that was there before."""
    load, cores = machine["load"], machine["cores"]
    if load is None or load <= cores:
        return []
    return [f"a load of {load:.1f} on {cores} cores at the start: others were using them"]


def _parse(kind: str, arguments: Sequence[str]) -> Asked:
    module, params, _ = KINDS[kind]
    cls: type[BenchParams] = getattr(import_module(f"nanokit.lab.bench.{module}"), params)
    description = (import_module(f"nanokit.lab.bench.{module}").__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(prog=f"nanokit bench {kind}", description=description)
    for knob in cls.KNOBS.values():
        _add_option(parser, knob)
    parser.add_argument(
        "--quick", dest="preset", action="store_const", const="quick", help="the same as --preset quick"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="threads that compute (default: one a core)")
    parser.add_argument("--json", metavar="FILE", help="write the JSON there; - is standard output")
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    json, threads = given.pop("json", None), given.pop("threads", None)
    if threads is not None and threads < 1:
        raise ParameterError("--threads is out of range", found=threads, needed="at least 1")
    return Asked(cls.from_mapping(given), json, threads)


def _add_option(parser: argparse.ArgumentParser, knob: Knob) -> None:
    """One option a knob; a value that is not given is left to the params."""
    how: dict[str, Any] = {"type": TYPES[knob.type_name], "default": None, "help": knob.comment.replace("%", "%%")}
    if knob.type_name.startswith("list"):
        how |= {"nargs": "+", "action": "extend"}
    parser.add_argument(f"--{knob.name.replace('_', '-')}", dest=knob.name, metavar=knob.name.upper(), **how)


def use_threads(count: int) -> None:
    """For this process, before anything is loaded: both backends, and the peers after them."""
    import torch

    os.environ["NANOKIT_THREADS"] = str(count)
    torch.set_num_threads(count)


def terminal_progress() -> Progress:
    """A line on standard error that counts, where that is a terminal."""
    if not sys.stderr.isatty():
        return Silent()

    def report(done: int, total: int, text: str) -> None:
        print(f"\r\x1b[K{text} {done}/{total}" if done < total else "\r\x1b[K", end="", file=sys.stderr, flush=True)

    return CallbackProgress(report)


def _print(result: BenchResult, made: Mapping[str, Any], out: Any) -> None:
    setting, machine = made["setting"], made["machine"]
    load = "unknown" if machine["load"] is None else f"{machine['load']:.2f}"
    print(
        f"{result.kind}: {setting['model']}, {setting['activations']} activations, {setting['kv_format']} pages, "
        f"{setting['kernels']} kernels, {setting['threads']} threads; load at the start {load}",
        file=out,
    )
    print(result.table(), result.spread_table(), sep="\n\n", file=out)
    for remark in result.remarks:
        print(f"note: {remark}", file=out)
