"""Architectures that have no family here: modules of transformers, on our skeleton, loader, cache and scheduler."""
