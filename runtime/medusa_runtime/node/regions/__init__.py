"""The agent's regions: filled once a node, and kept while they are used."""
