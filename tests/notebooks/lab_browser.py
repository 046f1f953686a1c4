"""JupyterLab in a real Chromium, for tests that must see what a person sees.

    with JupyterLab(notebook_copy, theme="dark") as lab:
        lab.run_all()
        lab.press("depth", "ArrowRight", times=3)
        lab.click("Run")
        lab.wait_for_title(lambda title: "6" in title)
        lab.screenshot(path)

The server listens on a free loopback port, with its own token, settings, workspaces and temporary folder,
so neither the user's JupyterLab nor the measurement lock of another run is touched. Only processes started
here are ended.
"""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from nanokit.lab import jupyter

CHROMIUM = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
# A closed network: without these Chromium asks hosts of its own at every start.
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
TITLE = ".gtitle"  # plotly's title in the SVG


def chromium() -> str | None:
    """The browser to drive: BROWSER_PATH, or what is on the PATH."""
    return os.environ.get("BROWSER_PATH") or next(filter(None, map(shutil.which, CHROMIUM)), None)


def why_not() -> str | None:
    """Why no browser test can run here, or None."""
    if chromium() is None:
        return f"needs a browser on the PATH, one of {', '.join(CHROMIUM)} (or BROWSER_PATH)"
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "needs the package playwright (pip install 'nanokit[test]')"
    return None


