"""The `nanokit` command: one thin function a subcommand, everything else lives where it belongs.

A foreseen failure prints what, found, needed and do on standard error and exits with its code: 2 for what was typed
(options, parameters, prompts), 1 for everything else, 130 after Ctrl-C. The reader of a pipe that goes away early
(`| head`) is nothing to talk about: the exit code says it. Modules are imported by the subcommand that needs them,
so that `nanokit --help` answers at once.
"""

import argparse
import errno
import io
import os
import sys
import warnings
from collections.abc import Sequence

from nanokit import __version__
from nanokit.cli_model import add_actions
from nanokit.cli_options import add_model, add_quality, add_sampling
from nanokit.errors import NanokitError, ParameterError


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, run, and turn errors into exit codes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a terminal cannot show becomes \\uXXXX
            stream.reconfigure(errors="backslashreplace")
    warnings.formatwarning = lambda message, *_args, **_options: f"nanokit: {message}\n"
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        code: int = args.command(args)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a failure is still a message
        return code
    except NanokitError as error:
        print(f"nanokit: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("nanokit: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _discard_output()
        return 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _discard_output()
        print(f"nanokit: no space is left to write to\n  found: {error}\n  do: free some", file=sys.stderr)
        return 1


def _discard_output() -> None:
    """Keep the interpreter from flushing at its end into what has just failed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# -- run, runs, lab ---------------------------------------------------------------------------------------------------


def _run(args: argparse.Namespace) -> int:
    from nanokit.lab import console

    params = dict(_assignment(text) for text in args.parameter)
    if args.from_record and (args.grid or params):
        raise ParameterError("--from-record takes the recorded parameters", do="leave out -p and --grid")
    if args.from_record:
        return console.repeat(args.from_record, args.notebook, args.timeout)
    if args.grid:
        return console.grid(args.notebook or "00_tour", args.grid, params, args.timeout)
    return console.run(args.notebook or "00_tour", params, args.timeout)


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ParameterError(f"-p {text!r} is no assignment", needed="-p name=value")
    return name, value


def _runs(args: argparse.Namespace) -> int:
    from nanokit.lab import runs

    if args.action == "show":
        print(runs.show_run(args.run))
    elif args.action == "diff":
        print(runs.diff_runs(args.run, args.other))
    else:
        table, problems = runs.list_runs(notebook=args.notebook, last=args.last)
        print(table)
        for problem in problems:
            print(f"nanokit: {problem}", file=sys.stderr)
    return 0


def _lab(args: argparse.Namespace) -> int:
    from nanokit.lab.jupyter import launch_lab

    return launch_lab(args.notebook, browser=not args.no_browser, arguments=args.arguments)


def _bench(args: argparse.Namespace) -> int:
    from nanokit.lab.bench import console

    return console.main(args.kind, args.options)


def _quality(args: argparse.Namespace) -> int:
    from nanokit.lab.quality import console

    return console.quality(args)


# -- quantize, generate, chat ------------------------------------------------------------------------------------------


def _quantize(args: argparse.Namespace) -> int:
    from nanokit.model.console import quantize

    return quantize(args)


def _generate(args: argparse.Namespace) -> int:
    from nanokit.engine import console

    return console.generate(args)


def _chat(args: argparse.Namespace) -> int:
    from nanokit.engine import console

    return console.chat(args)


def _doctor(args: argparse.Namespace) -> int:
    from nanokit import doctor

    found = doctor.run(mend=args.fix)
    print(doctor.to_json(found) if args.json else doctor.render(found))
    return doctor.exit_code(found)


# -- the parser -------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nanokit",
        description="A Jupyter-first kit for running large language models fast on your machine.",
    )
    parser.add_argument("--version", action="version", version=f"nanokit {__version__}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(metavar="COMMAND")
    _add_run(commands)
    _add_runs(commands)
    _add_bench(commands)
    quality = commands.add_parser("quality", help="measure how far quantizing moves a model's predictions")
    add_quality(quality)
    quality.set_defaults(command=_quality)
    lab = commands.add_parser("lab", help="open JupyterLab on the tour")
    lab.add_argument("notebook", nargs="?", default="00_tour", help="name (tour, 00_tour) or path")
    lab.add_argument("--no-browser", action="store_true", help="print the address and open nothing")
    lab.add_argument("arguments", nargs="*", metavar="-- ARGUMENT", help="passed on to jupyter lab")
    lab.set_defaults(command=_lab)

    model = commands.add_parser("model", help="fetch the default model; look into files of models and make new ones")
    add_actions(model.add_subparsers(metavar="ACTION", required=True))

    quantize = commands.add_parser("quantize", help="write a quantized copy of a model")
    quantize.add_argument("source", metavar="MODEL", help="as for --model of generate")
    quantize.add_argument("target", metavar="OUT", help="….safetensors (all formats) or ….gguf (some)")
    quantize.add_argument(
        "--policy", help="such as int8-sym-channel, nvfp4+gptq, mix:attn=…,ffn=…, auto:4.25 (int4-sym-g32)"
    )
    quantize.add_argument(
        "--calibration", metavar="FILE", help="text that awq, gptq, smooth and auto look at (default: our own)"
    )
    quantize.add_argument("--shard-size", metavar="SIZE", help="such as 2GB: more weights become several .gguf files")
    quantize.add_argument("--force", action="store_true", help="replace a file that is there already")
    quantize.set_defaults(command=_quantize)

    generate = commands.add_parser("generate", help="answer one prompt")
    generate.add_argument("prompt", nargs="?", help="the text; - or a pipe reads it from standard input")
    generate.add_argument(
        "--raw", action="store_true", help="continue the text itself, without the model's chat template"
    )
    generate.add_argument("--json", action="store_true", help="print ids, text and timings as one JSON object")
    add_sampling(generate)
    add_model(generate)
    generate.set_defaults(command=_generate)

    chat = commands.add_parser("chat", help="talk with the model: one line a turn, /help, Ctrl-D ends")
    chat.add_argument("--system", help="system message")
    add_sampling(chat)
    add_model(chat)
    chat.set_defaults(command=_chat)

    doctor = commands.add_parser("doctor", help="what is present, what is missing, how to mend it")
    doctor.add_argument("--fix", action="store_true", help="write JupyterLab's settings overrides")
    doctor.add_argument("--json", action="store_true", help="machine-readable")
    doctor.set_defaults(command=_doctor)
    return parser


def _add_run(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    run = commands.add_parser("run", help="execute a notebook and record its figures (default: the tour)")
    run.epilog = "The executed notebook and a line in records.jsonl go to runs/, or to NANOKIT_RUNS."
    run.add_argument("notebook", nargs="?", help="name (tour, 00_tour) or path")
    run.add_argument(
        "-p", "--parameter", action="append", default=[], metavar="NAME=VALUE", help="a parameter of the notebook"
    )
    run.add_argument("--grid", action="append", default=[], metavar="NAME=V1,V2,…", help="every combination; resumes")
    run.add_argument("--from-record", metavar="RUN", help="repeat a recorded run (id, its beginning, or last)")
    run.add_argument("--timeout", type=int, default=300, metavar="S", help="seconds a cell may take (%(default)s)")
    run.set_defaults(command=_run)


def _add_runs(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    actions = commands.add_parser("runs", help="list, show and compare recorded runs").add_subparsers(
        metavar="ACTION", required=True, dest="action"
    )
    listing = actions.add_parser("list", help="the newest runs")
    listing.add_argument("--notebook", help="only runs of this one")
    listing.add_argument("--last", type=int, default=20, help="how many, 0 for all (%(default)s)")
    show = actions.add_parser("show", help="one run in full")
    diff = actions.add_parser("diff", help="what differs between two runs")
    for action in (show, diff):
        action.add_argument("run", help="id, its beginning, or last")
    diff.add_argument("other")
    for action in (listing, show, diff):
        action.set_defaults(command=_runs)


def _add_bench(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    bench = commands.add_parser("bench", help="measure speed against this machine's limit and other programs")
    bench.epilog = "`nanokit bench KIND --help` lists the options of a kind."
    bench.add_argument("kind", choices=("prefill", "decode", "batch", "verify-cost"), help="what is measured")
    bench.add_argument("options", nargs=argparse.REMAINDER, metavar="OPTION …", help="see `nanokit bench KIND --help`")
    bench.set_defaults(command=_bench)


if __name__ == "__main__":
    sys.exit(main())
