"""Parts of models: projections, norms, positions, activations, attention without a cache, and pooling."""
