"""PNG pictures of plotly figures, and the one output that JupyterLab, GitHub and a screen reader can all
show.

`bundle(fig)` puts a PNG and a one-sentence summary beside plotly's JSON: JupyterLab draws the live figure,
GitHub (where plotly's JSON alone is an empty cell) the picture. Without a Chrome or Chromium the picture is
left out, and one sentence says so once. Plotly's own `plotly_mimetype+png` renderer was rejected, because
it raises inside the cell without Chrome and starts a new browser for each picture. Kaleido's sync
server was rejected too: when its browser fails to start, its thread dies and the next call waits forever,
and two callers can get each other's picture. So one kaleido lives on one event loop here, started at the
first picture: that one takes seconds, the next ones a fraction of one.
"""

import asyncio
import atexit
import base64
import contextlib
import json
import logging
import os
import sys
import threading
from collections.abc import Coroutine, Mapping
from typing import Any

import plotly.graph_objects as go

from nanokit.lab.palette import smaller

PLOTLY_MIME = "application/vnd.plotly.v1+json"
SCALE = 2  # pixels per CSS pixel, for sharp text on dense screens
TIMEOUT_S = 60.0

_said: set[str] = set()


class _Browser:
    """One kaleido (one headless Chrome) on its own event loop thread, for the life of the process."""

    def __init__(self) -> None:
        import kaleido

        for name in ("kaleido", "choreographer"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="nanokit-pictures", daemon=True).start()
        page = kaleido.PageGenerator(mathjax=False)  # the default page asks a CDN for MathJax
        self._kaleido = kaleido.Kaleido(page_generator=page, timeout=TIMEOUT_S)
        self._run(self._kaleido.open())
        atexit.register(self._close)

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TIMEOUT_S)

    def _close(self) -> None:
        with contextlib.suppress(OSError):  # the browser may have gone before us
            self._run(self._kaleido.close())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def png(self, spec: dict[str, Any], width: int, height: int) -> bytes:
        opts = {"format": "png", "width": width, "height": height, "scale": SCALE}
        return bytes(self._run(self._kaleido.calc_fig(spec, opts)))


_lock = threading.Lock()
_found: _Browser | str | None = None  # the browser, or why there is none; None before the first picture


def _browser() -> _Browser | str:
    """The browser, or why there is none; asked once, since a failed start takes seconds."""
    global _found
    from choreographer.errors import BrowserFailedError, ChromeNotFoundError

    with _lock:
        if _found is None:
            try:
                _found = _Browser()
            except ChromeNotFoundError:
                _found = "no Chrome or Chromium was found"
            except (BrowserFailedError, OSError, RuntimeError) as error:
                _found = f"the browser did not start ({type(error).__name__}: {error})"
        return _found


def png(fig: go.Figure) -> bytes | None:
    """The figure as a PNG of its own size at 2x, or None (and one sentence on stderr, once) without a
    browser.
    """
    global _found
    browser = _browser()
    if not isinstance(browser, str):
        try:
            return smaller(browser.png(fig.to_dict(), *size(fig)))
        except OSError as error:  # killed, or silent for TIMEOUT_S: it will not come back by itself
            _found = browser = f"the browser stopped answering ({type(error).__name__})"
    _say_once(
        f"nanokit: figures are stored without a PNG picture, since {browser}. They show in JupyterLab but not on "
        "GitHub. Install Chromium, or set BROWSER_PATH; `nanokit doctor` checks it."
    )
    return None


def size(fig: go.Figure) -> tuple[int, int]:
    """Width and height in CSS pixels."""
    return int(fig.layout.width or 660), int(fig.layout.height or 380)


def summary(fig: go.Figure) -> str:
    """The one sentence that stands for the figure where it cannot be seen."""
    meta = fig.layout.meta
    if isinstance(meta, Mapping) and meta.get("summary"):
        return str(meta["summary"])
    return str(fig.layout.title.text or "a figure")


def bundle(fig: go.Figure) -> tuple[dict[str, Any], dict[str, Any]]:
    """The MIME data and metadata of one display output: plotly JSON, text, and a PNG where possible."""
    data: dict[str, Any] = {PLOTLY_MIME: _plain(fig), "text/plain": summary(fig)}
    metadata: dict[str, Any] = {}
    if (picture := encoded_png(fig)) is not None:
        width, height = size(fig)
        data["image/png"] = picture
        metadata["image/png"] = {"width": width, "height": height, "alt": summary(fig)}
    return data, metadata


def encoded_png(fig: go.Figure) -> str | None:
    """`png` in base64, as a MIME bundle wants it."""
    picture = png(fig)
    return None if picture is None else base64.b64encode(picture).decode()


def _plain(fig: go.Figure) -> dict[str, Any]:
    """Plotly's JSON as dictionaries, with the configuration of a figure in a notebook."""
    spec: dict[str, Any] = json.loads(fig.to_json())
    return {**spec, "config": {"displaylogo": False, "responsive": False}}


def _say_once(text: str) -> None:
    if text not in _said and "PYTEST_CURRENT_TEST" not in os.environ:  # nbval would compare the line
        _said.add(text)
        sys.stderr.write(text + "\n")
