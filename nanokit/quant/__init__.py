"""Number formats of weights, and the layers that hold and train them.

    from nanokit import quant
    quant.apply(model, "int4-sym-g64")      # any torch module with Linear or Conv2d layers, in place

The functions below are looked up on first use: reading a model file needs formats and no torch modules.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "apply": "modules",
    "prepare": "modules",
    "convert": "modules",
    "QuantLinear": "layers",
    "FakeQuantLinear": "layers",
    "QuantConv2d": "conv",
    "FakeQuantConv2d": "conv",
    "prune": "pruning",
    "LoraLinear": "lora",
    "add_lora": "lora",
    "merge": "lora",
    "unmerge": "lora",
    "parse_policy": "policy",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
