"""The HTTP server of a gateway."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import HttpVersion11, web
from medusa_runtime.errors import MedusaError
from medusa_runtime.storage.base import redacted

from ..connections import Handler, track_request
from .access_log import MODEL, REQUEST_ID
from .call import ROUTES, Call, parse_call
from .faults import OF_MESSAGES, BrokenOffError, Fault, compact
from .gateway import Gateway
from .instance_response import SMALL_BYTES, Answer
from .page import page
from .routes import DeployedModel
from .streaming import sse
from .tracing import NOT_TRACED, RequestTrace, Tracer

logger = logging.getLogger(__name__)

_CLIENT_CLOSED = 499  # nginx's status for a client that left; appears only in metrics
_HEARTBEAT_S = 10.0
_LEAST_BYTES_PER_S = 256_000  # of a client that an answer waits for
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")  # as instances take it
_UNASKED = ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
_OWN_SITES = ("same-origin", "none")  # of Sec-Fetch-Site, which no page can set
_OPEN_PATHS = ("/livez", "/readyz", "/health")


class GatewayServer:
    """The HTTP server for a gateway's clients."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._options = gateway.options
        self.draining = False
        self.tracer = Tracer() if self._options.traces == "otlp" else None
        self.in_flight = 0
        self._bodies = _BodyMemory()
        self._idle = asyncio.Event()
        self._idle.set()

    def application(self) -> web.Application:
        most = self._options.max_body_bytes
        app = web.Application(middlewares=[track_request, self._guard], client_max_size=most)
        app.on_response_prepare.append(self._finish_head)
        for route in sorted(ROUTES):
            app.router.add_post(route, self._answer, expect_handler=self._continue)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._model)
        app.router.add_get("/livez", self._alive)
        app.router.add_get("/readyz", self._ready)
        app.router.add_get("/health", self._ready)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/cluster/status", self._status)
        app.router.add_get("/", self._page)
        return app

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is in flight. Return whether that came within ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def refuse_waiting(self) -> None:
        """Refuse the requests that still wait for an instance, which will not come in time."""
        self._gateway.dispatch.refuse_waiting(
            Fault(503, "this gateway is stopping; try again", code="not_ready", retry_after_s=1.0)
        )

    # Requests for a model

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        began = time.monotonic()
        model, status = "", 500
        trace = NOT_TRACED if self.tracer is None else self.tracer.begin(request.headers)
        with self._counted():
            try:
                async with self._read(request) as body:
                    call = parse_call(request.path, body.take(), request.headers)
                    body.count(len(call.body))
                    await self._gateway.dispatch.wait_for_routes(began + self._options.hold_s)
                    # Requests for an adapter go to the instances of its model.
                    model = (await self._deployed(call.model)).name
                    request[MODEL] = model
                    headers = {**call.headers, "X-Request-Id": request[REQUEST_ID]}
                    if trace.is_new:
                        headers.pop("Tracestate", None)  # it goes with the parent (Trace Context, section 3.2)
                    call = replace(call, model=model, headers=headers, adapter=call.model != model)
                    response, status = await self._relay(request, call, began, trace)
                    return response
            except (Fault, BrokenOffError) as error:
                status = error.status
                raise
            except (asyncio.CancelledError, ConnectionError):
                status = _CLIENT_CLOSED
                self._gateway.metrics.of(model).cancelled += 1
                raise
            finally:
                self._gateway.metrics.of(model).requests[(request.path, status)] += 1
                trace.end(request.method, request.path, model, status, request[REQUEST_ID])

    async def _deployed(self, model: str) -> DeployedModel:
        """Return a deployed model.

        Raises Fault 404 if the controller says that it is not deployed, and 503 if the controller cannot be asked.
        """
        table, dispatch = self._gateway.table, self._gateway.dispatch
        with suppress(Fault):
            return dispatch.deployed(model)
        if not table.away_s:
            await table.refresh()  # it may have been deployed just now
        try:
            return dispatch.deployed(model)
        except Fault as fault:
            if not table.away_s:
                raise
            text = f"{fault.message} as far as this gateway knows, and the cluster's controller is away; try again"
            raise Fault(503, text, code="not_ready", retry_after_s=1.0) from None

    async def _relay(
        self, request: web.Request, call: Call, began: float, trace: RequestTrace
    ) -> tuple[web.StreamResponse, int]:
        """Return the answer and the status that it counts as: that of the error in which a stream has ended."""
        client = _Client(request, self._options.write_timeout_s)
        try:
            with self._gateway.answers.share() as share:
                answer = await self._gateway.relay.run(call, client, began, share, trace)
                if answer is None:
                    return await client.end(), client.status
                if len(answer.body) > SMALL_BYTES:
                    return await client.send_whole(answer), answer.status
                body = bytes(answer.body)
                return web.Response(status=answer.status, headers=answer.headers, body=body), answer.status
        finally:
            client.close()

    async def _continue(self, request: web.Request) -> None:
        """Answer ``Expect: 100-continue``, unless the body will be refused."""
        if request.headers["Expect"].lower() != "100-continue":
            raise web.HTTPExpectationFailed
        if request.version >= HttpVersion11 and not self._is_too_large(request):
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # the answer itself has not begun

    def _is_too_large(self, request: web.Request) -> bool:
        """Return whether a request announces a body that is too large."""
        return (request.content_length or 0) > self._options.max_body_bytes

    @asynccontextmanager
    async def _read(self, request: web.Request) -> AsyncIterator[_Body]:
        """Read the body, and count it as used memory for as long as the block runs. Raises Fault."""
        _refuse_pages_unasked(request)
        if self._is_too_large(request):
            raise _too_large(self._options.max_body_mb)
        if (encoding := request.headers.get("Content-Encoding", "identity").lower()) != "identity":
            # A thousand times as many bytes may be in it, and no other request is served while they are unpacked.
            text = f"expected the body as it is, found it encoded ({encoding[:60]}); send it uncompressed"
            raise Fault(415, text, code="bad_body")
        body = _Body(self._bodies)
        try:
            try:
                async with asyncio.timeout(self._options.read_timeout_s):
                    async for piece in request.content.iter_any():
                        body.add(piece)
                        self._check_size(body.size)
            except TimeoutError:
                raise Fault(408, "the body came too slowly", code="incomplete_body") from None
            except web.RequestPayloadError:
                text = "the body cannot be read by its Transfer-Encoding"
                raise Fault(400, text, code="bad_body") from None
            yield body
        finally:
            body.count(0)

    def _check_size(self, size: int) -> None:
        """Raise Fault if a body is too large, or too large for the memory that is left.

        Only bytes that have arrived count: an announced length takes no memory, and a chunked body announces none.
        """
        if size > self._options.max_body_bytes:
            raise _too_large(self._options.max_body_mb)
        if self._bodies.size_bytes > self._options.body_memory_mb * 10**6:
            text = "the bodies of other requests take the memory there is; try again later"
            raise Fault(503, text, code="body_memory", retry_after_s=1.0)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count a request as in flight."""
        self.in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()

    # Requests for the gateway itself

    async def _wait_for_routes(self) -> None:
        """Wait for the first routes, as a request for a model does. Raises Fault 503."""
        with self._counted():
            await self._gateway.dispatch.wait_for_routes(time.monotonic() + self._options.hold_s)

    async def _models(self, _: web.Request) -> web.StreamResponse:
        await self._wait_for_routes()
        models = self._gateway.table.current.models
        data = [entry for name in sorted(models) for entry in _entries(models[name])]
        return _json({"object": "list", "data": data})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        await self._wait_for_routes()
        name = request.match_info["name"]
        entries = _entries(await self._deployed(name))
        return _json(next(entry for entry in entries if entry["id"] == name))

    async def _alive(self, _: web.Request) -> web.StreamResponse:
        return _json({"status": "alive"})

    async def _ready(self, _: web.Request) -> web.StreamResponse:
        known = self._gateway.table.known
        status = "draining" if self.draining else "ready" if known else "starting"
        body = {"status": status, "controller_away_s": round(self._gateway.table.away_s, 1)}
        return _json(body, 200 if status == "ready" else 503)

    async def _metrics(self, _: web.Request) -> web.StreamResponse:
        return web.Response(text=self._gateway.metrics_text(), content_type="text/plain", charset="utf-8")

    async def _status(self, request: web.Request) -> web.StreamResponse:
        status = await self._gateway.status()
        if request.query.get("form") == "html":
            return web.Response(text=page.body(status), content_type="text/html", charset="utf-8")
        return _json(status)

    async def _page(self, _: web.Request) -> web.StreamResponse:
        text = page.html(await self._gateway.status(), refresh=True)
        return web.Response(text=text, content_type="text/html", charset="utf-8", headers=page.headers())

    # Around all requests

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the client's token, and answer errors in the form of the route's interface."""
        given = request.headers.get("X-Request-Id", "")
        request[REQUEST_ID] = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        try:
            self._check_token(request)
            return await handler(request)
        except Fault as fault:
            return _error(request, fault)
        except web.HTTPException as error:
            return _error(request, _http_fault(request, error))
        except MedusaError as error:
            return _error(request, Fault(503, str(error), code=error.code, retry_after_s=1.0))
        except ConnectionError:
            raise asyncio.CancelledError from None  # the client is gone, so there is nothing to answer
        except Exception:
            number = request[REQUEST_ID]
            logger.exception("request %s failed", number)
            text = f"internal error; the log has the details under {number}"
            return _error(request, Fault(500, text, code="internal"))

    async def _finish_head(self, request: web.Request, response: web.StreamResponse) -> None:
        response.headers["Server"] = "medusa-runtime"  # instead of aiohttp's and Python's versions
        response.headers.setdefault("X-Request-Id", request.get(REQUEST_ID, ""))
        if request.path in OF_MESSAGES:
            response.headers["Request-Id"] = response.headers["X-Request-Id"]  # Anthropic's name of it
        if self.draining:
            response.force_close()
            response.headers["Connection"] = "close"

    def _check_token(self, request: web.Request) -> None:
        token = self._options.client_token
        if token is None or request.path in _OPEN_PATHS:
            return
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        # Anthropic's clients send it in a header of their own.
        given = [each.encode("utf-8", "surrogateescape") for each in (bearer, request.headers.get("X-Api-Key", ""))]
        if not any(hmac.compare_digest(each, token.encode()) for each in given):
            raise Fault(401, "expected this gateway's token as Authorization: Bearer …", code="invalid_api_key")


