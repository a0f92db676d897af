"""A checkpoint for vLLM: its weights out of the region, and its small files as a folder."""
