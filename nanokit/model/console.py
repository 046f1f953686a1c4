"""`nanokit quantize` at a terminal."""

import argparse
import sys

from tqdm import tqdm

from nanokit.model.quantize import quantize as write_quantized
from nanokit.model.source import FLOATS
from nanokit.quant.policy import DEFAULT

SHOWN = 4  # names of matrices in a message


def quantize(args: argparse.Namespace) -> int:
    """Write the file, say on standard error what changed, and print its path."""
    with tqdm(disable=None, file=sys.stderr, leave=False) as bar:

        def progress(done: int, total: int, what: str) -> None:
            bar.total, bar.n = total, done
            bar.set_description(what)

        written = write_quantized(
            args.source,
            args.target,
            args.policy or DEFAULT,
            calibration=args.calibration,
            force=args.force,
            progress=progress,
        )
    changed = f"{written.bits_before:.2f} -> {written.bits_after:.2f} bits a weight over the matrices that changed"
    if not written.before:
        changed = "everything is kept as it is stored"
    if set(written.before) - set(FLOATS):
        what = "quantized a second time" if set(written.after) - set(FLOATS) else "floats of quantized weights"
        _say(f"{what} ({', '.join(written.before)} before): what was lost stays lost")
    if written.misfits:
        named = ", ".join(written.misfits[:SHOWN]) + (", …" if len(written.misfits) > SHOWN else "")
        _say(f"{len(written.misfits)} matrices became F16, for no block divides their columns: {named}")
    _say(f"{written.policy}: {changed}; the file has {written.nbytes / 1e6:.1f} MB")
    print(written.path)
    return 0


def _say(what: str) -> None:
    print(f"nanokit: {what}", file=sys.stderr)
