"""OpenAI's HTTP interface, as its clients and vLLM's users know it."""
