"""The first two minutes on a GPU: small graphs through every step of materializing and restoring them."""
