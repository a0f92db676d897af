"""The parts that models are made of: projections, norms, positions, activations, attention without a cache, pooling."""
