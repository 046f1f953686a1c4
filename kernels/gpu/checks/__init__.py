"""The parts of `python -m nanokit.kernels.gpu.check`: cases, timing, offsets, compile reports, tuning.

A program beside the backend and no part of it: nothing but gpu/check.py imports this package. It alone may look at
floors above the kernels (a model to run as a whole, the noise of draws, the machine card), and does so in the functions
that need them.
"""
