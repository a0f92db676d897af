"""Fixtures of tests that load from a region."""

from __future__ import annotations

from fake_copies import fake, fake_library, link
from region_fixtures import filling

__all__ = ["fake", "fake_library", "filling", "link"]
