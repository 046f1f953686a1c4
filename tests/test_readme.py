"""README is true: every fenced command and snippet in it is executed."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanokit.model.spec import default_model_path
from nanokit.paths import cache_dir, notebooks_dir

ROOT = notebooks_dir().parent
TEXT = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
COMMANDS = [line for language, block in BLOCKS if language == "sh" for line in block.strip().splitlines()]
INSTALL = COMMANDS[:2]
LAB = "nanokit lab"

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Path:
    """A place with what the README's commands name: the notebooks, an empty run folder, the model in the cache."""
    place = tmp_path_factory.mktemp("readme")
    shutil.copytree(notebooks_dir(), place / "notebooks")
    return place


@pytest.fixture
def environment(folder: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTEST_CURRENT_TEST", "NANOKIT_RUNS")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
    return kept | {"PATH": path, "NANOKIT_HOME": str(cache_dir()), "NANOKIT_RUNS": str(folder / "runs")}


def test_the_two_lines_are_what_ci_runs() -> None:
    """.ci/run takes both lines out of README.md by their marker and runs them in a fresh environment."""
    assert TEXT.index("<!-- two lines -->") < TEXT.index(INSTALL[0])
    assert [line.split()[0] for line in INSTALL] == ["python3", ".venv/bin/pip"]
    script = (ROOT / ".ci" / "run").read_text("utf-8")
    assert 'eval "${lines[0]}"' in script
    assert 'eval "${lines[1]}"' in script


@pytest.mark.parametrize("command", [c for c in COMMANDS[2:] if c != LAB])
def test_command(command: str, folder: Path, environment: dict[str, str]) -> None:
    """In the README's order: later lines (runs show last) speak of what earlier ones left."""
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() or "nbconvert" in command


def test_lab_opens_the_tour_on_loopback(folder: Path, environment: dict[str, str]) -> None:
    """`nanokit lab` without the browser that it would open."""
    assert LAB in COMMANDS
    log = folder / "lab.log"
    with log.open("w") as output:
        server = subprocess.Popen(
            [*LAB.split(), "--no-browser"], cwd=folder, env=environment, stdout=output, stderr=output
        )
    try:
        deadline = time.monotonic() + 60
        while "http://127.0.0.1:" not in log.read_text():
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        assert "00_tour.ipynb?token=" in log.read_text()
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=20)


@pytest.mark.parametrize("code", [block for language, block in BLOCKS if language == "python"])
def test_python(code: str, folder: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_links_and_pictures_are_there() -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)]+)\)|(?:src|srcset)=\"([^\"]+)\"", TEXT)
    assert targets
    for target in targets:
        path = ROOT / (target[0] or target[1])
        assert path.exists(), path


def test_the_download_size_is_the_pinned_one() -> None:
    """A figure in the text that the code knows: about 93 MB."""
    from nanokit.model.spec import DEFAULT_MODEL

    assert f"about {DEFAULT_MODEL.wheel_nbytes / 1e6:.0f} MB" in TEXT
    assert default_model_path().name.startswith("SmolLM2-135M-Instruct")
