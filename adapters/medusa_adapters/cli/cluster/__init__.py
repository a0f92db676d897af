"""`medusa cluster`: run many machines as one."""
