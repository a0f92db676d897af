"""Our engine protocol over ``vllm serve``: token ids go there and come back by its own routes.

    add ─▶ /v1/completions (token ids, streamed) ─token▶ completion ─delta▶ sink

It starts as slowly as vLLM does, since vLLM imports itself in its own processes; only the weights are ours.
"""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.client import OK, HTTPException
from types import SimpleNamespace
from typing import Any

from medusa_runtime.config import Settings
from medusa_runtime.engine.base import EXPOSITION, EngineInfo, GenerateRequest, SamplingParams
from medusa_runtime.engine.serving.cut import Cut
from medusa_runtime.engine.serving.model_name import accepted_names
from medusa_runtime.engine.serving.requests import Requests, Sink
from medusa_runtime.engine.serving.sequence import SampledToken, Sequence
from medusa_runtime.engine.serving.tokenizer import Tokenizer
from medusa_runtime.errors import EngineError, MedusaError, RequestError
from medusa_runtime.process import hang_up
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline

from ..eos import eos_token_ids
from ..structured import TokenizerFolder, request_field
from .server import Exchange, VllmServer

logger = logging.getLogger(__name__)

_CHECK_EVERY_S = 0.2
_PIECE_BYTES = 1 << 16
_METRICS_S = 1.0
_METRIC = re.compile(r"(# (HELP|TYPE) )?vllm:")


class CompatibleEngine:
    """vLLM's own server as an engine. Construction returns when it answers."""

    slow_calls = ("stats",)  # the server is asked for its metrics

    def __init__(self, region: Region, settings: Settings, timeline: Timeline) -> None:
        region.wait_index()
        self._timeline = timeline
        self._tokenizer = Tokenizer(region.file("tokenizer.json"), timeline)
        self._files = TokenizerFolder(region)
        names = accepted_names(settings, region.file)
        self._name = names[0]
        folder = self._files.path()
        config = json.loads((folder / "config.json").read_text())
        self._server = VllmServer(folder, region, settings, timeline, names)
        try:
            with timeline.stage("vllm_server"):
                self._server.wait_ready()
            longest = _max_model_len(self._server)
        except BaseException:
            self.close()
            raise
        text = config.get("text_config") or config
        endings = SimpleNamespace(eos_token_id=text.get("eos_token_id", config.get("eos_token_id")))
        self.info = EngineInfo(
            "vllm",
            str(next(iter(config.get("architectures") or ["unknown"]))),
            int(text.get("vocab_size", config.get("vocab_size", 1 << 31))),
            longest,
            eos_token_ids(region, endings),
            longest * settings.max_concurrency,
        )
        self._requests = Requests(settings, self._tokenizer, self.info, timeline, self._release)
        self._exchanges: dict[str, Exchange] = {}
        self._delivery = threading.Lock()

    def add(self, request: GenerateRequest, sink: Sink) -> None:
        sequence = self._requests.open(request, sink)
        threading.Thread(target=self._run, args=(sequence,), name="vllm-request", daemon=True).start()

    def cancel(self, request_id: str) -> None:
        sequence = self._requests.get(request_id)
        if sequence is not None:
            sequence.cancelled = True
            self._hang_up(request_id)

    def run(self, stop: threading.Event) -> None:
        end: MedusaError = EngineError("the engine is stopping; try again")
        try:
            while not stop.wait(_CHECK_EVERY_S):
                self._server.check()
        except MedusaError as error:
            end = error
            raise
        finally:
            with self._delivery:
                self._requests.close(end)

    def wait_ready(self) -> None:
        self._tokenizer.wait(self.info.vocab_size)

    def open_http(self) -> Callable[[socket.socket], None]:
        """Return a function that takes a connection and passes its bytes to vLLM's server and back."""
        return self._relay

    def tokenize(self, text: str, add_special_tokens: bool = True, **cut: Any) -> list[int]:
        return self._tokenizer.tokenize(text, add_special_tokens, self.info, Cut(**cut))

    def detokenize(self, token_ids: list[int]) -> str:
        return self._tokenizer.detokenize(token_ids, self.info)

    def stats(self) -> dict[str, Any]:
        return self._requests.stats(len(self._requests), 0) | {"steps_total": 0, EXPOSITION: self._vllm_metrics()}

    def close(self) -> None:
        self._server.close()
        self._files.close()

    def _vllm_metrics(self) -> str:
        """Return vLLM's metrics, without those of its HTTP server and its process; nothing if it does not answer."""
        try:
            page = self._server.get("/metrics", _METRICS_S)[1].decode()
        except (OSError, ValueError):
            return ""
        return "".join(line for line in page.splitlines(keepends=True) if _METRIC.match(line))

    def _run(self, sequence: Sequence) -> None:
        try:
            for choice in self._choices(sequence):
                if sequence.cancelled or not self._deliver(sequence, choice):
                    break
            error = None
        except MedusaError as found:
            error = found
        except (OSError, ValueError, KeyError, HTTPException) as found:
            error = EngineError(f"vLLM's own server did not answer: {type(found).__name__}: {found}")
        with self._delivery:
            reason = "cancelled" if sequence.cancelled else "error" if error else "stop"
            self._requests.end(sequence, reason, None if sequence.cancelled else error)

    def _choices(self, sequence: Sequence) -> Iterator[dict[str, Any]]:
        with self._server.request("POST", "/v1/completions", self._body(sequence)) as exchange:
            self._exchanges[sequence.id], answer = exchange, exchange.response
            if answer.status != OK:
                raise _failure(answer.status, answer.read())
            for line in answer:
                data = line.removeprefix(b"data: ").strip()
                if line.startswith(b"data: ") and data != b"[DONE]":
                    event = json.loads(data)
                    if "error" in event:
                        raise EngineError(f"vLLM ended the request: {event['error'].get('message')}")
                    yield from event["choices"]

    def _hang_up(self, request_id: str) -> None:
        """Close a request's connection, which makes vLLM abort it."""
        if (exchange := self._exchanges.pop(request_id, None)) is not None:
            exchange.hang_up()

    def _deliver(self, sequence: Sequence, choice: dict[str, Any]) -> bool:
        for position, token in enumerate(choice.get("token_ids") or ()):
            with self._delivery:
                if self._requests.get(sequence.id) is not sequence:
                    return False
                delta = self._requests.add_token(sequence, _sampled(choice.get("logprobs"), position, token))
            if delta.finish_reason is not None:
                return False
        return True

    def _body(self, sequence: Sequence) -> dict[str, Any]:
        params: SamplingParams = sequence.params
        body = {
            "model": self._name,
            "prompt": sequence.tokens[: sequence.prompt_length],
            "max_tokens": sequence.limit - sequence.prompt_length,
            "stream": True,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **{name: getattr(params, name) for name in _COMMON_PARAMS},
            "top_k": max(params.top_k, 0),
            "stop_token_ids": sorted(sequence.end_token_ids),
        }
        if params.bad_words:
            body["bad_words"] = list(params.bad_words)
        if params.structured_outputs is not None:
            body["structured_outputs"] = request_field(params.structured_outputs)
        return {name: value for name, value in body.items() if value is not None}

    def _release(self, sequence: Sequence) -> None:
        self._hang_up(sequence.id)

    def _relay(self, connection: socket.socket) -> None:
        threading.Thread(target=self._relay_both_ways, args=(connection,), name="vllm-connection", daemon=True).start()

    def _relay_both_ways(self, connection: socket.socket) -> None:
        with connection:
            try:
                server = self._server.connect()
            except OSError:
                return
            with server:
                back = threading.Thread(target=_copy, args=(server, connection), daemon=True)
                back.start()
                _copy(connection, server)
                back.join()


