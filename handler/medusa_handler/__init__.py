"""The contract with user code and the server that calls it."""
