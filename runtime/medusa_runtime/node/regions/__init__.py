"""The agent's regions. Each is filled once on a node, and kept at least while it is used."""
