"""Structured outputs: text that a grammar allows, by masks of the tokens that may come next."""
