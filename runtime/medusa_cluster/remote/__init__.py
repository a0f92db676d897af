"""The engine of a function without a model of its own: it uses one that a cluster serves, through a gateway."""
