"""What the cluster should do next: pure functions over frozen dataclasses. No Ray, no clock, no I/O."""
