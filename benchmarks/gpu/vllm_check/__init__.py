"""Run 5 of the check: our vLLM worker, with whatever vLLM is importable."""
