"""A request that moves to another engine goes on as if nothing had happened."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.engine.torch.migration import ExportedRequest
from medusa_runtime.errors import RequestError

PARAMS = (
    {},
    {"temperature": 1.0, "seed": 9},
    {"temperature": 1.0, "top_p": 0.9, "seed": 9, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
    {"stop": ("\x00\x01",), "stop_token_ids": (3,), "logit_bias": {5: 1.0}, "skip_special_tokens": False},
)


def move(source: Any, target: Any, answer: Any) -> Any:
    """The header goes through JSON, as it would over a socket."""
    exported = source.engine.export_request(answer.id)
    travelled = ExportedRequest(json.loads(json.dumps(exported.header)), exported.tensors)
    while not answer.incoming.empty():
        answer.next()
    target.engine.import_request(travelled, answer.incoming.put)
    return exported


@pytest.mark.parametrize("params", PARAMS)
def test_it_continues_identically(serve: Any, params: dict[str, Any]) -> None:
    first, second = serve(), serve()
    prompt = "日本語 😀 Tokens flow from storage to memory, " * 2
    expected = first.ask(prompt, max_tokens=60, **params)
    expected.wait()
    moving = first.ask(prompt, max_tokens=60, **params)
    for _ in range(7):
        moving.next()
    exported = move(first, second, moving)
    assert exported.tensors[0].shape[2] == exported.header["computed"] == len(exported.header["tokens"]) - 1
    for engine, other in ((second, first), (first, second)):
        if moving.deltas[-1].finish_reason is None:
            moving.next()
            move(engine, other, moving)
    assert moving.tokens == expected.tokens
    assert moving.text == expected.text
    assert moving.last == expected.last._replace(request_id=moving.id)
    assert first.engine.stats()["kv_tokens_used"] == second.engine.stats()["kv_tokens_used"] == 0


def test_the_keys_and_values_are_used_not_recomputed(serve: Any) -> None:
    first, second = serve(), serve()
    moving = first.ask([7] * 100, max_tokens=20)
    moving.next()
    move(first, second, moving)
    moving.wait()
    assert second.engine.stats()["steps_total"] <= 19
    assert second.engine.stats()["prompt_tokens_total"] == 0


def test_a_full_engine_takes_it_and_recomputes(serve: Any) -> None:
    first, second = serve(), serve(kv_cache_mb=1)
    expected = first.ask([7] * 100, max_tokens=20).tokens
    filling = [second.ask([9] * 400, max_tokens=100) for _ in range(2)]
    for answer in filling:
        answer.next()
    moving = first.ask([7] * 100, max_tokens=20)
    moving.next()
    move(first, second, moving)
    assert moving.tokens == expected
    assert all(answer.last.finish_reason == "length" for answer in filling)


def test_what_does_not_fit_is_refused(serve: Any, tmp_path: Path, make_checkpoint: Callable[..., Path]) -> None:
    served = serve()
    other = serve(make_checkpoint(tmp_path, num_hidden_layers=2))
    with pytest.raises(RequestError, match="id of a running request, found 'nobody'"):
        served.engine.export_request("nobody")
    answer = served.ask([7] * 20, max_tokens=400)
    answer.next()
    exported = served.engine.export_request(answer.id)
    with pytest.raises(RequestError, match="must run one model"):
        other.engine.import_request(exported, answer.incoming.put)
    with pytest.raises(RequestError, match="expected version 1"):
        served.engine.import_request(ExportedRequest({"version": 2}, ()), answer.incoming.put)
    with pytest.raises(RequestError, match=r"expected one torch\.float32 tensor of"):
        served.engine.import_request(ExportedRequest(exported.header, ()), answer.incoming.put)
