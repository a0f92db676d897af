"""Commands for the code of a function: `medusa new`, `run` and `build`."""