class JupyterLab:
    """A server, a browser and one open notebook. page: playwright's page, for whatever has no method here."""

    def __init__(
        self,
        notebook: Path,
        scratch: Path,
        *,
        theme: str = "light",
        size: tuple[int, int] = (1440, 900),
        environment: dict[str, str] | None = None,
    ) -> None:
        """notebook: opened in place (give a copy). scratch: an empty folder for settings, logs, temporary
        files.

        theme: light or dark. size: of the window, CSS pixels. environment: for the server and its kernels.
        """
        self._notebook, self._scratch, self._size = notebook, scratch, size
        self._theme = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}[theme]
        self._dark = theme == "dark"
        self._extra = environment or {}
        self._token = secrets.token_hex(16)
        self._server: subprocess.Popen[bytes] | None = None

    # ------------------------------------------------------------------ start and end

    def __enter__(self) -> Self:
        try:
            self._start_server()
            self._start_browser()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and hasattr(self, "page"):
            self.screenshot(self._scratch / "failure.png")
        self.close()

    def close(self) -> None:
        for name in ("_browser", "_playwright"):
            thing = getattr(self, name, None)
            if thing is not None:
                (thing.close if name == "_browser" else thing.stop)()
        if self._server is not None and self._server.poll() is None:
            self._server.send_signal(signal.SIGTERM)
            try:
                self._server.wait(15)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()

    def _start_server(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        places = {
            name: str(self._scratch / folder)
            for name, folder in {
                "JUPYTER_CONFIG_DIR": "config",
                "JUPYTER_DATA_DIR": "data",
                "JUPYTER_RUNTIME_DIR": "runtime",
                "JUPYTERLAB_SETTINGS_DIR": "settings",
                "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
                "IPYTHONDIR": "ipython",
                "TMPDIR": "tmp",
            }.items()
        }
        for folder in places.values():
            Path(folder).mkdir(parents=True, exist_ok=True)
        self._write_settings(Path(places["JUPYTERLAB_SETTINGS_DIR"]))
        environment = jupyter.lab_environment() | places | {"JUPYTER_TOKEN": self._token} | self._extra
        environment.pop("PYTEST_CURRENT_TEST", None)  # a kernel with it would be headless
        options = [f"--port={port}", "--ServerApp.port_retries=0", "--LabApp.expose_app_in_browser=True"]
        command = jupyter.lab_command(self._notebook, browser=False, arguments=options)
        self._log = self._scratch / "server.log"
        with open(self._log, "wb") as log:
            self._server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        self._await_server()

    def _write_settings(self, settings: Path) -> None:
        """The theme, and every cell in the page: by default Lab leaves out those that are scrolled away."""
        for plugin, content in {
            "apputils-extension/themes": {"theme": self._theme},
            "notebook-extension/tracker": {"windowingMode": "none"},
        }.items():
            path = settings / "@jupyterlab" / f"{plugin}.jupyterlab-settings"
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps(content))

    def _await_server(self, seconds: float = 30.0) -> None:
        assert self._server is not None
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self._server.poll() is not None:
                break
            try:
                urllib.request.urlopen(f"{self._url}/api?token={self._token}", timeout=1).close()
                return
            except OSError:
                time.sleep(0.1)
        raise RuntimeError(f"jupyter lab did not start:\n{self._log.read_text()[-2000:]}")

    def _start_browser(self) -> None:
        from playwright.sync_api import sync_playwright

        width, height = self._size
        self._playwright = sync_playwright().start()
        self._browser = self._playwright.chromium.launch(executable_path=chromium(), args=list(FLAGS))
        self.page: Any = self._browser.new_page(
            viewport={"width": width, "height": height},
            device_scale_factor=2,
            color_scheme="dark" if self._dark else "light",
        )
        self.page.set_default_timeout(20_000)
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(f"{self._url}/lab/tree/{self._notebook.name}?token={self._token}&reset")
        self.page.locator(".jp-NotebookPanel .jp-Cell").first.wait_for(timeout=30_000)
        # Run All before the kernel is there opens a dialog that asks for one.
        self.page.wait_for_function(
            """() => {
                const context = window.jupyterapp?.shell?.currentWidget?.sessionContext;
                return context?.isReady && context.session?.kernel?.status === 'idle';
            }""",
            timeout=30_000,
        )
        self.page.locator("body[data-jp-theme-name]").wait_for(state="attached", timeout=10_000)

    # ------------------------------------------------------------------ what a person does

    def run_all(self, timeout_s: float = 60.0) -> None:
        """Run every cell, as the menu does, and wait until the last has ended. Raises when one failed."""
        self.page.evaluate(
            "seconds => Promise.race(["
            "  window.jupyterapp.commands.execute('notebook:run-all-cells'),"
            "  new Promise((_, no) => setTimeout(() => no(new Error('Run All took too long')), 1000 * seconds))"
            "])",
            timeout_s,
        )
        errors = self.page.locator('[data-mime-type="application/vnd.jupyter.stderr"]').all_text_contents()
        if self.page.locator(".jp-RenderedText pre:has-text('Traceback')").count():
            raise RuntimeError(f"a cell failed: {errors}")

    def hide_sidebar(self) -> None:
        """More room for the notebook."""
        self.page.keyboard.press("Control+b")

    def press(self, label: str, key: str, times: int = 1) -> None:
        """Keys on the slider with this label: widgets must work without a mouse."""
        # ipywidgets labels its sliders for the eye only: the handle itself has no accessible name.
        row = self.page.locator(".widget-slider").filter(has_text=label)
        handle = row.get_by_role("slider")
        for _ in range(times):
            handle.press(key)

    def click(self, button: str) -> None:
        self.page.locator(".jp-OutputArea button.widget-button").filter(has_text=button).click()

    def titles(self) -> list[str]:
        """The titles of the figures on the page, in order."""
        return [str(text) for text in self.page.locator(TITLE).all_text_contents()]

    def wait_for_title(self, wanted: Callable[[str], bool], timeout_s: float = 30.0) -> str:
        """The first figure title that `wanted` accepts. Raises TimeoutError, naming those there are."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            for title in self.titles():
                if wanted(title):
                    return title
            self.page.wait_for_timeout(100)
        raise TimeoutError(f"no such figure title within {timeout_s} s; there are {self.titles()}")

    def screenshot(self, path: Path, selector: str | None = None) -> None:
        """A PNG at 2x of the window, or of the first element that selector finds."""
        target = self.page.locator(selector).first if selector else self.page
        target.screenshot(path=str(path))
