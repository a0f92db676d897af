"""The offline part: make blueprints of captured CUDA graphs."""
