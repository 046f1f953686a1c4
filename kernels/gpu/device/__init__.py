"""What runs on the GPU: Triton's own language, one file beside each file of kernels/gpu."""
