"""The command `medusa`."""
