"""One machine of a cluster: its node server, and the thin Ray actor in front of it."""
