"""The GPU backend: Triton kernels with the contract of kernels/reference.py."""
