"""A client's request, as far as the gateway has to understand it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from medusa_runtime.bounded_json import TooManyValuesError, parse_json

from .faults import Fault
from .prefixes import PIECE_BYTES, prompt_prefix

_SEED_BITS = 48  # so that every JSON parser reads the seed exactly
_MOST_VALUES = 1_000_000  # in a body; no other request is served while it is parsed
_MOST_COUNTED = 20_000  # lists and objects in which a prompt is looked for; with more, its size is underestimated
PROMPT_BYTES, _MOST_FOR_PROMPT = 8192, 4.0  # each 8 KiB of a body cost as much as a sequence, up to four sequences

# The routes of an instance. Those in SAMPLING_ROUTES take a seed, with which a second run draws the same tokens.
SAMPLING_ROUTES = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"})
OTHER_ROUTES = frozenset(
    {
        "/v1/messages/count_tokens", "/v1/responses/input_tokens",
        "/v1/embeddings", "/v1/rerank", "/v2/rerank", "/v1/score", "/rerank", "/score", "/classify", "/pooling",
        "/tokenize", "/detokenize", "/medusa/describe", "/medusa/call",
    }
)  # fmt: skip
FRAME_ROUTE = "/medusa/generate"  # takes a frame of the engine's socket, from a function with --engine cluster
_PASSED_ON = ("X-Request-Id", "Traceparent", "Tracestate", "Baggage")
_NO_TEXT = frozenset({"role", "type", "image_url", "input_audio"})  # fields of a message that are not prompt text
_OF_PROMPT = ("prompt", "messages", "input", "instructions", "system", "tools")
ROUTES = SAMPLING_ROUTES | OTHER_ROUTES | {FRAME_ROUTE}


@dataclass(frozen=True, slots=True)
class Call:
    """A request for a model. ``body`` is what instances get, and ``cost`` the estimated work, in sequences."""

    route: str
    model: str
    body: bytes
    cost: float
    headers: Mapping[str, str]
    prompt_tokens: int = 0  # the tokens of prompts given as token ids
    prompt_bytes: int = 0  # the UTF-8 bytes of prompts given as text
    adapter: bool = False  # it asks for an adapter of the model
    prefix: tuple[bytes, ...] = ()  # of ``prompt_prefix``


def parse_call(route: str, raw: bytes, request_headers: Mapping[str, str]) -> Call:
    """Read a request's body. ``request_headers`` are its headers.

    A sampling request without a seed gets one, so that it can be run again with the same tokens. Raises Fault 400.
    """
    body = _object(raw)
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise Fault(400, "expected the name of a deployed model as model", code="invalid_value", param="model")
    sequences = 1.0
    if route in SAMPLING_ROUTES:
        if body.get("seed") is None:
            raw = _seeded(raw, body)
        sequences = _sequences(body)
    elif route == FRAME_ROUTE:
        raw = _seeded_frame(body)
    headers = {name: request_headers[name] for name in _PASSED_ON if name in request_headers}
    cost = sequences + min(len(raw) / PROMPT_BYTES, _MOST_FOR_PROMPT)
    found = Call(route, model, raw, cost, headers, *_prompt(route, body))
    if len(raw) < PIECE_BYTES or (route not in SAMPLING_ROUTES and route != FRAME_ROUTE):
        return found
    return replace(found, prefix=prompt_prefix(model, body["frame"] if route == FRAME_ROUTE else body))


def _prompt(route: str, body: dict[str, Any]) -> tuple[int, int]:
    """Return the number of token ids in a prompt, and the UTF-8 bytes of its text."""
    if route not in SAMPLING_ROUTES and route != FRAME_ROUTE:
        return 0, 0
    tokens, text_bytes = 0, 0
    request = body["frame"] if route == FRAME_ROUTE else body
    left: list[Any] = [[request.get(name) for name in _OF_PROMPT]]
    for _ in range(_MOST_COUNTED):
        if not left:
            break
        part = left.pop()
        values = part if isinstance(part, list) else [value for name, value in part.items() if name not in _NO_TEXT]
        kinds = list(map(type, values))
        tokens += kinds.count(int)
        if str in kinds:
            text = "".join(value for value in values if isinstance(value, str))
            text_bytes += len(text.encode("utf-8", "surrogatepass"))
        if list in kinds or dict in kinds:
            left += [value for value in values if isinstance(value, list | dict)]
    return tokens, text_bytes


def _seeded(raw: bytes, body: dict[str, Any]) -> bytes:
    """Return the text of a body with a random seed. To write all of it anew would take as long as to parse it."""
    seed = secrets.randbits(_SEED_BITS)
    if "seed" in body or b"\0" in raw[:4] or not raw.lstrip().startswith(b"{"):  # null, in UTF-16, or behind a mark
        return _rewritten(body | {"seed": seed})
    begin = raw.index(b"{") + 1
    return b'%s"seed":%d,%s' % (raw[:begin], seed, raw[begin:])


def _seeded_frame(body: dict[str, Any]) -> bytes:
    frame = body.get("frame")
    params = frame.get("params") if isinstance(frame, dict) else None
    if not isinstance(params, dict):
        raise Fault(400, "expected a frame with params", code="invalid_value", param="frame")
    if params.get("seed") is None:
        params["seed"] = secrets.randbits(_SEED_BITS)
    return _rewritten(body)


def _rewritten(body: dict[str, Any]) -> bytes:
    try:
        # Escapes would make the text three times as large.
        return json.dumps(body, separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # lone surrogates
        return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:  # such as 1e999, of which Python makes Infinity
        raise Fault(400, "expected finite numbers, found one that is none", code="invalid_value") from None


def _sequences(body: dict[str, Any]) -> float:
    """Return how many sequences a request asks for. Does not validate the request: instances do."""
    count = 1
    for name in ("n", "best_of"):
        value = body.get(name)
        if isinstance(value, int) and value > count:
            count = min(value, 128)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        count *= min(len(prompt), 128)
    return float(count)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name}, which JSON does not have")


def _object(raw: bytes) -> dict[str, Any]:
    try:
        body = parse_json(raw, _MOST_VALUES, parse_constant=_refuse_constant)
    except TooManyValuesError as error:
        raise Fault(413, f"the body is too large: {error}", code="body_too_large") from None
    except RecursionError:
        raise Fault(400, "expected a JSON body: it is nested too deeply", code="invalid_json") from None
    except ValueError as error:
        found = "an empty body" if not raw.strip() else str(error)
        raise Fault(400, f"expected a JSON body, found {found}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise Fault(400, "expected a JSON object, found another value", code="invalid_json")
    return body
