"""Fetch a checkpoint from an object store into a region."""
