"""A trace replayed on real processes, and the simulator's answer beside what was measured."""
