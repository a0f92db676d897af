"""Our cold starts, measured in turn with transformers, unmodified vLLM and yardsticks, with one model and prompt."""
