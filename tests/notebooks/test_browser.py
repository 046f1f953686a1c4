"""One person's path in a real JupyterLab: open, Run All, move a slider by keyboard, Run, see the figure
change.

What only a browser can tell: that widget messages from the panel's worker thread arrive, that the slider's
value reaches the kernel, and that the one FigureWidget redraws in place. NANOKIT_SCREENSHOT=path.png stores
a picture of the notebook, NANOKIT_THEME=dark takes it in the dark theme.
"""

import os
import time
from pathlib import Path

import nbformat
import pytest

from notebooks import lab_browser

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(lab_browser.why_not() is not None, reason=str(lab_browser.why_not())),
]

EXPERIMENT = """
import time
from nanokit.lab import plots
from nanokit.lab.panel import Panel
from nanokit.lab.params import Params, experiment_params, knob
from nanokit.lab.progress import stop_if
from nanokit.lab.result import Result
from nanokit.lab.notebook_setup import setup

setup()


@experiment_params
class DepthParams(Params):
    depth: int = knob(3, "tokens guessed at once", unit="tokens", low=1, high=12)
    acceptance: float = knob(0.7, "share of guesses that hold", low=0.0, high=1.0, step=0.05)
    method: str = knob("draft", "who guesses", choices=("draft", "ngram"))
    prompt: str = knob("Tell me about the moon.", "what the model is asked")
    greedy: bool = knob(True, "always take the most likely token")


def depth_sweep(p, *, progress=None, cancel=None):
    progress and progress.start(p.depth, "guess")
    kept = []
    for step in range(p.depth):
        stop_if(cancel)
        time.sleep(0.05)
        kept.append(sum(p.acceptance**i for i in range(1, step + 2)))
        progress and progress.step()
    return Result(params=p, metrics={"accepted": kept[-1]}, samples={"accepted": kept})


def plot_depth(result):
    kept = result.samples["accepted"]
    xs = list(range(1, len(kept) + 1))
    fig = plots.lines(
        f"Depth {result.params.depth} gains {kept[-1]:.2f} tokens a pass",
        {"draft": (xs, kept), "all accepted": (xs, [float(x) for x in xs])},
        x="speculation depth (tokens)", y="accepted (tokens per pass)")
    return fig
"""

CALL = """
p = DepthParams()
panel = Panel(depth_sweep, p, plot_depth, result=depth_sweep(p), notebook="21_speculative_depth.ipynb")
panel
"""


def demo(path: Path, call: str = CALL, experiment: str = EXPERIMENT) -> Path:
    """A notebook with a cheap experiment."""
    cells = [
        nbformat.v4.new_markdown_cell("# A panel\n\nMove a slider, press **Run**."),
        nbformat.v4.new_code_cell(experiment.strip(), metadata={"jupyter": {"source_hidden": True}}),
        nbformat.v4.new_code_cell(call.strip()),
    ]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    path.parent.mkdir(exist_ok=True)
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), path)
    return path


def test_run_all_move_a_slider_press_run_see_the_figure_change(tmp_path):
    notebook = demo(tmp_path / "notebooks" / "demo.ipynb")
    theme = os.environ.get("NANOKIT_THEME", "light")
    with lab_browser.JupyterLab(notebook, tmp_path / "scratch", theme=theme) as lab:
        lab.run_all()
        lab.wait_for_title(lambda title: title.startswith("Depth 3 gains 1.53"))
        lab.press("depth", "ArrowRight", times=4)
        lab.click("Run")
        lab.wait_for_title(lambda title: title.startswith("Depth 7 gains 2.14"))
        lab.page.get_by_text("Done in").wait_for()
        lab.click("Copy parameters")
        lab.page.get_by_text("nanokit run 21_speculative_depth.ipynb -p depth=7").wait_for()
        assert len(lab.titles()) == 1, "a second figure was drawn instead of redrawing the first"
        assert not lab.errors
        if target := os.environ.get("NANOKIT_SCREENSHOT"):
            time.sleep(0.5)
            lab.screenshot(Path(target))
