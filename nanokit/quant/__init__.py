"""Number formats of weights: block layouts, canonical codes and their values."""
