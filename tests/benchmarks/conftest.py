"""Fixtures of tests that fill the models of the benchmarks."""

from __future__ import annotations

from module_fixtures import filled

__all__ = ["filled"]
