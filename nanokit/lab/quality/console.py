"""`nanokit quality` at a terminal: tables on standard output, JSON where it was asked for."""

import argparse
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from nanokit.errors import ParameterError
from nanokit.lab.bench.console import crowded, terminal_progress, use_threads
from nanokit.lab.bench.schema import check_target, text, write
from nanokit.lab.provenance import provenance
from nanokit.lab.quality.measure import QualityResult, measure_quality
from nanokit.lab.quality.params import QualityParams
from nanokit.lab.quality.schema import document
from nanokit.lab.result import figure


def quality(args: argparse.Namespace) -> int:
    """Measure, print, and write the JSON. args: of cli.py; what was not given is None and left to the params."""
    given = {name: value for name in QualityParams.KNOBS if (value := getattr(args, name, None)) is not None}
    p = QualityParams.from_mapping(given)
    if args.json not in (None, "-"):
        check_target(Path(args.json))
    if args.threads is not None:
        if args.threads < 1:
            raise ParameterError("--threads is out of range", found=args.threads, needed="at least 1")
        use_threads(args.threads)
    started, begun = datetime.now(UTC), time.perf_counter()
    where = provenance()
    result = measure_quality(p, progress=terminal_progress())
    result = replace(result, remarks=[*crowded(where["machine"]), *result.remarks])
    duration_s = time.perf_counter() - begun
    show(result, sys.stderr if args.json == "-" else sys.stdout)
    if args.json is None:
        return 0
    made = document(result, where, started, duration_s)
    if args.json == "-":
        sys.stdout.write(text(made))
    else:
        write(Path(args.json), made)
    return 0


def show(result: QualityResult, out: IO[str]) -> None:
    """The setting, the figures (of one policy one a line, of several a table), KL by position, remarks."""
    held = result.settings
    print(f"reference: {result.reference}", file=out)
    print(
        f"setting: {held['activations']} activations, {held['kv_format']} pages ({held['layout']}), batch "
        f"{held['batch']}, {held['kernels']} kernels, {held['threads']} threads; "
        f"a token timed at a context of {held['timed_at_ctx']}",
        file=out,
    )
    if len(result.policies) == 1:
        (only,) = result.policies
        print(f"policy: {only.policy}\n", file=out)
        for name, value in only.metrics.items():
            print(f"{name:<24} {figure(value)}", file=out)
    else:
        print(f"\n{result.table()}\n\nnoise floor (KL): {_floors(result)}", file=out)
    print(f"\nmean KL by position in the window\n{result.buckets()}", file=out)
    for remark in result.remarks:
        print(f"note: {remark}", file=out)


def _floors(result: QualityResult) -> str:
    floors = [each.metrics["noise_floor_kl"] for each in result.policies]
    return f"at most {max(floors):.2g}, the reference's own {result.metrics['reference_floor_kl']:.2g}"
