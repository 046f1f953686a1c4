"""Busy neighbours: processes that compute and nothing else, to see what an engine keeps of its speed beside them.

A process for each, because threads of this interpreter would wait for its lock. A neighbour ends when it is killed at
the end of the `with` block, an interrupt included, and by itself once its parent is gone (a parent that was killed has
no last word). Rejected: `stress` tools (one more thing to install), and a fixed run time (it would end in the middle of
a phase on a slow machine).
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

BUSY = """
import os, sys
parent = int(sys.argv[1])
print("busy", flush=True)
while os.getppid() == parent:
    for number in range(100_000):
        number * number
"""


@contextmanager
def neighbours(count: int) -> Iterator[list[int]]:
    """Run `count` busy processes; gives their process ids once all of them compute."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            command = [sys.executable, "-I", "-c", BUSY, str(os.getpid())]
            running.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        for process in running:
            assert process.stdout is not None
            process.stdout.readline()
        yield [process.pid for process in running]
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.communicate()
