"""The relay of requests: each is held, run on an instance, and run again on another one if that instance is lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Protocol

import aiohttp

from .call import SAMPLING_ROUTES, Call
from .dispatch import Dispatch, Lease
from .faults import Fault
from .health import Health, InstanceLostError
from .instance_response import Answer, BusyError, InstanceResponse, request_instance
from .large_json import run_beside, usage_of
from .metrics import Metrics, ModelMetrics
from .streaming import sse
from .streaming.other_events import DivergedError
from .streaming.replay import Transcript

logger = logging.getLogger(__name__)

_MOST_TOKENS = 1 << 30  # of one request
_MOST_RUNS = 3  # a request may be what ended its instances, so it does not get a fourth


class Client(Protocol):
    """The client that waits for an answer."""

    async def begin(self, headers: Mapping[str, str]) -> None:
        """Send the head of a streamed answer."""

    async def send(self, data: bytes) -> None:
        """Send a part of a streamed answer. Raises ConnectionError if the client is gone or takes nothing."""


@dataclass(slots=True)
class _Progress:
    """The progress of one request. Times are by the monotonic clock; ``runs`` counts those that may have begun."""

    began: float
    deadline: float
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

    async def run(self, call: Call, client: Client, began: float) -> Answer | None:
        """Answer a request. Return the whole answer, or None if it was streamed to ``client``.

        ``began`` is when the request arrived, by the monotonic clock. Raises Fault if it cannot be answered, and
        ConnectionError if the client is gone.
        """
        hold_s = self._dispatch.deployed(call.model).hold_s
        progress = _Progress(began, began + (self._hold_s if hold_s is None else hold_s))
        transcript = Transcript()
        metrics = self._metrics.of(call.model)
        progress.prompt_tokens = metrics.prompt_tokens(call.prompt_tokens, call.prompt_bytes)
        metrics.arrived.note(progress.prompt_tokens)
        try:
            return await self._run_until_answered(call, client, progress, transcript)
        except Fault as fault:
            if not progress.opened:
                raise
            await client.send(b"data: " + fault.body() + b"\n\n" + sse.DONE)
            return None
        finally:
            _note_times(metrics, transcript, progress)

    async def _run_until_answered(
        self, call: Call, client: Client, progress: _Progress, transcript: Transcript
    ) -> Answer | None:
        avoid: frozenset[str] = frozenset()
        metrics = self._metrics.of(call.model)
        again = False
        while True:
            lease = await self._lease(call, avoid, progress, again)
            again = True
            try:
                answer = await self._run_on(lease, call, client, progress, transcript)
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
            else:
                self._dispatch.answered(lease.instance.id)
                metrics.finished.note(1)
                return answer
            finally:
                self._dispatch.release(lease)

    async def _lease(self, call: Call, avoid: frozenset[str], progress: _Progress, again: bool) -> Lease:
        deadline = progress.deadline if progress.runs == 0 else max(progress.deadline, time.monotonic() + self._hold_s)
        try:
            return await self._dispatch.lease(call.model, call.cost, avoid=avoid, deadline=deadline, first=again)
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
        self, lease: Lease, call: Call, client: Client, progress: _Progress, transcript: Transcript
    ) -> Answer | None:
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
                whole = await answer.whole()
                if progress.opened:  # an earlier run streamed, but this one refuses
                    raise InstanceLostError(f"it answered with status {whole.status}", began=True)
                self._count(call, whole)
                return whole
            if not progress.opened:
                await client.begin(answer.head())
                progress.opened = True
            transcript.begin()
            await self._stream(answer, call, client, progress, transcript)
            return None

    async def _stream(
        self, answer: InstanceResponse, call: Call, client: Client, progress: _Progress, transcript: Transcript
    ) -> None:
        metrics = self._metrics.of(call.model)
        async with aclosing(answer.events()) as events:
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
                metrics.prefilled.note(progress.prompt_tokens)
            metrics.generated(transcript.tokens - before)
        return rest

    def _count(self, call: Call, answer: Answer) -> None:
        """Count the tokens of a whole answer. The time of its first token is unknown."""
        if call.route in SAMPLING_ROUTES and answer.status == 200:
            with suppress(ValueError, KeyError, TypeError, RecursionError):
                usage, metrics = usage_of(answer.body), self._metrics.of(call.model)
                read, written = ("prompt_tokens", "completion_tokens")
                if read not in usage:  # the Responses API has other names
                    read, written = ("input_tokens", "output_tokens")
                prompt_tokens = _token_count(usage[read])
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
