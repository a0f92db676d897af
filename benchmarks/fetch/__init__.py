"""A benchmark of fetches: our prefetcher, bare sockets and other packages fetch one object from the same store."""
