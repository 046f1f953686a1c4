"""Where things lie: the user cache, the run folder, and the notebooks and data that came with the package.

A source checkout (editable install) has `notebooks/` and `data/` beside `nanokit/`; a wheel carries copies inside
the package. Nothing outside the cache and the run folder is ever written.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from nanokit.errors import NanokitError

PACKAGE = Path(__file__).resolve().parent


def cache_dir() -> Path:
    """The user cache for models and compiled kernels; `NANOKIT_HOME` overrides. Not created here."""
    home = os.environ.get("NANOKIT_HOME")
    return Path(home).expanduser().resolve() if home else Path(platformdirs.user_cache_dir("nanokit"))


def runs_dir() -> Path:
    """Executed notebooks and records: `NANOKIT_RUNS`, or `runs/` in the working directory. Not created here."""
    return Path(os.environ.get("NANOKIT_RUNS", "runs")).expanduser().resolve()


def scratch_name(target: Path) -> Path:
    """A name beside `target` for what is not complete yet: hidden, and with the process in it. Of a long name only the
    end is kept: a scratch file may have one of its own, and file systems take 255 bytes."""
    return target.with_name(f".{target.name[-60:]}.{os.getpid()}.tmp")


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A scratch file beside `target` to write into; it takes its place at the end, or goes away where an error comes
    first: `target` is complete or as it was, whatever stops the program. A process that is killed has no time to clean
    up: its scratch file stays. Raises OSError."""
    scratch = scratch_name(target)
    try:
        yield scratch
        os.replace(scratch, target)
    finally:
        scratch.unlink(missing_ok=True)


def gpu_file(what: str, device: str) -> Path:
    """Where the cache keeps what was measured on a GPU of this name. Not created here."""
    name = "-".join("".join(c if c.isalnum() else " " for c in device.lower()).split())
    return cache_dir() / "gpu" / f"{what}-{name}.json"


def _shipped(name: str) -> Path:
    for place in (PACKAGE.parent / name, PACKAGE / "_shipped" / name):
        if place.is_dir():
            return place
    raise NanokitError(
        f"the {name} folder of nanokit is missing",
        found=f"neither {PACKAGE.parent / name} nor {PACKAGE / '_shipped' / name}",
        needed=f"a checkout with {name}/ beside nanokit/, or a wheel that carries it",
        do="reinstall nanokit, or install it from a checkout with `pip install -e .`",
    )


def notebooks_dir() -> Path:
    """The folder of the ordered notebooks. Raises NanokitError when the install carries none."""
    return _shipped("notebooks")


def data_dir() -> Path:
    """The folder of texts, prompts and measurements. Raises NanokitError when the install carries none."""
    return _shipped("data")
