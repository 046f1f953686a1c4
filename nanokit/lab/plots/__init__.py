"""Figures: the house style, and one function an experiment that draws its result."""

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
from nanokit.lab.plots.tour_plot import tour

__all__ = [
    "GREY",
    "GRID",
    "HEIGHT",
    "METHODS",
    "PALETTE",
    "WIDTH",
    "bars",
    "color",
    "figure",
    "lines",
    "mark",
    "show",
    "tour",
]
