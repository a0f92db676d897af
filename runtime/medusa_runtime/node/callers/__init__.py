"""The agent's callers: the process behind a connection, what it may have, and reading files with its rights."""
