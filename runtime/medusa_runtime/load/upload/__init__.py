"""Weights on their way into the memory of a device."""
