"""A stand-in for the default model: a small wheel that pip accepts, and a pip that only copies it."""

import hashlib
import os
import shutil
import zipfile
from pathlib import Path

from nanokit.model import wheel
from nanokit.model.spec import ModelSpec

CONTENT = bytes(range(256)) * 16_384  # 4 MiB: several chunks
TINY = ModelSpec(
    name="Tiny",
    wheel="nanokit-test-tiny",
    version="1.0",
    wheel_nbytes=100_000,
    member="tiny/tiny.gguf",
    nbytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    licence="Apache-2.0",
    parameters=1,
)


def make_wheel(folder: Path, content: bytes = CONTENT, member: str = TINY.member) -> Path:
    """A wheel that pip accepts, with dependencies that do not exist: they must never be looked at."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / TINY.wheel_filename
    info = "nanokit_test_tiny-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("../escaped.txt", "no path of the archive may be used")
        archive.writestr(member, content)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: nanokit-test-tiny\nVersion: 1.0\nRequires-Dist: no-such==9\n",
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


def serve(monkeypatch, archive: Path) -> None:
    """Stand in for pip: a copy of `archive`."""

    def download(spec, folder, target, grown):
        grown(0)
        return Path(shutil.copy(archive, folder))

    monkeypatch.setattr(wheel, "download", download)


def leftovers(home: Path) -> list[str]:
    """Everything in the cache but the lock: after a failure nothing, final name included, may be there."""
    return sorted(str(p.relative_to(home)) for p in home.rglob("*") if p.is_file() and p.suffix != ".lock")


def real_pip(monkeypatch, *, index: Path) -> None:
    """Let pip find wheels in the folder `index` and nowhere else, whatever the machine's configuration says."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
