"""The CPU backend: C kernels, compiled by the machine's own compiler at first use and called through ctypes."""
