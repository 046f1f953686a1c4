"""JupyterLab with the settings that the kit needs, opened on a notebook.

Two of Lab's defaults are overridden. `commsOverSubshells`: widget callbacks would run in another thread, at
the same time as a running cell, both with the same model; "disabled" brings them back behind the cell.
`fetchNews`: the first start would cover the notebook with a question and ask a server for news. Both live
in a file of the kit's own in the environment's `overrides.d`, so a plain `jupyter lab` has them too, and a
user's own settings still win.

Where the environment cannot be written, `launch_lab` hands Lab the same settings through a `labconfig`
folder in the user cache and JUPYTER_CONFIG_PATH, for that start only. Writing the user's settings
(JUPYTERLAB_SETTINGS_DIR) was rejected: they are the user's.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Literal
from urllib.parse import quote

from nanokit import paths
from nanokit.errors import NanokitError
from nanokit.lab.cell import find_notebook

OVERRIDES = {
    "@jupyterlab/apputils-extension:kernels-settings": {"commsOverSubshells": "disabled"},
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false"},
}

OverridesState = Literal["present", "missing", "differs"]


class OverridesError(NanokitError):
    """The settings file could not be written into the environment."""


def overrides_path() -> Path:
    """The kit's file among the settings overrides of the JupyterLab that this Python would start."""
    from jupyterlab.commands import get_app_dir

    return Path(get_app_dir()) / "settings" / "overrides.d" / "nanokit.json"


def overrides_status() -> tuple[OverridesState, Path]:
    """Whether the file is there and says what this version needs, and where it is."""
    path = overrides_path()
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "missing", path
    except (OSError, ValueError):
        return "differs", path
    return ("present" if found == OVERRIDES else "differs"), path


def write_overrides() -> Path:
    """Put the file in place, whole or not at all; nothing happens when it is right already.

    Raises OverridesError when the environment cannot be written.
    """
    state, path = overrides_status()
    if state != "present":
        try:
            _write(path, OVERRIDES)
        except OSError as error:
            raise OverridesError(
                "JupyterLab's settings overrides cannot be written",
                found=f"{path}: {error.strerror or error}",
                needed="write access to the environment's share/jupyter/lab/settings",
                do="start with `nanokit lab`, which then sets them for that start, or set 'Kernel Comms over "
                "subshells' to Disabled in JupyterLab's settings",
            ) from error
    return path


def _write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def lab_environment() -> dict[str, str]:
    """The environment to start JupyterLab in: this one, plus the overrides where they cannot be written."""
    environment = dict(os.environ)
    try:
        write_overrides()
    except OverridesError:
        folder = paths.cache_dir() / "jupyter"
        _write(folder / "labconfig" / "default_setting_overrides.json", OVERRIDES)
        before = environment.get("JUPYTER_CONFIG_PATH")
        environment["JUPYTER_CONFIG_PATH"] = os.pathsep.join([str(folder), *([before] if before else [])])
    return environment


def lab_command(notebook: Path, *, browser: bool = True, arguments: Sequence[str] = ()) -> list[str]:
    """The command line: loopback only, Jupyter's own token.

    The file browser's root is the folder around notebooks/ for the kit's own notebooks (an absolute path),
    so that data/ and runs/ of a checkout are in reach, and the notebook's own folder for any other. The notebook
    is named as the default address rather than as the file to open: Jupyter prints only the former, and who
    starts without a browser goes by what is printed.
    """
    home = paths.notebooks_dir()
    root = home.parent if notebook.is_relative_to(home) else notebook.parent
    return [
        sys.executable,
        "-m",
        "jupyterlab",
        f"--LabApp.default_url=/lab/tree/{quote(notebook.relative_to(root).as_posix())}",
        f"--ServerApp.root_dir={root}",
        "--ServerApp.ip=127.0.0.1",
        *([] if browser else ["--no-browser"]),
        *(["--allow-root"] if getattr(os, "geteuid", lambda: 1)() == 0 else []),
        *arguments,
    ]


def launch_lab(notebook: str | Path = "00_tour", *, browser: bool = True, arguments: Sequence[str] = ()) -> int:
    """Open JupyterLab on a notebook (a path or a shipped one's name) and stay until it ends; returns its exit code.

    Jupyter itself prints the address with its token. Ctrl-C and SIGTERM go to Jupyter, which asks or shuts
    its kernels down; nothing is left running. arguments: passed on to `jupyter lab`. Raises NotebookRunError for
    a missing notebook.
    """
    path = find_notebook(str(notebook))
    server = subprocess.Popen(lab_command(path, browser=browser, arguments=arguments), env=lab_environment())

    def pass_on(number: int, _frame: FrameType | None) -> None:
        server.send_signal(number)

    # A terminal sends Ctrl-C to both, so this process only has to outlive it; SIGTERM reaches it alone.
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None),
        signal.SIGTERM: signal.signal(signal.SIGTERM, pass_on),
    }
    try:
        return server.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
