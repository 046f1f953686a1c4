"""`setup()`: the first line of every notebook.

It makes outputs the same on every machine and in every run, so that a committed notebook can be compared
with a fresh one: no progress bars that remember a speed, no warnings that carry a path or a process id.
"""

import os
import sys
import warnings


def setup() -> None:
    """Prepare this kernel for a notebook of the kit; silent, and harmless when called twice.

    - A figure at the end of a cell is stored with a PNG beside it, as `plots.show` does.
    - Hugging Face's progress bars are off, and its tokenizers do not warn about forks.
    - A warning is printed as one line without the file it came from; none is hidden.

    It sets no thread count, no default device and no gradient mode: widget callbacks run in other threads,
    where such settings do not hold, so engines take them explicitly.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    if "huggingface_hub" in sys.modules:  # imported before: it has read the variable already
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
    warnings.formatwarning = _one_line
    _use_renderer()


def _one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return f"{category.__name__}: {message}\n"


def _use_renderer() -> None:
    import plotly.graph_objects as go
    import plotly.io as pio
    from plotly.io.base_renderers import MimetypeRenderer

    from nanokit.lab import pictures

    class WithPicture(MimetypeRenderer):
        """Plotly's JSON, a PNG where there is a browser, and the summary."""

        def to_mimebundle(self, fig_dict: dict[str, object]) -> dict[str, object]:
            return pictures.bundle(go.Figure(fig_dict, skip_invalid=True))[0]

    pio.renderers["nanokit"] = WithPicture()
    pio.renderers.default = "nanokit"
