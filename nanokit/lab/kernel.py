"""The kernel of a headless run: the Python that runs us, with an environment of its own.

A kernel specification on disk was rejected: the one named `python3` that Jupyter finds first may belong to
another environment, in which nanokit is not installed.
"""

import sys
from collections.abc import Mapping
from typing import Any

from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager

ARGUMENTS = [
    sys.executable,
    "-m",
    "ipykernel_launcher",
    "-f",
    "{connection_file}",
    # Else every start prints that the connection, which never leaves this machine, is not encrypted, and
    # every stop by a timeout a traceback of the kernel's own. What a cell raises is output, not a log line.
    "--log-level=CRITICAL",
]


def kernel_manager(environment: Mapping[str, str]) -> type[AsyncKernelManager]:
    """A class of kernel managers, as nbclient wants one, that start this Python with that environment."""

    class KernelManager(AsyncKernelManager):
        @property
        def kernel_spec(self) -> KernelSpec:
            return KernelSpec(argv=ARGUMENTS, display_name="Python 3", language="python")

        async def start_kernel(self, **options: Any) -> None:  # type: ignore[override] # async upstream too
            await AsyncKernelManager.start_kernel(self, env=dict(environment), **options)

    return KernelManager
