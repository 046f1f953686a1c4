"""`nanokit model verify` and `smoke` at a terminal: a table, and an exit code that a script can trust."""

import argparse
import textwrap

from nanokit.lab.bench.console import terminal_progress
from nanokit.lab.experiments.smoke import SmokeParams
from nanokit.lab.experiments.smoke import smoke as smoke_test
from nanokit.lab.json_target import check_json_target, put
from nanokit.lab.table import Table
from nanokit.model.console import progress_bar, say
from nanokit.model.fix import fix
from nanokit.model.load import open_model
from nanokit.model.verify.report import Report
from nanokit.model.verify.run import verify

WIDTH = 92  # characters of what was found, in a line


def main(args: argparse.Namespace) -> int:
    """Print the report; the whole as JSON to a file, or with "-" in place of the text. 1 where a check failed. With
    --fix of the mended file, after what was changed, on standard error.

    Raises ModelFileError for a path that leads to no file and a source that does not load, ParameterError for a target
    that cannot be written, and what `fix` raises."""
    check_json_target(args.json, args.file, args.against)
    against = None if args.against is None else open_model(args.against)
    with progress_bar() as progress:
        if args.fix is None:
            fixed, report = None, verify(args.file, against, progress=progress)
        else:
            fixed = fix(args.file, args.fix, against, force=args.force, progress=progress)
            report = fixed.report
    if fixed is not None:
        for said in (*fixed.said, *fixed.left, f"written to {fixed.path}"):
            say(said)
    put(args.json, f"{table(report)}\n\n{report.name}: {report.verdict}", report.to_json)
    return 1 if report.failed else 0


def smoke(args: argparse.Namespace) -> int:
    """Print what the behaviour of a file says; 1 where it says that something is wrong. Raises as `main` does, and what
    the experiment raises."""
    check_json_target(args.json, args.file)
    found = smoke_test(
        SmokeParams.from_mapping({"model": args.file, "preset": args.preset}), progress=terminal_progress()
    )
    verdict = (
        "; ".join(found.found) or "nothing that a text can tell; nanokit model verify --against SOURCE tells the rest"
    )
    put(args.json, f"{found.table()}\n\n{found.settings['model']}: {verdict}", found.to_record)
    return 1 if found.found else 0


def table(report: Report) -> Table:
    """A check a row, what was found in as many lines as it takes."""
    rows: list[tuple[str, str, str]] = []
    for check in report.checks:
        first, *rest = textwrap.wrap(check.said, WIDTH, break_long_words=False) or [""]
        rows.append((check.name, check.verdict, first))
        rows += [("", "", line) for line in rest]
    return Table(("check", "verdict", "what was found"), rows)
