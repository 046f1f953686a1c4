"""nanokit: a Jupyter-first research kit for making large language models run fast on the hardware you have.

    import nanokit
    engine = nanokit.load("model.gguf")
    print(engine.generate(["The moon is"], nanokit.Sampling(max_tokens=40))[0].text)

The names below are looked up on first use: `import nanokit` costs neither torch nor transformers.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "load": "nanokit.engine.load",
    "Engine": "nanokit.engine.engine",
    "EngineConfig": "nanokit.engine.engine",
    "Sampling": "nanokit.engine.sampling",
    "NanokitError": "nanokit.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(["__version__", *_HOME])
