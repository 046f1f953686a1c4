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
    "header_remedy": "experiments.header_remedy",
    "padding": "experiments.padding",
    "shifted": "experiments.shifted",
    "straddling": "experiments.alignment_params",
    "ContextParams": "experiments.quality_in_context",
    "quality_in_context": "experiments.quality_in_context",
    "RangeParams": "experiments.range_params",
    "MatrixParams": "experiments.one_matrix",
    "one_matrix": "experiments.one_matrix",
    "matrix_figure": "experiments.one_matrix",
    "spread": "experiments.spread",
    "damage": "experiments.damage",
    "scale_cost": "experiments.scale_cost",
    "range_verdicts": "experiments.range_verdicts",
    "DriftParams": "experiments.drift_params",
    "drift_profile": "experiments.drift_profile",
    "drift_damage": "experiments.drift_damage",
    "drift_points": "experiments.drift_points",
    "drift_export": "experiments.drift_export",
    "statements_q12": "experiments.drift_verdicts",
    "table_q12": "experiments.drift_verdicts",
    "verdict_q12": "experiments.drift_verdicts",
    "verdict_q13": "experiments.drift_verdicts",
    "ModeParams": "experiments.drift_mode",
    "drift_mode": "experiments.drift_mode",
    "QualityParams": "quality.params",
    "measure_quality": "quality.measure",
    "GradientParams": "experiments.gradient_params",
    "SmallLayerParams": "experiments.small_layer",
    "small_layer": "experiments.small_layer",
    "DigitsParams": "experiments.digits",
    "digits": "experiments.digits",
    "five_numbers": "experiments.one_grid",
    "passing": "experiments.one_grid",
    "one_grid": "experiments.one_grid",
    "qat": "experiments.qat",
    "adapters": "experiments.adapters",
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
