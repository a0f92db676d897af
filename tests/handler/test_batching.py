"""`@batch`: concurrent requests reach the user's function as one list."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from medusa_handler import batch
from medusa_handler.deadline import Deadline
from medusa_handler.disconnection import current_disconnect_check
from medusa_handler.faults import ApiError
from medusa_handler.user_code.loop import EventLoop

Serve = Callable[..., Any]
TEXT = {"Content-Type": "text/plain"}


def all_at_once(served: Any, bodies: list[Any], headers: dict[str, str] | None = None) -> list[tuple[int, Any]]:
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: served.request("POST", "/", body, headers)[:2], bodies))


def test_requests_that_come_together_are_one_batch(serve: Serve) -> None:
    served = serve(handler="batched/handler.py")
    served.wait_ready()
    found = all_at_once(served, [b"0", b"1", b"2", b"3"], TEXT)
    assert [answer["text"] for _, answer in found] == ["0", "1", "2", "3"]
    assert max(answer["size"] for _, answer in found) > 1
    many = all_at_once(served, [str(n).encode() for n in range(11)], TEXT)
    assert [answer["text"] for _, answer in many] == [str(n) for n in range(11)]
    assert max(answer["size"] for _, answer in many) == 4
    assert served.request("POST", "/", b"alone", TEXT)[1] == {"size": 1, "text": "alone"}


def test_an_error_among_the_results_is_its_callers_own(serve: Serve) -> None:
    served = serve(handler="batched/handler.py")
    served.wait_ready()
    found = all_at_once(served, [b"tea", b"coffee", b"milk", b"water"], TEXT)
    assert [status for status, _ in found] == [200, 418, 200, 200]
    assert found[1][1] == {"error": "no coffee"}


def test_an_asynchronous_function_is_given_batches_of_its_type(serve: Serve) -> None:
    served = serve(handler="batched/handler.py:later")
    served.wait_ready()
    found = all_at_once(served, [{"number": n} for n in range(7)])
    assert [answer["number"] for _, answer in found] == list(range(7))
    assert max(answer["size"] for _, answer in found) in (2, 3)
    assert served.request("POST", "/", [1])[0] == 422


CASES = [
    ("short", 500, "one for each request"),
    ("broken", 409, ""),
    ("lazy", 500, "invalid literal for int"),
    ("lazy_later", 500, "invalid literal for int"),
    ("one_text", 500, "expected a list of results, found str"),
    ("leaving", 500, "enough"),
]


@pytest.mark.parametrize(("name", "status", "text"), CASES)
def test_what_fails_fails_for_the_batch(serve: Serve, name: str, status: int, text: str) -> None:
    served = serve(handler=f"batched/handler.py:{name}")
    served.wait_ready()
    for _ in range(2):  # the first failure must not keep the next batch from running
        assert [found for found, _ in all_at_once(served, [b"a", b"b"], TEXT)] == [status, status]
    assert text in served.output()


@pytest.mark.parametrize(
    "options", [{"max_size": 0}, {"max_size": True}, {"max_size": 2.5}, {"max_wait_ms": -1}, {"max_wait_ms": "x"}]
)
def test_bad_limits_are_named(options: Any) -> None:
    with pytest.raises(ValueError, match=f"@batch: expected {next(iter(options))}"):
        batch(**options)


def test_a_batch_whose_client_leaves_as_it_begins_does_not_run() -> None:
    sizes: list[int] = []

    @batch(max_wait_ms=10)
    async def predict(requests: list[Any]) -> list[Any]:
        sizes.append(len(requests))
        return requests

    async def leave() -> None:
        call = asyncio.ensure_future(predict("x"))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0.001, call.cancel)
        time.sleep(0.05)  # both timers are due now, and run in the same round of the loop
        with contextlib.suppress(asyncio.CancelledError):
            await call
        await asyncio.sleep(0.01)
        assert await predict("y") == "y"

    asyncio.run(leave())
    assert sizes == [1]


@pytest.mark.parametrize("is_async", [False, True])
def test_one_request_out_of_time_does_not_end_its_batch(is_async: bool) -> None:
    """A call of the model in the batch once raised the 504 of the first request that was out of time, for all."""
    looks: list[bool] = []

    def look() -> bool:
        looks.append(current_disconnect_check.get()())
        return looks[-1]

    def predict(requests: list[Any]) -> list[Any]:
        end = time.monotonic() + 0.5
        while time.monotonic() < end and not look():
            time.sleep(0.01)
        return requests

    async def predict_later(requests: list[Any]) -> list[Any]:
        end = time.monotonic() + 0.5
        while time.monotonic() < end and not look():
            await asyncio.sleep(0.01)
        return requests

    function, loop = batch(max_size=2, max_wait_ms=5000)(predict_later if is_async else predict), EventLoop()

    def ask(timeout_s: float) -> Any:
        deadline = Deadline(timeout_s, time.monotonic(), lambda: False)
        current_disconnect_check.set(deadline)
        result = deadline.run(lambda: function(timeout_s))
        return loop.run(result, deadline) if is_async else result

    with ThreadPoolExecutor(2) as pool:
        short, long = (pool.submit(contextvars.copy_context().run, ask, timeout_s) for timeout_s in (0.1, 60.0))
        with pytest.raises(ApiError, match=r"took longer than 0\.1 s"):
            short.result()
        assert long.result() == 60.0
    assert looks
    assert not any(looks)


def test_a_function_must_take_one_list() -> None:
    with pytest.raises(TypeError, match="one parameter"):
        batch()(lambda a, b: [])
    with pytest.raises(TypeError, match="yields"):

        @batch()
        def stream(requests: list[Any]) -> Any:
            yield requests
