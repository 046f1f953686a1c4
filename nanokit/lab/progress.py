"""How a running experiment says how far it is, and how it is told to stop.

An experiment takes `progress` and `cancel`, both optional, and never prints: the panel, the command line
and a test each hand in what they can show. `tqdm.auto` inside the experiment was rejected: in an executed
notebook its text is a bar that stands at 0 %, and nbval compares its timings.
"""

import threading
from collections.abc import Callable
from typing import Protocol

from nanokit.errors import NanokitError


class Progress(Protocol):
    """What an experiment reports to: `start` once, then `step` after each of `total` pieces of work."""

    def start(self, total: int, text: str = "") -> None:
        """total: number of steps to come. text: what the first of them does."""

    def step(self, text: str = "") -> None:
        """One more step is done. text: what the next one does, "" for no change."""


class StoppedError(NanokitError):
    """A run was stopped on request. Not a fault: a panel shows `stopped`."""


def stop_if(cancel: threading.Event | None) -> None:
    """Call between pieces of work: raises StoppedError once `cancel` is set."""
    if cancel is not None and cancel.is_set():
        raise StoppedError("the run was stopped")


class Silent:
    """Reports nowhere: tests and headless notebooks."""

    def start(self, total: int, text: str = "") -> None:
        pass

    def step(self, text: str = "") -> None:
        pass


class CallbackProgress:
    """Counts the steps and tells each to `report(done, total, text)`; what a panel shows is made of these."""

    def __init__(self, report: Callable[[int, int, str], None]) -> None:
        self.done, self.total, self.text = 0, 0, ""
        self._report = report

    def start(self, total: int, text: str = "") -> None:
        self.done, self.total, self.text = 0, total, text
        self._report(self.done, self.total, self.text)

    def step(self, text: str = "") -> None:
        self.done += 1
        self.text = text or self.text
        self._report(self.done, self.total, self.text)
