"""Imports of third-party packages: in one thread at a time, and only the parts that are used."""
