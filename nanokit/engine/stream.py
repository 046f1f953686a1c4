"""The chunks of one request as an iterator that drives the engine while it waits.

A class rather than a generator function: a generator that was never started runs no `finally` when it is
dropped, and its request would hold blocks for ever.
"""

from collections import deque
from collections.abc import Iterator
from typing import Protocol

from nanokit.engine.request import Chunk, Completion
from nanokit.errors import RequestError


class Driver(Protocol):
    """What a stream asks of its engine. Each call takes the engine's lock."""

    def advance_for(self, inbox: deque[Chunk]) -> None:
        """Run one step, unless another thread has filled the inbox meanwhile."""
        ...

    def close_stream(self, request_id: int) -> None:
        """Abort the request if it still runs, and forget its inbox."""
        ...

    def drop_later(self, request_id: int) -> None:
        """Close the stream at the next step; takes no lock and may be called from the garbage collector."""
        ...


class Stream(Iterator[Chunk]):
    """One chunk for every token. Leaving early (close, end of a `with` block, or dropping it) aborts the
    request."""

    def __init__(self, driver: Driver, request_id: int, inbox: deque[Chunk]) -> None:
        self.request_id = request_id
        self._driver, self._inbox = driver, inbox
        self._open = True

    def __next__(self) -> Chunk:
        """The next chunk. Raises the request's own error when it failed."""
        try:
            while (chunk := self._take()) is None:
                if not self._open:  # from the start, or because another thread closed it meanwhile
                    raise StopIteration
                self._driver.advance_for(self._inbox)
            if chunk.error is not None:
                raise chunk.error
        except BaseException:  # an interrupt too must not leave the request behind
            self.close()
            raise
        if chunk.finish_reason is not None:
            self.close()
        return chunk

    def _take(self) -> Chunk | None:
        try:
            return self._inbox.popleft() if self._open else None
        except IndexError:
            return None

    def result(self) -> Completion:
        """Run to the end and return the completion. Raises RequestError when the end has been read
        already."""
        for chunk in self:
            if chunk.completion is not None:
                return chunk.completion
        raise RequestError("this stream has ended already", found=f"request {self.request_id}")

    def close(self) -> None:
        """Abort the request unless it has ended; no more chunks come."""
        if self._open:
            self._open = False
            self._driver.close_stream(self.request_id)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # The collector may run in the middle of a step of this very thread, where an abort would pull a
        # request out of the batch being built.
        if self._open:
            self._driver.drop_later(self.request_id)
