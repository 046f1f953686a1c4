"""Reading GGUF files: a verified, memory-mapped reader of our own."""
