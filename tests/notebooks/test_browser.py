"""One person's path in a real JupyterLab: open the tour, Run All, move a slider by keyboard, press Run, see the figure
change.

What only a browser can tell: that widget messages from the panel's worker thread arrive, that the slider's value
reaches the kernel, and that the one FigureWidget redraws in place. NANOKIT_SCREENSHOT=path.png stores a picture of
the panel, NANOKIT_THEME=dark takes it in the dark theme.
"""

import os
import time
from pathlib import Path

import nbformat
import pytest

from nanokit.paths import cache_dir, notebooks_dir
from notebooks import lab_browser

pytestmark = [
    pytest.mark.browser,
    pytest.mark.model,
    pytest.mark.skipif(lab_browser.why_not() is not None, reason=str(lab_browser.why_not())),
]


def smoke_copy(folder: Path) -> Path:
    """The tour without outputs, at its smallest preset, so that what is seen was made in this browser."""
    path = folder / "notebooks" / "00_tour.ipynb"
    path.parent.mkdir()
    notebook = nbformat.read(notebooks_dir() / "00_tour.ipynb", as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.source = cell.source.replace('preset: str = "quick"', 'preset: str = "smoke"')
            cell.outputs, cell.execution_count = [], None
    nbformat.write(notebook, path)
    return path


def test_run_all_move_a_slider_press_run_see_the_figure_change(default_model: Path, tmp_path: Path) -> None:
    theme = os.environ.get("NANOKIT_THEME", "light")
    environment = {"NANOKIT_HOME": str(cache_dir()), "NANOKIT_RUNS": str(tmp_path / "runs")}
    with lab_browser.JupyterLab(
        smoke_copy(tmp_path), tmp_path / "scratch", theme=theme, environment=environment
    ) as lab:
        lab.run_all()
        panel = lab.page.locator(".widget-box").filter(has=lab.page.locator(".widget-button", has_text="Run")).first
        panel.locator(".xtitle", has_text="prompts of 64 tokens").wait_for(timeout=90_000)
        lab.press("prompt tokens", "ArrowRight", times=2)
        panel.locator(".widget-button", has_text="Run").click()
        panel.locator(".xtitle", has_text="prompts of 96 tokens").wait_for(timeout=90_000)
        panel.get_by_text("Done in").wait_for()
        assert panel.locator(".xtitle").count() == 1, "a second figure was drawn instead of redrawing the first"
        panel.locator(".widget-button", has_text="Copy parameters").click()
        panel.get_by_text("nanokit run tour -p preset=smoke -p prompt_tokens=96").wait_for()
        assert not lab.errors
        if target := os.environ.get("NANOKIT_SCREENSHOT"):
            time.sleep(0.5)
            lab.screenshot(Path(target))
