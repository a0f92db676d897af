"""What the platforms are told of a function: rendered as plain values, checked before anything is applied."""
