"""The benchmark of a cluster: each module of this folder measures rows of its own."""
