"""Experiments, panels, plots, run records and notebook runs."""
