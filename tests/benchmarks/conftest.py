"""Fixtures of the benchmarks' tests: filled models, and the fake driver."""

from __future__ import annotations

from fake_driver import fake_cuda
from module_fixtures import filled

__all__ = ["fake_cuda", "filled"]
