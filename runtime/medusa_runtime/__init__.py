"""The cold start: fetch, load, run. Knows nothing of HTTP, platforms or user code."""
