"""The agent's warm engine processes."""
