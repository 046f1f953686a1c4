"""From token ids to the text a person sees: whole characters, and nothing of a stop string.

A stop string may begin in one token and end three tokens later, so text that could still become one is held
back: what was given out is never taken back. The completion's text is, by construction, what the stream gave
out.
"""

from collections.abc import Sequence

from nanokit.engine.interfaces import StreamDecoder


def _held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that a stop string could start with."""
    longest = min(len(text), max((len(stop) for stop in stops), default=1) - 1)
    for length in range(longest, 0, -1):
        tail = text[-length:]
        if any(stop.startswith(tail) for stop in stops):
            return length
    return 0


class AnswerText:
    """The text of one answer while it grows."""

    def __init__(self, decoder: StreamDecoder, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)  # may be replaced while the answer grows; what was given out stays
        self.stopped = False
        self._decoder = decoder
        self._pending = ""
        self._given: list[str] = []

    @property
    def text(self) -> str:
        """All that was given out."""
        return "".join(self._given)

    def push(self, token_id: int) -> str:
        """The text that one more token makes certain; sets `stopped` when a stop string is complete."""
        self._pending += self._decoder.push(token_id)
        return self._give(final=False)

    def finish(self) -> str:
        """The rest, when no more tokens come. May complete a stop string as well."""
        if self.stopped:
            return ""
        self._pending += self._decoder.finish()
        return self._give(final=True)

    def _give(self, final: bool) -> str:
        found = [place for stop in self.stops if (place := self._pending.find(stop)) >= 0]
        if found:
            self.stopped = True
            piece, self._pending = self._pending[: min(found)], ""
        else:
            keep = 0 if final else _held_back(self._pending, self.stops)
            cut = len(self._pending) - keep
            piece, self._pending = self._pending[:cut], self._pending[cut:]
        if piece:
            self._given.append(piece)
        return piece
