"""Whether a person is there: to press a button, or to be told that something is busy.

`nanokit run` says so with NANOKIT_HEADLESS=1. papermill, nbconvert and nbval say it through the kernel protocol: their
cells are sent as taking no input. Nothing else marks an executed notebook reliably.
"""

import os


def unattended() -> bool:
    """True under `nanokit run` and in cells that a program executes. NANOKIT_HEADLESS=0 overrides (Voila)."""
    said = os.environ.get("NANOKIT_HEADLESS")
    return _takes_no_input() if said is None else said != "0"


def headless() -> bool:
    """True where no widget makes sense: unattended, and under pytest."""
    return unattended() or ("NANOKIT_HEADLESS" not in os.environ and "PYTEST_CURRENT_TEST" in os.environ)


def _takes_no_input() -> bool:
    from IPython.core.getipython import get_ipython

    kernel = getattr(get_ipython(), "kernel", None)
    request = kernel.get_parent("shell") if kernel is not None else {}
    return request.get("content", {}).get("allow_stdin") is False
