"""`--json FILE` of commands that print tables: where the JSON goes, checked before any work."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanokit.errors import NanokitError, ParameterError
from nanokit.lab.records import write_atomically


def check_json_target(target: str | None) -> None:
    """Raise ParameterError for a file that could not be written; None and "-", standard output, are fine."""
    if target not in (None, "-") and (Path(str(target)).is_dir() or not Path(str(target)).absolute().parent.is_dir()):
        raise ParameterError("the JSON cannot be written there", found=target, needed="a file in a folder that exists")


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
