"""Online: from blueprints to CUDA graphs that can be replayed."""
