"""What quantization costs in quality: divergence from a reference on a fixed text, tasks, one setting as a whole."""
