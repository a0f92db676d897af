"""Weights from a region into the layers of a module."""
