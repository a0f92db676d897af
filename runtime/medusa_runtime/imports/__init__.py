"""Imports of other people's packages: in one thread at a time, and only as far as they are used."""
