"""vLLM behind our engine protocol: its scheduler, kernels and models; our start, weights and socket."""
