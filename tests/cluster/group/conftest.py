"""Fixtures of tests that run groups of workers."""

from __future__ import annotations

from engine_fixtures import checkpoint, make_checkpoint, serve, serve_region
from group_fixtures import group

__all__ = ["checkpoint", "group", "make_checkpoint", "serve", "serve_region"]
