"""GGUF files: a verified, memory-mapped reader of our own, a writer, broken copies and what can be mended in them."""
