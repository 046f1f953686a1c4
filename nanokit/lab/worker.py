"""One background thread per panel, so that Stop is heard while a model runs.

Widget callbacks may run on the main thread or on another one beside a running cell, depending on the front
end. So no callback runs a model itself: it submits the newest parameters, and one worker thread takes them.
Submissions while it works are coalesced: the latest wins. A pool was rejected: two runs at once would spoil
each other's times.
"""

import threading
from collections.abc import Callable

from nanokit.lab.params import Params


class Worker:
    """Runs `work(params, cancel)` for the latest submission; the thread lives only while there is work.

    `work` must show its own failures: there is nobody above it in the thread to tell.
    """

    def __init__(self, work: Callable[[Params, threading.Event], None]) -> None:
        self._work = work
        self._mutex = threading.Lock()
        self._pending: Params | None = None
        self._cancel = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        with self._mutex:
            return self._thread is not None

    def submit(self, params: Params) -> None:
        """Run params now, or after the current run in place of anything waiting."""
        with self._mutex:
            self._pending = params
            if self._thread is None:
                self._cancel = threading.Event()
                self._thread = threading.Thread(target=self._loop, name="nanokit-panel", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Ask the current run to end at its next step, and drop what waits."""
        with self._mutex:
            self._pending = None
            self._cancel.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until nothing runs or waits; False when timeout (seconds) passed first."""
        with self._mutex:
            thread = self._thread
        if thread is not None:
            thread.join(timeout)
        return not self.running

    def _loop(self) -> None:
        while True:
            with self._mutex:
                params, self._pending = self._pending, None
                if params is None:
                    self._thread = None
                    return
                if self._cancel.is_set():
                    self._cancel = threading.Event()
                cancel = self._cancel
            self._work(params, cancel)
