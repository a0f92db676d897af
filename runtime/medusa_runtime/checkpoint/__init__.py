"""Checkpoint formats: which tensors a checkpoint has, and where their bytes are."""
