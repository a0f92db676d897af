"""Fetches of one object by our prefetcher, by sockets alone and by other packages, from the same store."""
