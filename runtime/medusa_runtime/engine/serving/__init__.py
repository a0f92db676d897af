"""What every engine does with a request: check it, tokenize it, follow it to its end."""
