"""Does a GGUF file say what its model is? Structure, meaning, numbers, behaviour, and a comparison with its source."""
