"""Fixtures of tests that fetch into a region."""

from __future__ import annotations

from region_fixtures import filling

__all__ = ["filling"]
