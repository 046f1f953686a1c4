"""KV memory: block pool, prefix cache and the pages that hold keys and values."""
