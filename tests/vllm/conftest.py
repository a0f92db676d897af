"""Fixtures for tests that run an engine, or its graphs on the fake driver."""

from __future__ import annotations

from engine_fixtures import checkpoint, make_checkpoint, serve, serve_region
from fake_driver import fake_cuda

__all__ = ["checkpoint", "fake_cuda", "make_checkpoint", "serve", "serve_region"]
