"""`--json FILE` of commands that print tables: where the JSON goes, checked before any work."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanokit.errors import NanokitError, ParameterError
from nanokit.lab.records import write_atomically


def check_json_target(target: str | None, *read: str | None) -> None:
    """Raise ParameterError for a file that could not be written, and for one that is there and is no JSON: a report
    must not take the place of a model. None and "-", standard output, are fine. read: the files that are looked at."""
    if target is None or target == "-":
        return
    path = Path(target)
    if path.is_dir() or not path.absolute().parent.is_dir():
        found = f"{target} is a folder" if path.is_dir() else f"no folder {path.absolute().parent}"
        raise ParameterError("the JSON cannot be written there", found=found, needed="a file in a folder that exists")
    if not path.is_file():
        return
    looked_at = any(Path(each).exists() and path.samefile(each) for each in read if each)
    with path.open("rb") as file:
        begin = file.read(64).lstrip()[:1]
    if looked_at or begin not in (b"", b"{", b"["):
        raise ParameterError(
            f"{path.name} is there already, and is no report",
            found=target,
            needed="a new file, or an earlier report",
            do="choose another name",
        )


def put(target: str | None, text: str, document: Callable[[], Any]) -> None:
    """Print `text`, and write the document, which is made if it is wanted, to the file; with "-" print it in place
    of the text. Raises NanokitError for a file that cannot be written."""
    made = "" if target is None else json.dumps(document(), indent=1) + "\n"
    sys.stdout.write(made if target == "-" else text + "\n")
    if target in (None, "-"):
        return
    try:
        write_atomically(Path(str(target)), made)
    except OSError as error:
        raise NanokitError("the JSON cannot be written", found=f"{error.strerror} ({target})") from error
