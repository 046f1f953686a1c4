"""One lock around every measurement on this machine.

Two measurements at once spoil each other's timings, and a widget callback that runs while a cell runs
(JupyterLab does that, in another thread) would also share a model and its KV pages. So whatever touches a
model or a clock says `with measuring("decode"):` and a second one is refused at once: waiting was rejected,
because a slider that waits behind a minute of work looks like a hang, and the measurement that follows is no
longer the one asked for. A run that nobody attends (`nanokit run`, papermill, nbval) has nobody to tell: it
waits up to two minutes for its turn.

The lock is a file in the temporary directory, one per user: it holds across threads, kernels and command
lines, and the system releases it when its process dies. The thread that holds it may enter again, so that an
experiment can call another one.
"""

import json
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from nanokit.errors import NanokitError
from nanokit.lab.unattended import unattended

PATIENCE_S = 120.0


class BusyError(NanokitError):
    """Something else is being measured on this machine."""


_held_by: int | None = None  # ident of the thread of this process that holds the lock
_guard = threading.Lock()


def lock_path() -> Path:
    """The lock's file. Not created here."""
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    return Path(tempfile.gettempdir()) / f"nanokit-measuring-{user}.lock"


@contextmanager
def measuring(what: str) -> Iterator[None]:
    """Hold the measurement lock. what: the name a person sees. Raises BusyError at once when it is held."""
    global _held_by
    me = threading.get_ident()
    if _held_by == me:
        yield
        return
    path = lock_path()
    note = path.with_suffix(".json")
    with _guard:
        if _held_by is not None:
            raise _busy(note)
        lock = FileLock(path, timeout=0, thread_local=False)
        try:
            lock.acquire(timeout=PATIENCE_S if unattended() else 0)
        except Timeout:
            raise _busy(note) from None
        _held_by = me
    try:
        note.write_text(json.dumps({"what": what, "pid": os.getpid()}))
        yield
    finally:
        with _guard:
            _held_by = None
            lock.release()


def _busy(note: Path) -> BusyError:
    """The note is written after the lock is taken, so it may be missing or another's for a moment."""
    try:
        holder = json.loads(note.read_text())
        what, pid = holder["what"], holder["pid"]
    except (OSError, ValueError, KeyError):
        what, pid = "something", "unknown"
    where = "this process" if pid == os.getpid() else f"process {pid}"
    return BusyError(
        f"busy: {what} is being measured",
        found=f"the measurement lock, held by {where}",
        do="wait until it is done, or stop it; two measurements at once spoil each other",
    )