_COMMON_PARAMS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "ignore_eos", "min_tokens", "logprobs", "logit_bias", "allowed_token_ids",
)  # fmt: skip


def _max_model_len(server: VllmServer) -> int:
    status, answer = server.get("/v1/models")
    if status != OK:
        raise EngineError(f"vLLM's own server does not show its models: {_failure(status, answer)}")
    return int(json.loads(answer)["data"][0]["max_model_len"])


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while piece := source.recv(_PIECE_BYTES):
            target.sendall(piece)
    except OSError:
        pass
    for end in (source, target):
        hang_up(end)


def _failure(status: int, body: bytes) -> MedusaError:
    """Return the error for a completion that vLLM's server refused: the request's fault, or the server's."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"status {status}"
    if HTTPStatus.BAD_REQUEST <= status < HTTPStatus.INTERNAL_SERVER_ERROR:
        return RequestError(f"vLLM refuses the request: {message}")
    return EngineError(f"vLLM's own server failed: {message}")


def _sampled(logprobs: dict[str, Any] | None, position: int, token: int) -> SampledToken:
    """Return a token with its log-probabilities, in which texts have the form ``token_id:7``."""
    if not logprobs or position >= len(logprobs.get("token_logprobs") or ()):
        return SampledToken(token)
    top = (logprobs.get("top_logprobs") or [{}] * (position + 1))[position] or {}
    likely = tuple((int(name.partition(":")[2]), value) for name, value in top.items() if name.startswith("token_id:"))
    return SampledToken(token, logprobs["token_logprobs"][position], likely)


__all__ = ["CompatibleEngine"]
