"""Offline: from captured CUDA graphs to blueprints."""
