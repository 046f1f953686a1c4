"""Figures: the house style, and one function an experiment that draws its result."""

from nanokit.lab.plots.activation_plot import activation_cost
from nanokit.lab.plots.alignment_plot import load, loads, shifted
from nanokit.lab.plots.context_plot import by_context, by_position
from nanokit.lab.plots.digits_plot import digits
from nanokit.lab.plots.drift_plot import (
    drift_damage,
    drift_first,
    drift_mode,
    drift_points,
    drift_profile,
    drift_ratios,
    drift_speed,
    drift_vanishing,
)
from nanokit.lab.plots.gradient_plot import adapter_losses, adapters, qat, small_layer, training
from nanokit.lab.plots.house import (
    GREY,
    GRID,
    HEIGHT,
    METHODS,
    PALETTE,
    WIDTH,
    bars,
    color,
    figure,
    lines,
    mark,
    show,
)
from nanokit.lab.plots.kernels_plot import backends, gains, promises, rounding
from nanokit.lab.plots.noise_plot import noise, warmup
from nanokit.lab.plots.product_plot import product
from nanokit.lab.plots.quality_plot import quality_pareto
from nanokit.lab.plots.range_plot import damage, one_matrix, outputs, spread
from nanokit.lab.plots.roofline_plot import roofline, streaming, verification
from nanokit.lab.plots.step_plot import step_cost
from nanokit.lab.plots.tour_plot import tour
from nanokit.lab.plots.trap_plot import trap, trap_detectors, trap_gates, trap_positions, trap_undone

__all__ = [
    "GREY",
    "GRID",
    "HEIGHT",
    "METHODS",
    "PALETTE",
    "WIDTH",
    "activation_cost",
    "adapter_losses",
    "adapters",
    "backends",
    "bars",
    "by_context",
    "by_position",
    "color",
    "damage",
    "digits",
    "drift_damage",
    "drift_first",
    "drift_mode",
    "drift_points",
    "drift_profile",
    "drift_ratios",
    "drift_speed",
    "drift_vanishing",
    "figure",
    "gains",
    "lines",
    "load",
    "loads",
    "mark",
    "noise",
    "one_matrix",
    "outputs",
    "product",
    "promises",
    "qat",
    "quality_pareto",
    "roofline",
    "rounding",
    "shifted",
    "show",
    "small_layer",
    "spread",
    "step_cost",
    "streaming",
    "tour",
    "training",
    "trap",
    "trap_detectors",
    "trap_gates",
    "trap_positions",
    "trap_undone",
    "verification",
    "warmup",
]
