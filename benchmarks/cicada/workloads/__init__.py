"""The models that are measured, whole and as lists of layers, with checkpoints of their true shapes."""
