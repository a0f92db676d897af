"""The benchmark of a cluster. Each module of this folder measures rows of its own."""
