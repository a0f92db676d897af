"""Bodies that do not fit a route of vLLM's server: one wrong item is enough. In processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

_PLAIN = """
import json
from medusa_vllm.serving.fail_fast import fail_fast_in_collections
fail_fast_in_collections()
fail_fast_in_collections()
from pydantic import BaseModel, ValidationError
class Item(BaseModel):
    a: int
    b: int
class Body(BaseModel):
    items: str | list[Item | list[int]]
    names: dict[str, int] = {}
    pair: tuple[int, ...] = ()
def errors(**body):
    try:
        return len(Body(**body).items)
    except ValidationError as error:
        return -error.error_count()
good = [{"a": 1, "b": 2}, [3]] * 50
print(json.dumps([errors(items=good, names={"x": 1}, pair=(1, 2)), errors(items=[{}] * 5000),
    errors(items="", names=dict.fromkeys(map(str, range(5000)), "x")), errors(items="", pair=["x"] * 5000)]))
"""
_VLLM = """
import json
from medusa_runtime.config import Settings
from medusa_vllm.imports import preimport
preimport(Settings(engine="vllm", model="m"))
from pydantic import ValidationError
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
found = []
for item in (0, {"type": "message"}):
    try:
        ResponsesRequest.model_validate({"model": "m", "input": [item] * 1000})
    except ValidationError as error:
        found.append(error.error_count())
print(json.dumps(found))
"""


def run(script: str) -> Any:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_list_is_wrong_at_its_first_wrong_item() -> None:
    good, items, names, pair = run(_PLAIN)
    assert good == 100
    assert -5 < items < 0
    assert (names, pair) == (-1, -1)


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_a_body_of_many_wrong_items_has_few_errors() -> None:
    assert max(run(_VLLM)) < 1000
