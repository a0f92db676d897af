"""Weights between nodes: the regions that a node offers to its peers, who may read them, and at which pace."""
