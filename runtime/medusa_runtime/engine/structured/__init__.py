"""Structured outputs: a grammar limits the text, by masking the tokens that must not come next."""
