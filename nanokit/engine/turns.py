"""A re-entrant lock that lets waiting threads in between two steps.

`threading.RLock` promises no order: a loop that releases it and takes it again at once usually wins, and a slider
moved during a generation waits for many steps. Here a thread that waits holds the gate, and the loop must pass the gate
again: whoever waits is next.
"""

import threading


class TurnLock:
    """Use as `with lock:`; the thread that holds it may enter again."""

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._lock = threading.RLock()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        if self._owner == threading.get_ident():  # past the gate already; only this thread can have set it so
            self._lock.acquire()
        else:
            with self._gate:
                self._lock.acquire()
            self._owner = threading.get_ident()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
        self._lock.release()
