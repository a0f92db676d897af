"""The simulator: a cluster on simpy's clock, with the real policy, and the papers' hardware and baselines."""
