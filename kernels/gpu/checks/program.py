"""`python -m nanokit.kernels.gpu.check`: is every kernel right on this GPU, and how fast is it? Three minutes, JSON.

    (no mode)         on the GPU: cases against the reference, speeds in the shapes of a 0.6B, a 7B and a 32B model with
                      random weights, products and copies at base offsets of 0 to 128 bytes
    --interpret       the same program in Triton's interpreter at tiny shapes: all of it but the GPU; times mean nothing
    --arch 80 90      the same cases compiled for GPUs that are not here: registers, shared memory, widths of loads
    --tune            configurations of products tried on the GPU; the best go into the cache folder (gpu/configs.py)

    --only OP …       these operations; --first N: of each operation the first N cases; --seconds N: the time for all,
                      in a check only; --tune takes no other choice but --interpret, and some minutes
    --json FILE       the document below; that of a check of everything on a GPU is kept in the cache folder besides,
                      where `nanokit doctor` looks for it

    {"schema": "nanokit.gpu-check/1",
     "mode": "device" | "interpreter" | "compiled" | "tune", "timings": "cuda events" | "interpreter" | null,
     "options": {"only", "first", "seconds", "arch"},
     "device": {"name", "capability", "memory_bytes", "processors", "l2_bytes", "cuda"} | null,
     "correctness": [{"op", "case", "error", "bound", "ok", "fault"}],    error null: it did not get that far, see fault
     "speed": [{"op", "name", "ms": {min, median, max, n}, "host_us", "bytes", "gb_s", "share_of_copy", …}],
                      of products also model, matrix, format, mode, rows, outputs, columns and vs_bf16; "gaps": true
                      where the GPU waited for the host; op "copy" and "bf16" are torch's, to compare with
     "offsets": [{"offset", "equal", "gb_s", "relative", "copy_gb_s", "copy_relative", "loads": {bytes: places}, "ms"}],
     "tuned": [{"format", "kind", "rows", "config", "ms", "default_ms", "equal", "tried"}],
     "compiled": [{"kernel", "arch", "constants", "warps", "registers", "stack", "shared", "ptx", "loads", "mma"}],
     "skipped": [names of what had no time left], "remarks": [...], "faults": [what is wrong, a line each],
     "interrupted": whether Ctrl-C ended it,
     "machine", "versions", "git", "code_sha256": as in nanokit.bench/1, "started": ..., "duration_s": ...}

An error is in the unit of its bound: bits that differ (bound 0), or a part of what the case's own docstring measures
by. Exit code: 0 all right, 1 something is wrong (a bound, a launch, spilled registers) or nothing had time, 2 a wrong
option or no GPU, 130 after Ctrl-C, with what was found until then.

A program beside the backend: nothing imports it. What it takes from floors above the kernels (the machine card, writing
a file whole) it looks up when it is wanted.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from nanokit.errors import NanokitError
from nanokit.kernels.gpu import configs, runtime
from nanokit.kernels.gpu.ahead import SHARED_KIB
from nanokit.kernels.gpu.checks import report, run
from nanokit.kernels.gpu.checks.work import Budget
from nanokit.paths import gpu_file

SCHEMA = "nanokit.gpu-check/1"
SECONDS = 165.0
INTERRUPTED = 130  # exit code after Ctrl-C


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; returns the exit code."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    options = _options(argv)
    mode = "compiled" if options.arch else "tune" if options.tune else "device"
    if options.interpret:
        mode = mode if options.tune else "interpreter"
    interpreted = options.interpret if mode != "compiled" else False
    if not interpreted and mode != "compiled" and not torch.cuda.is_available():
        sys.stderr.write("there is no GPU that torch sees: --interpret runs the check in Triton's interpreter\n")
        return 2
    if interpreted != runtime.INTERPRETED:  # kernels are made for one way when they are imported, see runtime.py
        return _in_the_other_way(argv, interpreted)
    try:
        made = _document(mode, options)
        sys.stdout.write(report.text(made))
        _keep(mode, options, made)
    except NanokitError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
    return INTERRUPTED if made["interrupted"] else int(bool(made["faults"]))


def _in_the_other_way(argv: Sequence[str], interpreted: bool) -> int:
    """The same program in a process of the other kind. Ctrl-C reaches both: this one waits for what that one says."""
    environment = os.environ | {"TRITON_INTERPRET": str(int(interpreted))}
    process = subprocess.Popen([sys.executable, "-m", "nanokit.kernels.gpu.check", *argv], env=environment)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m nanokit.kernels.gpu.check", description=(__doc__ or "").split("\n")[0]
    )
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--interpret", action="store_true", help="in Triton's interpreter, at tiny shapes")
    ways.add_argument(
        "--arch", type=int, nargs="+", default=[], metavar="N", choices=list(SHARED_KIB), help="only compile"
    )
    parser.add_argument("--tune", action="store_true", help="try configurations of products, keep the best")
    parser.add_argument("--only", nargs="+", default=[], metavar="OP", choices=run.OPS, help=", ".join(run.OPS))
    parser.add_argument("--first", type=_count, metavar="N", help="of each operation the first N cases")
    parser.add_argument("--seconds", type=_seconds, metavar="N", help=f"for all of a check ({SECONDS:.0f})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings there")
    parser.add_argument(
        "--part", type=_part, default=(0, 1), help=argparse.SUPPRESS
    )  # of what is compiled: index/parts
    options = parser.parse_args(argv)
    if options.tune and options.arch:
        parser.error("--tune measures, --arch only compiles")
    if options.tune and (options.only or options.first is not None):
        parser.error("--tune tries products: it has no --only and no --first")
    if options.seconds is not None and (options.tune or options.arch):
        parser.error("--seconds is for a check: --tune and --arch go on to their end")
    if options.seconds is None and not (options.tune or options.arch):
        options.seconds = SECONDS
    target = options.json
    if target is not None and (target.is_dir() or not target.absolute().parent.is_dir()):
        parser.error(f"--json {target}: not the name of a file in a folder that exists")
    return options


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of cases from 1 on")
    return int(text)


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no time above 0")
    return number


def _part(text: str) -> tuple[int, int]:
    index, parts = map(int, text.split("/"))
    return index, parts


def _document(mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run what was asked for; see the module for what comes out."""
    from nanokit.lab.provenance import provenance

    started, budget = datetime.now(UTC), Budget(options.seconds or 0.0)
    origin = provenance()
    if mode == "compiled":
        found = run.compiled(options.arch, options.only, options.first, options.part)
    elif mode == "tune":
        found = run.tuned(_say)
    else:
        found = run.check(budget, options.only, options.first, _say)
    timings = None if mode == "compiled" else "interpreter" if runtime.INTERPRETED else "cuda events"
    asked = {"only": options.only, "first": options.first, "seconds": options.seconds, "arch": options.arch}
    return {
        "schema": SCHEMA, "mode": mode, "timings": timings, "options": asked,
        "device": None if mode == "compiled" or runtime.INTERPRETED else device_facts(), **found.to_record(), **origin,
        "started": started.isoformat(timespec="seconds"), "duration_s": round(budget.elapsed, 2),
    }  # fmt: skip


