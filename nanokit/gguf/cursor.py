"""A place in a mapped GGUF file that only moves over bytes that are there.

Every count and length is compared with the bytes that are left before anything is made from it. What fails is a
`HeaderError`: it says, beside what any ModelFileError says, which part of the header was being read, so that a report
can tell what was found good before it.
"""

import mmap
import struct
from pathlib import Path
from typing import Any, NoReturn

from nanokit.errors import ModelFileError
from nanokit.gguf import types

U32, U64 = struct.Struct("<I"), struct.Struct("<Q")
AGAIN = "the file is damaged or incomplete: download it again"

# The parts of a header, in the order in which they are read and checked.
START, COUNTS, KEYS, ALIGNMENT, TENSORS, PLACES, SIZE = PARTS = (
    "magic and version",
    "counts",
    "keys and values",
    "alignment",
    "tensor table",
    "tensor places",
    "file size",
)


class HeaderError(ModelFileError):
    """A header that cannot be read. part: one of PARTS."""

    def __init__(
        self, what: str, *, found: object = None, needed: object = None, do: str | None = None, part: str = START
    ) -> None:
        super().__init__(what, found=found, needed=needed, do=do)
        self.part = part


class Cursor:
    """at: where it stands; part: of the header, one of PARTS; elements_left: how many array elements may still come."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self.path, self.mapped, self.size = path, mapped, len(mapped)
        self.at = 0
        self.part = START
        self.elements_left = types.MAX_ELEMENTS

    def fail(self, what: str, found: object, needed: object, do: str = AGAIN) -> NoReturn:
        raise HeaderError(f"{self.path}: {what}", found=found, needed=needed, do=do, part=self.part)

    def need(self, n: int, what: str) -> int:
        """Step over n bytes and return where they begin."""
        begin = self.at
        if n > self.size - begin:
            self.fail(
                f"the header ends inside {what}",
                found=f"{self.size - begin} bytes left of a file of {self.size}",
                needed=f"{n} bytes",
            )
        self.at = begin + n
        return begin

    def number(self, layout: struct.Struct, what: str) -> Any:
        return layout.unpack_from(self.mapped, self.need(layout.size, what))[0]

    def count(self, what: str, least_bytes: int) -> int:
        """A u64 count of things of which each takes at least `least_bytes`."""
        n: int = self.number(U64, what)
        most = min(types.MAX_ENTRIES, self.size // least_bytes)
        if n > most:
            self.fail(f"{what} is impossible", found=n, needed=f"at most {most} in a file of {self.size} bytes")
        return n

    def string(self, what: str, longest: int | None = None) -> str:
        n: int = self.number(U64, f"the length of {what}")
        if longest is not None and not 0 < n <= longest:
            self.fail(f"the length of {what} is out of range", found=n, needed=f"1 to {longest} bytes")
        begin = self.need(n, what)
        try:
            return str(self.mapped[begin : begin + n], "utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not UTF-8", found=str(error.reason), needed="UTF-8 text, as the format demands")
