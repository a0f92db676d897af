"""vLLM's compiled model: recorded offline, attached online."""
