"""From an HTTP request to the user's function and back."""
