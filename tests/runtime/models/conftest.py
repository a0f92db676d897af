"""Fixtures of tests that fill a model."""

from __future__ import annotations

from module_fixtures import filled

__all__ = ["filled"]
