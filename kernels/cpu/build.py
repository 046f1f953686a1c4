"""The kernels as a shared library: compiled once a machine, kept in the user's cache.

    <cache>/kernels/avx512-<what went in>-<what came out>.so

The first digest is of sources, flags, compiler and CPU; the second is of the file itself, so that a name and a content
that belong together need no lock, no second file and no trust: two processes that build at once both rename a whole
file into place, and a file that was cut short does not match its name and is made anew (the system's loader does not
refuse such a file, it crashes in it). The library is code, so the folder must be the user's alone; where there is no
such folder, or no room in it, a library is made in a temporary folder for the process, which says so.

A build at install time was rejected: wheels would have to be made for each CPU, and `-march=native` is the point.
"""

import atexit
import errno
import hashlib
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from nanokit import paths
from nanokit.errors import NanokitError
from nanokit.kernels.cpu.compiler import Compiler, Variant, flags

SOURCES = Path(__file__).resolve().parent / "c"
KEPT = 20  # libraries in the cache: other variants, other checkouts, the last few edits
STALE_S = 24 * 3600  # a build that old was killed
TIMEOUT_S = 600
SHOWN_LINES = 8

_said: set[str] = set()


class KernelError(NanokitError):
    """The C kernels could not be compiled, loaded or used."""


def cache_folder() -> Path:
    """Where libraries are kept. Not created here."""
    return paths.cache_dir() / "kernels"


def key(compiler: Compiler, variant: Variant) -> str:
    """A digest of all that goes into a library."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.glob("*.[ch]")):
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    for text in (*compiler.command, compiler.version, compiler.macros, *flags(variant)):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:32]


def cached(compiler: Compiler, variant: Variant) -> Path | None:
    """The library, if a whole one is in a cache that can be trusted. Changes nothing."""
    if _distrusted(cache_folder()):
        return None
    for path in sorted(cache_folder().glob(f"{variant.name}-{key(compiler, variant)}-*.so")):
        if path.is_file() and path.stem.endswith(f"-{_digest(path)}"):
            return path
    return None


def build(compiler: Compiler, variant: Variant) -> Path:
    """The library's path: from the cache, else compiled. Raises KernelError with what the compiler said."""
    found = cached(compiler, variant)
    if found is not None:
        return found
    say("nanokit: compiling the CPU kernels for this machine (once, it takes a few seconds)")
    try:
        with tempfile.TemporaryDirectory(prefix="nanokit-build-", ignore_cleanup_errors=True) as name:
            made = compile_library(compiler, flags(variant), Path(name))
            return _keep(made, f"{variant.name}-{key(compiler, variant)}-{_digest(made)}.so")
    except OSError as error:
        raise KernelError(
            "there is no place to compile the CPU kernels in",
            found=error,
            do="free some space, or set TMPDIR to a folder that you may write",
        ) from error


def compile_library(compiler: Compiler, options: Sequence[str], folder: Path) -> Path:
    """Compile every source by a process of its own, link in `folder`. Raises KernelError."""
    sources = sorted(SOURCES.glob("*.c"))
    objects = [folder / f"{source.stem}.o" for source in sources]
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        jobs = [
            pool.submit(_run, [*compiler.command, *options, "-c", str(source), "-o", str(made)])
            for source, made in zip(sources, objects, strict=True)
        ]
        try:
            for job in jobs:
                job.result()
        except BaseException:  # an interrupt too: what has not begun is not begun
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    library = folder / "kernels.so"
    _run([*compiler.command, *options, "-shared", *map(str, objects), "-lm", "-o", str(library)])
    return library


def say(text: str) -> None:
    """A line on stderr, once a process. Not under pytest, where nbval would compare it with a notebook's outputs."""
    if text not in _said and "PYTEST_CURRENT_TEST" not in os.environ:
        _said.add(text)
        sys.stderr.write(text + "\n")


def _run(command: list[str]) -> None:
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False
        )
        if answer.returncode == 0:
            return
        found = "\n".join(answer.stderr.splitlines()[:SHOWN_LINES]) or f"exit status {answer.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        found = str(error)
    raise KernelError(
        "the CPU kernels could not be compiled",
        found=f"{found}\n  by: {shlex.join(command)}",
        do="install the compiler with its headers (e.g. `apt install build-essential`), name another one in CC, "
        "or set NANOKIT_CPU_KERNELS=none for the plain torch kernels, which are slower",
    )


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]


def _distrusted(folder: Path) -> str | None:
    """Why a library from this folder must not be run, None where it may (or is not there at all)."""
    try:
        facts = folder.lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return error.strerror
    if not stat.S_ISDIR(facts.st_mode):
        return "it is not a folder"
    if facts.st_uid != os.geteuid():
        return "another user owns it"
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "other users may write there; chmod 700 it"
    return None


def _keep(made: Path, name: str) -> Path:
    """A copy in the cache, or, said once, in a folder of this process. Raises OSError when neither can be written."""
    folder = cache_folder()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        if why := _distrusted(folder):
            raise PermissionError(errno.EACCES, why)
        kept = _store(made, folder / name)
        _prune(folder)
        return kept
    except OSError as error:
        say(
            f"nanokit: the compiled kernels cannot be kept in {folder} ({error.strerror or error}), so each process "
            "compiles its own; set NANOKIT_HOME to a folder of yours with some room"
        )
    private = Path(tempfile.mkdtemp(prefix="nanokit-kernels-"))
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    return _store(made, private / name)


def _store(made: Path, target: Path) -> Path:
    with tempfile.TemporaryDirectory(prefix=".new-", dir=target.parent, ignore_cleanup_errors=True) as name:
        copy = Path(name) / made.name
        shutil.copyfile(made, copy)
        return copy.replace(target)


def _prune(folder: Path) -> None:
    """Forget the oldest libraries, and what killed processes left. Another process may be at it too."""
    ages = {}
    for path in (*folder.glob("*.so"), *folder.glob(".new-*")):
        with suppress(FileNotFoundError):
            ages[path] = time.time() - path.lstat().st_mtime
    libraries = sorted((path for path in ages if path.suffix == ".so"), key=ages.__getitem__)
    for path in libraries[KEPT:]:
        path.unlink(missing_ok=True)
    for path in ages.keys() - set(libraries):
        if ages[path] > STALE_S:
            shutil.rmtree(path, ignore_errors=True)
