"""The contract with user code: loading it, calling it, and what it is given."""
