"""Kernel backends behind one contract: `reference` is plain torch."""
