"""vLLM on a GPU."""
