"""OpenAI's own client of the function that a test module serves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, serve_module: Callable[..., Any]) -> Any:
    """One server for all tests of a file, with the file's TEMPLATE for chats."""
    served = serve_module(files={"chat_template.jinja": request.module.TEMPLATE})
    served.wait_ready()
    return served


@pytest.fixture
def client(served: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none", max_retries=0) as client:
        yield client
