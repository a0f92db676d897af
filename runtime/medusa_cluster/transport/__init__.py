"""Bytes between nodes: a node's regions as its peers read them, who may, and at which pace."""
