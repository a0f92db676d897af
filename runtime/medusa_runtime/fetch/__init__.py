"""From an object store into a region."""
