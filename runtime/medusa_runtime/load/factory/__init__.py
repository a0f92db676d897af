"""Modules that a user's factory makes: constructed without weights, and filled while they are already in use."""
