"""A cluster on a simulated clock: the product's policy, the papers' hardware and baselines. On simpy."""
