"""Requests, scheduling, sampling: continuous batching over ragged batches."""
