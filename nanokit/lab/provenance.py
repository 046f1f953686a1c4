"""Where a figure comes from: the code, the commit, the files a run reads, the machine.

The code is hashed as well as the commit named, because most runs of a research kit are made with uncommitted
changes: a grid that resumes must notice them.
"""

import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanokit.lab.machine import machine_card
from nanokit.paths import PACKAGE, cache_dir


def provenance() -> dict[str, Any]:
    """git, code_sha256, machine and versions, as a record holds them. Imports torch."""
    card = machine_card()
    return {
        "git": git_state(),
        "code_sha256": code_hash(),
        "machine": card.to_record(),
        "versions": card.versions,
    }


def git_state() -> dict[str, Any] | None:
    """Commit and whether the package's checkout has changes; None for a wheel, or without git."""
    commit = _git("rev-parse", "HEAD")
    top = _git("rev-parse", "--show-toplevel")
    if not commit or not top or Path(top).resolve() != PACKAGE.parent:
        return None  # a wheel inside some other project's repository is not that project's commit
    return {"commit": commit, "dirty": bool(_git("status", "--porcelain", "--untracked-files=no"))}


def _git(*arguments: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", "-C", str(PACKAGE), *arguments], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def code_hash() -> str:
    """SHA-256 of the package's sources, kernels included, as they are on disk now."""
    import nanokit.kernels

    digest = hashlib.sha256()
    for root in (PACKAGE, Path(nanokit.kernels.__path__[0])):
        for path in sorted(root.rglob("*")):
            if path.suffix in {".py", ".c", ".h"} and path.is_file():
                digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def input_files(params: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """For each parameter that names an existing file: its name, size and time of change, so that a grid
    notices another model at the same path. A directory counts by its files."""
    found = {}
    for name, value in params.items():
        if not isinstance(value, str) or not value or len(value) > 4096:
            continue
        try:
            path = Path(value).expanduser()
            inside = path.glob("*") if path.is_dir() else [path]
            facts = [p.stat() for p in inside if p.is_file()]
        except (OSError, ValueError):
            continue
        if facts:
            found[name] = {
                "name": path.name,
                "bytes": sum(f.st_size for f in facts),
                "changed_ns": max(f.st_mtime_ns for f in facts),
            }
    return found


def without_paths(text: str) -> str:
    """The text with this machine's known folders replaced, longest first."""
    places = {
        str(PACKAGE.parent): "<nanokit>",
        str(cache_dir()): "<cache>",
        sys.prefix: "<python>",
        str(Path(tempfile.gettempdir())): "<tmp>",
        str(Path.home()): "~",
    }
    for place in sorted(places, key=len, reverse=True):
        if len(place) > 1:
            text = text.replace(place, places[place])
    return text
