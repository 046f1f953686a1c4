"""nanokit: a Jupyter-first research kit for making large language models run fast on the hardware you have."""

__version__ = "0.1.0"
