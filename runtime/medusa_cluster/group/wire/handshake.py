"""How two workers show each other that they know the group's token, without sending it.

    listener ─challenge: a number▶ worker ─greeting: proof, its number, what it is▶ listener ─challenge: proof▶ worker

Proofs are HMAC-SHA256 (RFC 2104) over the numbers, which are random, and the greeting. So a stranger who took the port
of a leader learns nothing, what was recorded is of no use another time, and a greeting cannot be changed on its way.
"""

from __future__ import annotations

import hmac
import json
import os
from typing import Any

from medusa_runtime.errors import EngineError

from .message import Kind, Message

_NUMBER_BYTES = _PROOF_BYTES = 32
_GREETING, _ANSWER = b"medusa group greeting", b"medusa group answer"


def challenge(group: int) -> Message:
    """The listener's first message."""
    return Message(Kind.CHALLENGE, group, body=os.urandom(_NUMBER_BYTES))


def greeting(token: str, asked: Message, group: int, rank: int, values: dict[str, Any]) -> Message:
    """The answer to a challenge. EngineError when it is none."""
    if asked.kind is not Kind.CHALLENGE or len(asked.body) != _NUMBER_BYTES:
        raise EngineError("expected the challenge of a group's worker, found something else")
    body = os.urandom(_NUMBER_BYTES) + json.dumps(values, separators=(",", ":")).encode()
    plain = Message(Kind.GREETING, group, stage=rank, body=body)
    return plain._replace(body=_proof(token, _GREETING, asked, plain) + body)


def read_greeting(token: str, asked: Message, found: Message) -> dict[str, Any] | None:
    """Return what a greeting says; None when it is no answer to ``asked`` by one who knows the token. EngineError."""
    if found.kind is not Kind.GREETING or found.group != asked.group:
        return None
    body = bytes(found.body)
    plain = found._replace(body=body[_PROOF_BYTES:])
    if not hmac.compare_digest(body[:_PROOF_BYTES], _proof(token, _GREETING, asked, plain)):
        return None
    return found._replace(body=body[_PROOF_BYTES + _NUMBER_BYTES :]).values()


def answer(token: str, asked: Message, found: Message) -> Message:
    """The listener's proof, once a greeting was right."""
    return asked._replace(body=_proof(token, _ANSWER, asked, found))


def is_answer(token: str, asked: Message, sent: Message, found: Message | None) -> bool:
    """Whether ``found`` shows that the listener knows the token, too."""
    return found is not None and hmac.compare_digest(bytes(found.body), _proof(token, _ANSWER, asked, sent))


def _proof(token: str, purpose: bytes, asked: Message, said: Message) -> bytes:
    return hmac.digest(token.encode(), purpose + bytes(asked.body) + said.header() + bytes(said.body), "sha256")


__all__ = ["answer", "challenge", "greeting", "is_answer", "read_greeting"]
