"""Opening a model file: mapped read-only, or one clear error for what is not one.

A memory map, because a header touches a few megabytes of a file of many gigabytes, and because weights may
stay in the page cache. The kind of file is asked for before it is opened: opening a named pipe would wait
for ever.
"""

import mmap
import stat
from pathlib import Path
from typing import NoReturn

from nanokit.errors import ModelFileError
from nanokit.gguf import types

_NEEDED = "a GGUF model file"


def map_file(path: Path) -> mmap.mmap:
    """The whole file, read-only. ModelFileError when it is missing, unreadable, empty or no regular file."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            _refuse(path, "is a directory", "a directory", "name the .gguf file itself")
        if not stat.S_ISREG(mode):
            _refuse(path, "is no regular file", "a device, pipe or socket", "name a .gguf file")
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                _refuse(path, "is empty", "0 bytes", "download the file again")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise ModelFileError(
            f"{path}: there is no such file", found="nothing", needed=_NEEDED, do="check the path"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a path that no file system takes
        raise ModelFileError(
            f"{path}: the file cannot be read",
            found=getattr(error, "strerror", None) or str(error),
            needed="a file that you may read",
            do="check the path and its permissions",
        ) from error


def refuse_foreign(path: Path, mapped: mmap.mmap) -> None:
    """Raise ModelFileError, saying what the file is instead, unless it begins as GGUF does."""
    head = mapped[:64]
    if head.startswith(types.MAGIC):
        return
    found = next((kind for start, kind in types.FOREIGN.items() if head.lstrip().startswith(start)), None)
    do = "download the model file again, in GGUF form"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < len(mapped):
        found, do = "a safetensors file", "name its directory, with config.json and tokenizer.json in it"
    _refuse(path, "is no GGUF file", found or f"a file that begins with {head[:8]!r}", do)


def _refuse(path: Path, what: str, found: str, do: str) -> NoReturn:
    raise ModelFileError(f"{path} {what}", found=found, needed=_NEEDED, do=do)
