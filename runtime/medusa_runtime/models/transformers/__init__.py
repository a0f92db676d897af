"""Architectures without a family of ours: modules of transformers, with our skeleton, loader, cache and scheduler."""
