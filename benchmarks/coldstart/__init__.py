"""Cold starts of ours in turn with transformers, vLLM as it is, and yardsticks, on one checkpoint and prompt."""
