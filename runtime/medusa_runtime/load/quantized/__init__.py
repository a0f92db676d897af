"""Quantized checkpoints: how their weights are stored, and the floats that they stand for."""
