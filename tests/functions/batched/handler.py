from __future__ import annotations

import asyncio
import time

from medusa_handler import HttpError, Request, batch


class Handler:
    """Answers with the size of the batch in which a request was."""

    @batch(max_size=4, max_wait_ms=300)
    def predict(self, requests: list[Request]) -> list:
        time.sleep(0.05)
        answers = [{"size": len(requests), "text": request.text} for request in requests]
        return [HttpError(418, "no coffee") if answer["text"] == "coffee" else answer for answer in answers]


@batch(max_size=3, max_wait_ms=200)
async def later(items: list[dict]):
    await asyncio.sleep(0.05)
    return [{"size": len(items), "number": item["number"]} for item in items]


@batch(max_size=2, max_wait_ms=50)
def short(requests):
    return [1] * (len(requests) + 1)


@batch(max_size=2, max_wait_ms=50)
def broken(requests):
    raise HttpError(409, "not now")


@batch(max_size=2, max_wait_ms=50)
def lazy(requests):
    return (int(request.text) for request in requests)


@batch(max_size=2, max_wait_ms=50)
async def lazy_later(requests):
    return (int(request.text) for request in requests)


@batch(max_size=2, max_wait_ms=50)
def one_text(requests):
    return "ab"


@batch(max_size=2, max_wait_ms=50)
async def leaving(requests):
    raise SystemExit("enough")
