"""A state bundle as files in a store: its manifest and blobs, written, found, signed and read."""
