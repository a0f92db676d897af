"""The connections between the workers of a group, and the messages on them."""
