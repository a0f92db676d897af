"""Large answers of instances: others are served while a gateway reads them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
import time
import tracemalloc
from collections.abc import Mapping
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from medusa_cluster.gateway.answer_memory import AnswerMemory
from medusa_cluster.gateway.call import Call
from medusa_cluster.gateway.dispatch import Dispatch
from medusa_cluster.gateway.health import Health
from medusa_cluster.gateway.large_json import LARGE_BYTES, parse, pieces, usage_of
from medusa_cluster.gateway.metrics import Metrics
from medusa_cluster.gateway.relay import Relay
from medusa_cluster.gateway.routes import READY, DeployedModel, Instance, Routes
from medusa_cluster.gateway.streaming import sse
from medusa_cluster.gateway.streaming.other_events import DivergedError
from medusa_cluster.gateway.streaming.replay import Transcript

ROUTE = "/v1/responses"


def response(tokens: int) -> dict[str, Any]:
    """The last event of a response with log-probabilities."""
    logprobs = [
        {"token": " the", "logprob": -random.random(), "bytes": [32, 116, 104, 101], "top_logprobs": []}
        for _ in range(tokens)
    ]
    item = {"id": "msg_1", "content": [{"type": "output_text", "text": " the" * tokens, "logprobs": logprobs}]}
    usage = {"input_tokens": 5, "output_tokens": tokens}
    return {"type": "response.completed", "response": {"id": "resp_1", "output": [item], "usage": usage}}


def echo(tokens: int) -> bytes:
    """A chunk with the log-probabilities of a prompt."""
    logprobs = {
        "tokens": [f" {number}" for number in range(tokens)],
        "token_logprobs": [-random.random() for _ in range(tokens)],
        "top_logprobs": [{f" {number}": -random.random()} for number in range(tokens)],
    }
    return sse.event({"choices": [{"index": 0, "text": " the" * tokens, "logprobs": logprobs}]})


class Client:
    """A client that keeps what it gets."""

    def __init__(self) -> None:
        self.got = b""

    async def begin(self, headers: Mapping[str, str]) -> None:
        pass

    async def begin_whole(self, status: int, headers: Mapping[str, str], size_bytes: int | None) -> None:
        pass

    async def send(self, data: bytes) -> None:
        self.got += data

    def cut_off(self, reason: str) -> ConnectionResetError:
        return ConnectionResetError(reason)


async def longest_pause_s(answer: bytes, kind: str) -> tuple[float, bytes, Metrics]:
    """Relay an instance's answer, and return for how long other tasks did not run, and what the client got."""
    metrics = Metrics()

    async def respond(request: web.Request) -> web.Response:
        return web.Response(body=answer, content_type=kind)

    app = web.Application()
    app.router.add_post(ROUTE, respond)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    dispatch = Dispatch(10, metrics, lambda: None)
    one = Instance("one", "n1", f"http://127.0.0.1:{runner.addresses[0][1]}", READY)
    dispatch.update(Routes("1", {"m": DeployedModel("m", {}, (one,))}))
    longest = 0.0

    async def note_pauses() -> None:
        nonlocal longest
        before = time.monotonic()
        while True:
            await asyncio.sleep(0.001)
            longest, before = max(longest, time.monotonic() - before), time.monotonic()

    pauses = asyncio.create_task(note_pauses())
    client = Client()
    async with aiohttp.ClientSession() as session:
        relay = Relay(session, {}, dispatch, Health(session, {}, dispatch), metrics, 30.0)
        with AnswerMemory(1 << 30).share() as share:
            whole = await relay.run(Call(ROUTE, "m", b"{}", 1.0, {}), client, time.monotonic(), share)
    pauses.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await pauses
    await runner.cleanup()
    return longest, client.got if whole is None else bytes(whole.body), metrics


def test_others_are_served_while_a_large_event_is_read() -> None:
    event = echo(200_000)
    stream = event + sse.DONE
    transcript = Transcript()
    transcript.begin()
    began = time.monotonic()
    transcript.take(event, event[len(b"data: ") : -2])
    all_s = time.monotonic() - began
    pause_s, got, _ = asyncio.run(longest_pause_s(stream, "text/event-stream"))
    assert got == stream
    assert pause_s < 0.5 * all_s


