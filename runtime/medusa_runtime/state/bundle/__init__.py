"""A state bundle's files in a store: writing, finding, signing and reading its manifest and blobs."""
