"""The engine of a function that has none: a model that a cluster serves, through a gateway."""
