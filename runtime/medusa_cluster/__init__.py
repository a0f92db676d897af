"""Many machines: weights travel between nodes, and models scale with their load. On Ray, which this does not import."""
