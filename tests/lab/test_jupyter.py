"""The settings overrides and the start of JupyterLab, against JupyterLab's own reading of them."""

import json
import os
import signal
import sys
import textwrap
from pathlib import Path

import pytest

from nanokit.errors import NotebookRunError
from nanokit.lab import jupyter
from nanokit.paths import notebooks_dir


@pytest.fixture
def app_dir(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("JUPYTERLAB_DIR", str(tmp_path / "lab"))
    monkeypatch.setenv("NANOKIT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("JUPYTER_CONFIG_PATH", raising=False)
    return tmp_path / "lab"


def read_by_jupyterlab(app_dir: Path) -> dict:
    from jupyterlab_server.settings_utils import _get_overrides

    overrides, error = _get_overrides(str(app_dir / "settings"))
    assert not error
    return overrides


def test_lab_reads_what_is_written_and_writing_twice_changes_nothing(app_dir):
    """Guards a file in a folder that JupyterLab does not read."""
    assert jupyter.overrides_status()[0] == "missing"
    path = jupyter.write_overrides()
    assert jupyter.overrides_status() == ("present", path)
    assert read_by_jupyterlab(app_dir) == jupyter.OVERRIDES
    stamp = path.stat().st_mtime_ns
    jupyter.write_overrides()
    assert path.stat().st_mtime_ns == stamp
    assert os.listdir(path.parent) == ["nanokit.json"]


@pytest.mark.parametrize("content", ["{", '{"other": {}}', "[]"])
def test_a_stale_or_broken_file_is_found_and_mended(app_dir, content):
    path = jupyter.overrides_path()
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert jupyter.overrides_status()[0] == "differs"
    jupyter.write_overrides()
    assert json.loads(path.read_text()) == jupyter.OVERRIDES


def test_the_schemas_of_this_jupyterlab_know_the_settings(monkeypatch):
    """Guards a renamed setting, which JupyterLab would ignore silently."""
    monkeypatch.delenv("JUPYTERLAB_DIR", raising=False)
    schemas = jupyter.overrides_path().parents[2] / "schemas"
    for plugin, settings in jupyter.OVERRIDES.items():
        extension, name = plugin.split(":")
        schema = json.loads((schemas / extension / f"{name}.json").read_text(encoding="utf-8"))
        for key, value in settings.items():
            known = schema["properties"][key]
            assert value in [option["const"] for option in known["oneOf"]]


def test_an_unwritable_environment_is_named_and_worked_around(app_dir, monkeypatch):
    """Guards a read-only install: `nanokit lab` must still have the settings, without touching the user's."""
    app_dir.parent.joinpath("lab").write_text("a file where a folder should be")
    with pytest.raises(jupyter.OverridesError, match="cannot be written") as caught:
        jupyter.write_overrides()
    assert str(app_dir) in str(caught.value)
    environment = jupyter.lab_environment()
    folder = Path(environment["JUPYTER_CONFIG_PATH"])
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", str(folder))
    assert read_by_jupyterlab(app_dir) == jupyter.OVERRIDES
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", "/elsewhere")
    assert jupyter.lab_environment()["JUPYTER_CONFIG_PATH"].split(os.pathsep)[1:] == ["/elsewhere"]


def test_lab_is_on_loopback_with_its_token(tmp_path):
    """Guards a server that others can reach, or that needs no token."""
    notebook = tmp_path / "my n.ipynb"
    command = jupyter.lab_command(notebook, browser=False, arguments=["--port=1"])
    assert command[:3] == [sys.executable, "-m", "jupyterlab"]
    assert "--LabApp.default_url=/lab/tree/my%20n.ipynb" in command, "the address printed would not open it"
    assert "--ServerApp.ip=127.0.0.1" in command
    assert f"--ServerApp.root_dir={tmp_path}" in command
    assert command[-1] == "--port=1"
    assert "--no-browser" in command
    assert "token" not in " ".join(command)
    assert "--no-browser" not in jupyter.lab_command(notebook)


def test_a_missing_notebook_starts_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(jupyter.subprocess, "Popen", lambda *a, **k: pytest.fail("started"))
    with pytest.raises(NotebookRunError, match="no notebook"):
        jupyter.launch_lab(tmp_path / "no.ipynb")


def test_lab_opens_a_shipped_notebook_by_the_name_that_run_takes(tmp_path, monkeypatch):
    """`nanokit lab tour` used to look for a file named tour in the working directory."""
    opened = []
    monkeypatch.setattr(jupyter, "lab_command", lambda path, **k: opened.append(path) or [sys.executable, "-c", ""])
    monkeypatch.setattr(jupyter, "lab_environment", lambda: dict(os.environ))
    assert jupyter.launch_lab("tour") == 0
    assert opened == [notebooks_dir() / "00_tour.ipynb"]


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_sigterm_reaches_jupyter_and_its_exit_code_comes_back(tmp_path, monkeypatch):
    """Guards a JupyterLab that goes on serving after `nanokit lab` was ended."""
    script = tmp_path / "server.py"
    script.write_text(
        textwrap.dedent("""
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(20)
        """)
    )
    notebook = tmp_path / "n.ipynb"
    notebook.write_text("{}")
    monkeypatch.setattr(jupyter, "lab_command", lambda *a, **k: [sys.executable, str(script)])
    monkeypatch.setattr(jupyter, "lab_environment", lambda: dict(os.environ))
    before = signal.getsignal(signal.SIGTERM)
    assert jupyter.launch_lab(notebook) == 7
    assert signal.getsignal(signal.SIGTERM) is before
