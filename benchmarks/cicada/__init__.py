"""Cicada's evaluation (§4, §5): cold inferences of whole models under five strategies, side by side."""