def test_others_are_served_while_the_tokens_of_a_large_answer_are_counted() -> None:
    answer = json.dumps(response(500_000)["response"], separators=(",", ":")).encode()
    began = time.monotonic()
    json.loads(answer)
    all_s = time.monotonic() - began
    pause_s, got, metrics = asyncio.run(longest_pause_s(answer, "application/json"))
    assert got == answer
    assert pause_s < 0.5 * all_s
    assert metrics.of("m").tokens == 500_000


def test_the_large_last_events_of_a_response_are_compared_without_being_parsed() -> None:
    logprobs = response(80_000)["response"]["output"][0]["content"]

    def events(run: str, text: str = "a") -> list[tuple[bytes, bytes]]:
        head = {"id": f"resp_{run}", "created_at": len(run), "completed_at": None}
        item = {"id": f"msg_{run}", "content": logprobs, "text": text}
        values = [
            {"type": "response.created", "response": head},
            {"type": "response.output_item.added", "item": {"id": f"msg_{run}"}},
            {"type": "response.output_item.done", "item": item},
            {"type": "response.completed", "response": {**head, "completed_at": 2 * len(run), "output": [item]}},
        ]
        datas = [json.dumps(value, separators=(",", ":")).encode() for value in values]
        return [
            (b"event: %s\ndata: %s\n\n" % (str(value["type"]).encode(), data), data)
            for value, data in zip(values, datas, strict=True)
        ]

    transcript = Transcript()
    transcript.begin()
    first = events("first")
    assert [transcript.take(*event) for event in first[:3]] == [raw for raw, _ in first[:3]]
    transcript.begin()
    *known, last = [transcript.take(*event) for event in events("second one")]
    assert known == [None] * 3
    assert last == first[3][0].replace(b'"created_at":5,"completed_at":10', b'"created_at":10,"completed_at":20')
    transcript.begin()
    assert [transcript.take(*event) for event in events("third")] == [None] * 4
    transcript.begin()
    others = events("fourth", "b")
    assert [transcript.take(*event) for event in others[:2]] == [None, None]
    with pytest.raises(DivergedError):
        transcript.take(*others[2])
    tracemalloc.start()
    Transcript().take(*first[3])
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 4 * len(first[3][0])


def test_another_thread_runs_while_a_large_text_is_parsed_and_written() -> None:
    data = json.dumps(response(100_000)).encode()
    ended = threading.Event()

    def work() -> None:
        for _ in pieces(parse(data)):
            pass
        ended.set()

    turns = 0
    thread = threading.Thread(target=work)
    thread.start()
    while not ended.is_set():
        time.sleep(0.001)
        turns += 1
    thread.join()
    assert turns > 10


@pytest.mark.parametrize("tokens", [0, 3, 5000])
def test_large_texts_are_read_and_written_as_others(tokens: int) -> None:
    value = response(tokens)
    data = json.dumps(value).encode()
    assert (len(data) > LARGE_BYTES) == (tokens == 5000)
    assert parse(data) == value
    assert "".join(pieces(value)) == json.dumps(value, sort_keys=True)


@pytest.mark.parametrize("value", [{}, [], "é", [[], {}, [{}]], {"b": [1, [2.5, None]], "a": {"d": True, "c": "\\"}}])
def test_any_value_is_written_in_pieces(value: object) -> None:
    assert "".join(pieces(value)) == json.dumps(value, sort_keys=True)


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_the_usage_at_the_end_of_a_large_answer_is_found(separators: tuple[str, str]) -> None:
    body = {"output": "a" * LARGE_BYTES, "usage": {"input_tokens": 5}}
    for text in ("", '"usage":{"input_tokens":7}', "\\" + '"usage":7', "é" * 2000):
        assert usage_of(json.dumps(body | {"text": text}, separators=separators).encode()) == {"input_tokens": 5}
    with pytest.raises(ValueError, match="expected usage"):
        usage_of(json.dumps(body | {"text": "a" * LARGE_BYTES}, separators=separators).encode())
