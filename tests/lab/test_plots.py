"""House style and pictures: what a reader on GitHub, in the dark theme or with a screen reader gets."""

import json
import re
import struct
import threading

import numpy as np
import plotly.graph_objects as go
import pytest

from nanokit.lab import pictures, plots
from nanokit.lab.notebook_setup import setup

SAMPLES = {"prefill": [10.0, 12.0, 11.0], "decode": [2.0, 2.5, 1.5], "one": [3.0]}


def examples() -> list[go.Figure]:
    lines = plots.lines(
        "finding", {"a": (np.arange(3), np.arange(3.0)), "decode": ([1], [2])}, x="n (tokens)", y="t (s)"
    )
    plots.mark(lines, "limit", y=1.5)
    plots.mark(lines, "change", x=1.0)
    return [plots.bars("finding", SAMPLES, unit="speed (tok/s)"), lines]


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("page", ["#ffffff", "#0d1117", "#111111"])
def test_text_has_contrast_on_light_and_dark(page):
    """Guards grey text that vanishes in one theme (WCAG contrast; 4:1 for our sizes on white and GitHub
    dark).
    """
    high, low = sorted((luminance(plots.GREY), luminance(page)), reverse=True)
    assert (high + 0.05) / (low + 0.05) >= 4.0


def test_bars_show_median_and_the_whole_range():
    fig = plots.bars("finding", SAMPLES, unit="tok/s")
    bar = fig.data[0]
    assert bar.x == (11.0,)
    assert (bar.error_x.array, bar.error_x.arrayminus) == ((1.0,), (1.0,))
    assert [note.text for note in fig.layout.annotations] == ["11.0", "2.0", "3.0"]
    assert fig.data[2].error_x.visible is False
    assert fig.data[0].marker.color == plots.METHODS["prefill"]
    assert fig.layout.xaxis.range[1] > 12.0


def test_a_method_has_one_colour_whatever_its_place():
    first = plots.bars("f", {"decode": [1.0], "prefill": [1.0]}, unit="s")
    second = plots.bars("f", {"prefill": [1.0], "decode": [1.0]}, unit="s")
    assert first.data[0].marker.color == second.data[1].marker.color
    assert plots.color("new", 0) != plots.color("new", 1)


@pytest.mark.parametrize("fig", examples())
def test_data_is_stored_as_plain_lists_without_opaque_background(fig):
    """Guards base64 in committed notebooks, and glaring white figures in a dark theme."""
    spec = fig.to_json()
    assert "bdata" not in spec
    layout = json.loads(spec)["layout"]
    for place in ("paper_bgcolor", "plot_bgcolor"):
        assert layout["template"]["layout"][place] == "rgba(0,0,0,0)"
    assert layout["template"]["layout"]["yaxis"]["zerolinecolor"] == plots.GRID
    assert 640 <= fig.layout.width <= 760
    assert fig.layout.xaxis.title.text


def test_bundle_has_picture_size_and_summary(monkeypatch):
    """Guards a figure that GitHub shows as nothing, or at twice its size, or without alt text."""
    monkeypatch.setattr(pictures, "png", lambda fig: b"picture")
    fig = plots.figure("Decode<br>waits", summary="Decoding waits for memory.")
    data, metadata = pictures.bundle(fig)
    assert set(data) == {pictures.PLOTLY_MIME, "text/plain", "image/png"}
    assert data["text/plain"] == "Decoding waits for memory."
    assert metadata["image/png"] == {"width": plots.WIDTH, "height": plots.HEIGHT, "alt": data["text/plain"]}
    assert pictures.summary(plots.figure("Decode<br>waits")) == "Decode waits"
    assert pictures.summary(go.Figure()) == "a figure"


def test_without_a_browser_the_figure_stays_and_one_sentence_is_said_once(monkeypatch, capsys):
    """Guards plotly's own renderer, which raises in the cell."""
    monkeypatch.setattr(pictures, "_browser", lambda: "no Chrome or Chromium was found")
    monkeypatch.setattr(pictures, "_said", set())
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    for _ in range(2):
        data, metadata = pictures.bundle(plots.figure("f"))
        assert set(data) == {pictures.PLOTLY_MIME, "text/plain"}
        assert metadata == {}
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert re.search(r"Chromium.*BROWSER_PATH.*nanokit doctor", said)


def test_pictures_keep_their_size_and_callers_keep_theirs():
    """Guards kaleido's sync server, whose results can reach another caller. Needs a browser."""
    if isinstance(pictures._browser(), str):
        pytest.skip(f"pictures need a browser: {pictures._browser()}")
    heights = [200, 240, 280, 320]
    seen = {}

    def draw(height: int) -> None:
        picture = pictures.png(plots.figure("f", height=height))
        assert picture is not None
        seen[height] = struct.unpack(">II", picture[16:24])

    threads = [threading.Thread(target=draw, args=(height,)) for height in heights]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {height: (2 * plots.WIDTH, 2 * height) for height in heights}


def test_a_browser_that_dies_costs_the_picture_not_the_cell(monkeypatch):
    """Guards a killed Chrome that fails every later cell, or makes each wait for a timeout."""

    class Dead:
        calls = 0

        def png(self, *_):
            self.calls += 1
            raise ConnectionError("gone")

    dead = Dead()
    monkeypatch.setattr(pictures, "_found", dead)
    assert pictures.png(plots.figure("f")) is None
    assert pictures.png(plots.figure("f")) is None
    assert dead.calls == 1


def test_setup_is_silent_keeps_warnings_and_drops_their_paths(monkeypatch, capsys):
    """Guards `<tmp>/ipykernel_<pid>/<n>.py:<line>` in committed outputs."""
    import warnings

    import plotly.io as pio

    before = pio.renderers.default, warnings.formatwarning
    monkeypatch.setattr(pictures, "png", lambda fig: None)
    try:
        setup()
        setup()
        captured = capsys.readouterr()
        assert (captured.out, captured.err) == ("", "")
        assert warnings.formatwarning(UserWarning("odd"), UserWarning, "/tmp/x.py", 3) == "UserWarning: odd\n"
        bundle = plots.figure("finding")._repr_mimebundle_()
        assert bundle["text/plain"] == "finding"
        assert bundle[pictures.PLOTLY_MIME]["layout"]["title"]["text"] == "finding"
    finally:
        pio.renderers.default, warnings.formatwarning = before
