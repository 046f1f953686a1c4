"""A pytest plugin for runs under a sanitizer, which compiles and computes many times slower: fewer examples of each
property, and of the variants only the one that NANOKIT_CPU_KERNELS names."""

import os
from typing import Any

import hypothesis

from nanokit.kernels.cpu.compiler import VARIANTS

EXAMPLES = 2

_whole = hypothesis.settings.__init__


def _few(self: hypothesis.settings, *parents: Any, **options: Any) -> None:
    _whole(self, *parents, **options | {"max_examples": EXAMPLES})


hypothesis.settings.__init__ = _few  # type: ignore[method-assign]
for other in VARIANTS.keys() - {os.environ["NANOKIT_CPU_KERNELS"]}:
    del VARIANTS[other]
