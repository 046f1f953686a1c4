"""`nanokit quantize` and `nanokit model convert` and `repair` at a terminal."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from nanokit.errors import ParameterError
from nanokit.model.calibrate import Progress
from nanokit.model.memory import parse_bytes
from nanokit.model.quantize import quantize as write_quantized
from nanokit.model.source import FLOATS
from nanokit.model.verify.report import listed
from nanokit.quant.policy import DEFAULT

SHOWN = 4  # names of matrices in a message


def quantize(args: argparse.Namespace) -> int:
    """Write the file, say on standard error what changed, and print its path."""
    with progress_bar() as progress:
        written = write_quantized(
            args.source,
            args.target,
            args.policy or DEFAULT,
            calibration=args.calibration,
            shard_size=args.shard_size,
            force=args.force,
            progress=progress,
        )
    changed = f"{written.bits_before:.2f} -> {written.bits_after:.2f} bits a weight over the matrices that changed"
    if not written.before:
        changed = "everything is kept as it is stored"
    if set(written.before) - set(FLOATS):
        what = "quantized a second time" if set(written.after) - set(FLOATS) else "floats of quantized weights"
        say(f"{what} ({', '.join(written.before)} before): what was lost stays lost")
    _say_misfits(written.misfits)
    say(f"{written.policy}: {changed}; {_size(written.files, written.nbytes)}")
    print(written.path)
    return 0


def convert(args: argparse.Namespace) -> int:
    """Write the file or the folder, as its name says; say on standard error what is in it, and print its path."""
    from nanokit.model import convert as converting
    from nanokit.model import export_directory as exporting

    with progress_bar() as progress:
        if Path(args.target).suffix.lower() == ".gguf":
            written = converting.convert(
                args.source,
                args.target,
                args.type or converting.DEFAULT_TYPE,
                alignment=converting.DEFAULT_ALIGNMENT if args.align is None else args.align,
                rope_base=args.rope_freq_base,
                rope_scale=args.rope_freq_scale,
                shard_size=args.shard_size,
                force=args.force,
                progress=progress,
            )
        else:
            _refuse_file_options(args)
            written = exporting.export_directory(
                args.source,
                args.target,
                args.type or exporting.DEFAULT_TYPE,
                shard_bytes=exporting.SHARD_BYTES if args.shard_size is None else parse_bytes(args.shard_size),
                force=args.force,
                progress=progress,
            )
    _say_misfits(written.misfits)
    types = ", ".join(f"{count} {name}" for name, count in written.types.items())
    say(f"{types} tensors; {_size(written.files, written.nbytes)}")
    print(written.path)
    return 0


def _refuse_file_options(args: argparse.Namespace) -> None:
    options = {
        "--align": args.align,
        "--rope-freq-base": args.rope_freq_base,
        "--rope-freq-scale": args.rope_freq_scale,
    }
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise ParameterError(
            f"{', '.join(given)} says nothing of a folder",
            found=args.target,
            needed="OUT.gguf as the name of the new file; a folder takes its rope parameters from the file",
        )


def repair(args: argparse.Namespace) -> int:
    """Write the file, say on standard error what was put right, and print its path."""
    from nanokit.model.repair import repair as write_repaired

    with progress_bar() as progress:
        written = write_repaired(
            args.file, args.target, args.origin, inject=args.inject, force=args.force, progress=progress
        )
    for said in written.keys:
        say(said)
    for kind in dict.fromkeys(written.tensors.values()):
        names = [name for name, each in written.tensors.items() if each == kind]
        say(f"from the source, in {kind}: {listed(names, SHOWN)}")
    say(f"verified against {args.origin}: {written.report.verdict}")
    print(written.path)
    return 0


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar at a terminal, which goes away at the end."""
    with tqdm(disable=None, file=sys.stderr, leave=False) as bar:

        def progress(done: int, total: int, what: str) -> None:
            bar.total, bar.n = total, done
            bar.set_description(what)

        yield progress


def _size(files: Sequence[Path], nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB" + (f" in {len(files)} files" if len(files) > 1 else "")


def _say_misfits(names: Sequence[str]) -> None:
    if names:
        named = ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
        say(f"{len(names)} matrices became F16, for no block divides their columns: {named}")


def say(what: str) -> None:
    """A sentence on standard error, where it does not mix with what a script reads."""
    print(f"nanokit: {what}", file=sys.stderr)
