"""`nanokit quantize` at a terminal."""

import argparse
import sys

from tqdm import tqdm

from nanokit.model.quantize import quantize as write_quantized
from nanokit.quant.policy import DEFAULT


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
    if any(not name.startswith(("F32", "F16", "BF16")) for name in written.before):
        print(
            f"nanokit: quantized a second time ({', '.join(written.before)} before): what was lost stays lost",
            file=sys.stderr,
        )
    print(
        f"nanokit: {written.policy}: {changed}; the file has {written.nbytes / 1e6:.1f} MB",
        file=sys.stderr,
    )
    print(written.path)
    return 0
