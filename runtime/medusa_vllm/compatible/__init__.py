"""A mode for versions of vLLM whose inner parts are unknown: vLLM's own server and processes, by public API only."""
