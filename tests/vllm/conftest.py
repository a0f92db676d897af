"""Fixtures for tests that run an engine, or its graphs on the fake driver."""

from __future__ import annotations

import logging

import pytest
from engine_fixtures import checkpoint, make_checkpoint, serve, serve_region
from fake_copies import fake, fake_library, link
from fake_driver import fake_cuda
from region_fixtures import filling
from vllm_gpu_parts import manager, parts


@pytest.fixture(autouse=True)
def warnings_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Undo what an earlier test's import of vLLM's server did: it lets the root logger take errors alone."""
    caplog.set_level(logging.WARNING)


__all__ = [
    "checkpoint",
    "fake",
    "fake_cuda",
    "fake_library",
    "filling",
    "link",
    "make_checkpoint",
    "manager",
    "parts",
    "serve",
    "serve_region",
    "warnings_are_logged",
]
