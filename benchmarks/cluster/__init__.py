"""What a cluster reaches: rows that each module of this folder measures by itself."""
