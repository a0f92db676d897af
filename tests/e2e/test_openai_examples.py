"""The official client's examples, unchanged, with the torch engine. With vLLM: test_vllm_layer.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import openai_examples
import pytest

pytestmark = pytest.mark.forked


def test_the_official_clients_examples_run(start: Callable[..., Any], example: Path) -> None:
    serving = start("--model", example)
    url = f"http://127.0.0.1:{serving.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", timeout=60, max_retries=0) as client:
        for shown in (*openai_examples.GENERATING, *openai_examples.RESPONDING):
            shown(client, client.models.list().data[0].id)
    assert serving.stop() == 0
