"""The relay of requests: each is held, run on an instance, and run again on another one if that instance is lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import aiohttp

from .answer_memory import Share
from .call import SAMPLING_ROUTES, Call
from .dispatch import Dispatch, Lease
from .faults import BrokenOffError, Fault
from .health import Health, InstanceLostError
from .instance_response import Answer, BusyError, InstanceResponse, request_instance
from .large_json import END_BYTES, run_beside, usage_at_end, usage_of
from .metrics import Metrics, ModelMetrics
from .streaming import sse
from .streaming.other_events import DivergedError
from .streaming.replay import Transcript
from .tracing import NOT_TRACED, RequestTrace

logger = logging.getLogger(__name__)

_MOST_TOKENS = 1 << 30  # of one request
_MOST_RUNS = 3  # a request may be what ended its instances, so it does not get a fourth


class Client(Protocol):
    """The client that waits for an answer."""

    async def begin(self, headers: Mapping[str, str]) -> None:
        """Send the head of a streamed answer."""

    async def begin_whole(self, status: int, headers: Mapping[str, str], size_bytes: int | None) -> None:
        """Send the head of an answer that is no stream, and comes in pieces."""

    async def send(self, data: bytes) -> None:
        """Send a part of an answer. Raises ConnectionError if the client is gone, or takes nothing or too slowly."""

    async def fail(self, fault: Fault) -> None:
        """Send the error that ends a streamed answer. Raises ConnectionError like ``send``."""

    def cut_off(self) -> None:
        """Break the connection to the client, which has a part of an answer."""


@dataclass(slots=True)
class _Progress:
    """The progress of one request. Times are by the monotonic clock; ``runs`` counts those that may have begun."""

    began: float
    deadline: float
    trace: RequestTrace
    runs: int = 0
    first_at: float | None = None
    last_at: float = 0.0
    opened: bool = False
    lost: str = ""  # the instance that was lost last, and the reason
    prompt_tokens: int = 0  # estimated


class Relay:
    """The relay for all requests of a gateway."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        headers: Mapping[str, str],
        dispatch: Dispatch,
        health: Health,
        metrics: Metrics,
        hold_s: float,
    ) -> None:
        self._session = session
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", **headers}
        self._dispatch = dispatch
        self._health = health
        self._metrics = metrics
        self._hold_s = hold_s

    async def run(
        self, call: Call, client: Client, began: float, share: Share, trace: RequestTrace = NOT_TRACED
    ) -> Answer | None:
        """Answer a request. Return the whole answer, or None if it was sent to ``client`` piece by piece.

        ``began`` is when the request arrived, by the monotonic clock. The answer takes its memory from ``share``.
        ``trace`` gets a span for each time that it waits or runs.
        Raises Fault if it cannot be answered, ConnectionError if the client is gone, and BrokenOffError, which is one,
        if the instance is lost when the client has a part of an answer that cannot be run again.
        """
        hold_s = self._dispatch.deployed(call.model).hold_s
        progress = _Progress(began, began + (self._hold_s if hold_s is None else hold_s), trace)
        transcript = Transcript()
        metrics = self._metrics.of(call.model)
        progress.prompt_tokens = metrics.prompt_tokens(call.prompt_tokens, call.prompt_bytes)
        metrics.arrived.note(progress.prompt_tokens)
        metrics.unanswered_tokens += progress.prompt_tokens
        try:
            return await self._run_until_answered(call, client, progress, transcript, share)
        except Fault as fault:
            if not progress.opened:
                raise
            await client.fail(fault)
            return None
        finally:
            if progress.first_at is None:
                metrics.unanswered_tokens -= progress.prompt_tokens
            _note_times(metrics, transcript, progress)

    async def _run_until_answered(
        self, call: Call, client: Client, progress: _Progress, transcript: Transcript, share: Share
    ) -> Answer | None:
        avoid: frozenset[str] = frozenset()
        metrics = self._metrics.of(call.model)
        again = False
        while True:
            with progress.trace.stage("wait for an instance"):
                lease = await self._lease(call, avoid, progress, again)
            again = True
            try:
                where = {"medusa.instance": lease.instance.id, "medusa.node": lease.instance.node}
                with progress.trace.stage("run", **where) as headers:
                    traced = replace(call, headers={**call.headers, **headers}) if headers else call
                    answer = await self._run_on(lease, traced, client, progress, transcript, share)
            except BusyError:
                self._dispatch.pause(lease.instance.id)
                metrics.retries["busy"] += 1
            except InstanceLostError as error:
                self._dispatch.pause(lease.instance.id)
                avoid |= {lease.instance.id}
                self._note_loss(call, lease, error, progress, metrics)
            except DivergedError:
                avoid |= {lease.instance.id}
                metrics.retries["diverged"] += 1
                if progress.runs >= _MOST_RUNS:
                    raise _diverged() from None
            except BrokenOffError:
                self._dispatch.pause(lease.instance.id)
                raise
            else:
                self._dispatch.answered(lease.instance.id)
                metrics.finished.note(1)
                return answer
            finally:
                self._dispatch.release(lease)

    async def _lease(self, call: Call, avoid: frozenset[str], progress: _Progress, again: bool) -> Lease:
        deadline = progress.deadline if progress.runs == 0 else max(progress.deadline, time.monotonic() + self._hold_s)
        try:
            return await self._dispatch.lease(
                call.model,
                call.cost,
                avoid=avoid,
                deadline=deadline,
                first=again,
                current=call.adapter,
                prefix=call.prefix,
            )
        except Fault as fault:
            if not progress.lost:
                raise
            text = f"{fault.message}; the last one that was tried was lost: {progress.lost}"
            raise Fault(fault.status, text, code=fault.code, retry_after_s=fault.retry_after_s) from None

    def _note_loss(
        self, call: Call, lease: Lease, error: InstanceLostError, progress: _Progress, metrics: ModelMetrics
    ) -> None:
        metrics.retries["lost" if error.began else "absent"] += 1
        progress.runs += error.began
        progress.lost = f"{lease.instance.id} on {lease.instance.node}: {error.reason}"
        logger.warning("a request for %s lost instance %s", call.model, progress.lost)
        if progress.runs >= _MOST_RUNS:
            text = f"{progress.runs} instances were lost while they worked on this request, and it is not tried again; "
            text += f"the last one was {progress.lost}"
            raise Fault(503, text, code="instance_lost", retry_after_s=5.0) from None

    async def _run_on(
        self, lease: Lease, call: Call, client: Client, progress: _Progress, transcript: Transcript, share: Share
    ) -> Answer | None:
        share.release()  # what an earlier run held
        sent = request_instance(
            self._session,
            lease.instance,
            self._health,
            path=call.route,
            body=call.body,
            headers={**self._headers, **call.headers},
        )
        async with sent as answer:
            if not answer.is_stream:
                whole = await answer.whole(share)
                if progress.opened:  # an earlier run streamed, but this one refuses
                    raise InstanceLostError(f"it answered with status {answer.status}", began=True)
                if whole is None:
                    await self._pass_on(answer, call, client, share)
                else:
                    self._count(call, whole.status, usage_of, whole.body)
                return whole
            if not progress.opened:
                await client.begin(answer.head())
                progress.opened = True
            transcript.begin()
            await self._stream(answer, call, client, progress, transcript, share)
            return None

    async def _pass_on(self, answer: InstanceResponse, call: Call, client: Client, share: Share) -> None:
        """Pass an answer on in pieces, because there is no memory to hold it.

        It cannot be run again once the client has a part of it: another run's has another id.
        """
        end = bytearray()
        await client.begin_whole(answer.status, answer.head(), answer.size_bytes)
        try:
            async with aclosing(answer.rest(share)) as pieces:
                async for piece in pieces:
                    await client.send(piece)
                    end += piece
                    del end[:-END_BYTES]
        except InstanceLostError as error:
            logger.warning("an answer of %s that was passed on in pieces broke off: %s", call.model, error.reason)
            client.cut_off()
            raise BrokenOffError("the instance was lost in the middle of its answer") from None
        self._count(call, answer.status, usage_at_end, end)

    async def _stream(
        self,
        answer: InstanceResponse,
        call: Call,
        client: Client,
        progress: _Progress,
        transcript: Transcript,
        share: Share,
    ) -> None:
        metrics = self._metrics.of(call.model)
        async with aclosing(answer.events(share)) as events:
            async for event in events:
                rest: bytes | None = event.raw
                if event.data is not None and event.raw != sse.DONE:
                    rest = await self._pass_event(event.raw, event.data, metrics, progress, transcript)
                if rest is not None:
                    await client.send(rest)

    async def _pass_event(
        self, raw: bytes, data: bytes, metrics: ModelMetrics, progress: _Progress, transcript: Transcript
    ) -> bytes | None:
        before = transcript.tokens
        try:
            rest = await run_beside(len(data), transcript.take, raw, data)
        except DivergedError:
            progress.runs += 1
            raise
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            raise InstanceLostError(f"it sent an event that cannot be read: {error}", began=True) from None
        if transcript.tokens > before:
            progress.last_at = time.monotonic()
            if progress.first_at is None:
                progress.first_at = progress.last_at
                metrics.unanswered_tokens -= progress.prompt_tokens
                metrics.prefilled.note(progress.prompt_tokens)
            metrics.generated(transcript.tokens - before)
        return rest

    def _count(
        self, call: Call, status: int, find_usage: Callable[[bytes | bytearray], Any], text: bytes | bytearray
    ) -> None:
        """Count the tokens of a whole answer. The time of its first token is unknown."""
        if call.route in SAMPLING_ROUTES and status == 200:
            with suppress(ValueError, KeyError, TypeError, RecursionError):
                usage, metrics = find_usage(text), self._metrics.of(call.model)
                read, written = ("prompt_tokens", "completion_tokens")
                if read not in usage:  # the Responses and Messages APIs have other names
                    read, written = ("input_tokens", "output_tokens")
                prompt_tokens = _token_count(usage[read]) + _token_count(usage.get("cache_read_input_tokens", 0))
                metrics.generated(_token_count(usage[written]))
                metrics.prefilled.note(prompt_tokens)
                if not call.prompt_tokens:
                    metrics.learn(call.prompt_bytes, prompt_tokens)


def _note_times(metrics: ModelMetrics, transcript: Transcript, progress: _Progress) -> None:
    if progress.first_at is not None:
        metrics.ttft.observe(progress.first_at - progress.began)
        if transcript.tokens > 1:
            metrics.tpot.observe((progress.last_at - progress.first_at) / (transcript.tokens - 1))


def _token_count(found: object) -> int:
    """Check a number of tokens from an instance, since the policy counts with it. Raises ValueError if it is none."""
    if not isinstance(found, int) or not 0 <= found <= _MOST_TOKENS:
        raise ValueError(f"expected a number of tokens, found {found!r:.100}")
    return found


def _diverged() -> Fault:
    text = (
        "the instance that wrote this answer was lost, and running the request again gave other tokens; "
        "what was sent is the beginning of an answer that cannot be continued, send the request again"
    )
    return Fault(503, text, code="replay_diverged", retry_after_s=1.0)