def device_facts() -> dict[str, Any]:
    """The GPU in use."""
    facts = torch.cuda.get_device_properties(runtime.device())
    return {
        "name": facts.name, "capability": [facts.major, facts.minor], "memory_bytes": facts.total_memory,
        "processors": facts.multi_processor_count, "l2_bytes": facts.L2_cache_size, "cuda": torch.version.cuda,
    }  # fmt: skip


def _keep(mode: str, options: argparse.Namespace, made: dict[str, Any]) -> None:
    """Write the document where it was asked for and, of a whole check or a tuning on a GPU, into the cache."""
    if options.json is not None:
        _write(options.json, made)
    if made["device"] is None or made["interrupted"]:
        return
    name = made["device"]["name"]
    if mode == "tune":
        rows = [{key: each[key] for key in ("kind", "rows", "config", "ms", "default_ms")} for each in made["tuned"]
                if each["ms"] is not None]  # fmt: skip
        _write(configs.place(name), configs.document(name, made["started"], rows))
    elif not options.only and options.first is None:
        _write(gpu_file("check", name), made)


def _write(path: Path, made: dict[str, Any]) -> None:
    """The whole file or nothing of it. Raises NanokitError."""
    from nanokit.lab.records import dumps, write_atomically

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, dumps(made) + "\n")
    except OSError as error:
        raise NanokitError(f"{path} cannot be written", found=error.strerror or str(error)) from error


def _say(what: str) -> None:
    sys.stderr.write(f"{what} …\n")
    sys.stderr.flush()
