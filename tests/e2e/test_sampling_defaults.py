"""A request that leaves out a field of sampling gets the value of the checkpoint's generation_config.json."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.forked


def test_no_more_tokens_are_asked_for_than_the_context_has(
    start: Callable[..., Any], example: Path, tmp_path: Path
) -> None:
    """With a lower --max-model-len, all chats that named no length were refused."""
    model = shutil.copytree(example, tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "max_new_tokens": 2048}))
    serving = start("--model", model, "--max-model-len", "64")
    asked = {"messages": [{"role": "user", "content": "This"}], "ignore_eos": True}
    status, answer, _ = serving.request("POST", "/v1/chat/completions", asked)
    assert status == 200, answer
    assert answer["usage"]["total_tokens"] == 64
    assert serving.stop() == 0
