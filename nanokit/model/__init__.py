"""Model configuration, tokenizer, weights and the one ragged forward."""
