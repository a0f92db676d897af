"""The online part: make CUDA graphs that can be replayed from blueprints."""
