"""The policy decides what the cluster does next: pure functions over frozen dataclasses, with no clock and no I/O."""