def _refuse_pages_unasked(request: web.Request) -> None:
    """Refuse a request that a browser may have sent for any web page without asking first, as instances do."""
    kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if request.headers.get("Sec-Fetch-Site") in _OWN_SITES:
        return
    has_key = "Authorization" in request.headers or "X-Api-Key" in request.headers
    if "Origin" in request.headers and not has_key and kind in _UNASKED:
        text = f"expected Content-Type: application/json from a web page, found {kind or 'none'}"
        raise Fault(415, text, code="bad_content_type")


@dataclass(slots=True)
class _BodyMemory:
    """The memory that the bodies of all requests take."""

    size_bytes: int = 0


class _Body:
    """The body of one request, while it arrives and until it is parsed. ``size`` is what it counts in ``memory``."""

    def __init__(self, memory: _BodyMemory) -> None:
        self._memory = memory
        self._pieces: list[bytes] = []
        self.size = 0

    def add(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self.count(self.size + len(piece))

    def take(self) -> bytes:
        """Return the whole body, and keep nothing of it: a request may wait for minutes, and has a body of its own."""
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)

    def count(self, size: int) -> None:
        """Let the body count as so many bytes."""
        self._memory.size_bytes += size - self.size
        self.size = size


class _Client:
    """A client whose answer may be streamed. A silent stream gets a comment every 10 s."""

    def __init__(self, request: web.Request, write_timeout_s: float) -> None:
        self._request = request
        self._write_timeout_s = write_timeout_s
        self._response: web.StreamResponse | None = None
        self._sent_at = 0.0
        self._sent_bytes = 0
        self._waited_s = 0.0
        self._fault: Fault | None = None
        self._heartbeat_task: asyncio.Task[None] | None = None

    @property
    def status(self) -> int:
        """The status of an answer that has begun, or of the error in which it has ended."""
        assert self._response is not None
        return self._response.status if self._fault is None else self._fault.status

    async def begin(self, headers: Mapping[str, str]) -> None:
        self._response = web.StreamResponse(headers={**_STREAM_HEADERS, **headers})
        await self._response.prepare(self._request)
        self._sent_at = time.monotonic()
        self._heartbeat_task = asyncio.create_task(self._send_heartbeats())

    async def send(self, data: bytes) -> None:
        began = time.monotonic()
        await self._write(data)
        self._waited_s += time.monotonic() - began
        self._sent_bytes += len(data)
        # The instance has the same limit. It is not to take this gateway for the slow client.
        if self._waited_s > self._write_timeout_s + self._sent_bytes / _LEAST_BYTES_PER_S:
            self.cut_off()
            raise ConnectionResetError("the client takes its answer too slowly")

    async def _write(self, data: bytes) -> None:
        assert self._response is not None
        self._sent_at = time.monotonic()
        await self._within_timeout(self._response.write(data))

    async def fail(self, fault: Fault) -> None:
        self._fault = fault
        await self.send(fault.events(self._request.path))

    async def send_whole(self, answer: Answer) -> web.StreamResponse:
        """Send a large answer that is no stream, in pieces. Raises ConnectionError like ``send``."""
        await self.begin_whole(answer.status, answer.headers, len(answer.body))
        for start in range(0, len(answer.body), SMALL_BYTES):
            await self.send(bytes(answer.body[start : start + SMALL_BYTES]))
        return await self.end()

    async def begin_whole(self, status: int, headers: Mapping[str, str], size_bytes: int | None) -> None:
        self._response = web.StreamResponse(status=status, headers=headers)
        self._response.content_length = size_bytes
        await self._response.prepare(self._request)

    async def _within_timeout(self, writing: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await writing
        except TimeoutError:
            self.cut_off()
            raise ConnectionResetError("the client takes nothing of its answer") from None

    def cut_off(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()

    async def end(self) -> web.StreamResponse:
        assert self._response is not None
        self.close()
        await self._within_timeout(self._response.write_eof())
        return self._response

    def close(self) -> None:
        if self._heartbeat_task is not None:
            self._heartbeat_task.cancel()

    async def _send_heartbeats(self) -> None:
        with suppress(ConnectionError):
            while True:
                await asyncio.sleep(_HEARTBEAT_S)
                if time.monotonic() - self._sent_at >= _HEARTBEAT_S:
                    await self._write(sse.HEARTBEAT)


def _entries(deployed: DeployedModel) -> list[dict[str, Any]]:
    """Return the entries of a model and its adapters in ``/v1/models``."""
    about = {"object": "model", "created": 0, "owned_by": "medusa-runtime"}
    model = {"id": deployed.name, **about, "root": deployed.name, "parent": None}
    adapters = sorted(deployed.adapters.items())
    return [model] + [{"id": name, **about, "root": redacted(url), "parent": deployed.name} for name, url in adapters]


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=compact(value), status=status, content_type="application/json")


def _error(request: web.Request, fault: Fault) -> web.Response:
    body = fault.body(request.path)
    return web.Response(body=body, status=fault.status, headers=fault.headers(), content_type="application/json")


def _http_fault(request: web.Request, error: web.HTTPException) -> Fault:
    path = request.path if len(request.path) <= 200 else request.path[:199] + "…"
    if error.status == 404:
        return Fault(404, f"there is no route {request.method} {path}", code="not_found")
    if error.status == 405:
        return Fault(405, f"{path} does not take {request.method}", code="bad_method")
    return Fault(error.status, error.reason, code="bad_request")


def _too_large(most_mb: int) -> Fault:
    return Fault(413, f"the body is larger than {most_mb} MB (--max-body-mb)", code="body_too_large")
