"""Experiments, panels, plots, run records and notebook runs.

The public names below are looked up on first use: a notebook writes `from nanokit import lab` and
`lab.Params`, and importing the package still costs neither torch, papermill, plotly nor ipywidgets.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "Params": "params",
    "experiment_params": "params",
    "knob": "params",
    "Result": "result",
    "Table": "table",
    "machine_card": "machine",
    "measure_bandwidth": "machine",
    "measuring": "lock",
    "record": "records",
    "setup": "notebook_setup",
    "Panel": "panel",
    "LivePanel": "live",
    "check": "exercises",
    "tour": "experiments.tour",
    "TourParams": "experiments.tour",
    "TuningParams": "experiments.tuning",
    "TuningStepper": "experiments.tuning",
    "RooflineParams": "experiments.roofline",
    "noise": "experiments.noise",
    "roofline": "experiments.roofline",
    "activation_cost": "experiments.activation_cost",
    "StepParams": "experiments.step_cost",
    "step_cost": "experiments.step_cost",
    "ProductParams": "experiments.product",
    "product": "experiments.product",
    "KernelsParams": "experiments.kernel_params",
    "worked_product": "experiments.worked_product",
    "promises": "experiments.promises",
    "gains": "experiments.gains",
    "packing": "experiments.packing",
    "rounding": "experiments.rounding",
    "BackendsParams": "experiments.backends",
    "backends": "experiments.backends",
    "AlignmentParams": "experiments.alignment_params",
    "LoadParams": "experiments.loads",
    "load": "experiments.loads",
    "loads": "experiments.loads",
    "padding": "experiments.padding",
    "shifted": "experiments.shifted",
    "straddling": "experiments.alignment_params",
    "ContextParams": "experiments.quality_in_context",
    "quality_in_context": "experiments.quality_in_context",
    "together": "result",
    "decode": "bench.decode",
    "DecodeParams": "bench.decode",
    "prefill": "bench.prefill",
    "PrefillParams": "bench.prefill",
    "batch": "bench.batch",
    "BatchParams": "bench.batch",
    "verify_cost": "bench.verify_cost",
    "VerifyCostParams": "bench.verify_cost",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
