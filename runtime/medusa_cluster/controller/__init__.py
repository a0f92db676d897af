"""The one place that decides what the cluster does next. Everything goes on serving while it is away."""
