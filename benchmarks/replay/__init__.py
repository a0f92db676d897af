"""A benchmark that replays traces on real processes, and compares the measurements with the simulator's figures."""
