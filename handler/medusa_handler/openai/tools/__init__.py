"""Tool calls: what a request offers and forces, and the calls in a model's text."""
