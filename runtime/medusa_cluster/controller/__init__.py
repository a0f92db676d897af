"""The controller, which alone decides what the cluster does next. Models are served on while it is away."""
