"""vLLM's own HTTP server over our running engine: every route and parameter of ``vllm serve``."""
