"""The handling of requests that all engines share: checks, tokenization, tokens to text, stop strings, the end."""
