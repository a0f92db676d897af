"""The handshake by which two workers prove to each other that they know the group's token, without sending it.

    listener ─challenge: a number▶ worker ─greeting: proof, its number, what it is▶ listener ─challenge: proof▶ worker

Proofs are HMAC-SHA256 (RFC 2104) over the random numbers and the greeting. So a stranger on a leader's port learns
nothing, a recorded handshake cannot be used again, and a greeting cannot be changed on its way.
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


def make_challenge(group: int) -> Message:
    """Return the listener's first message."""
    return Message(Kind.CHALLENGE, group, body=os.urandom(_NUMBER_BYTES))


def make_greeting(token: str, challenge: Message, group: int, rank: int, values: dict[str, Any]) -> Message:
    """Return the answer to a challenge. Raises EngineError if ``challenge`` is no challenge."""
    if challenge.kind is not Kind.CHALLENGE or len(challenge.body) != _NUMBER_BYTES:
        raise EngineError("expected the challenge of a group's worker, found something else")
    body = os.urandom(_NUMBER_BYTES) + json.dumps(values, separators=(",", ":")).encode()
    plain = Message(Kind.GREETING, group, rank=rank, body=body)
    return plain._replace(body=_proof(token, _GREETING, challenge, plain) + body)


def read_greeting(token: str, challenge: Message, greeting: Message) -> dict[str, Any] | None:
    """Return a greeting's values, or None unless it answers ``challenge`` with a proof that its sender knows the token.

    Raises EngineError if the values are no JSON object.
    """
    if greeting.kind is not Kind.GREETING or greeting.group != challenge.group:
        return None
    body = bytes(greeting.body)
    plain = greeting._replace(body=body[_PROOF_BYTES:])
    if not hmac.compare_digest(body[:_PROOF_BYTES], _proof(token, _GREETING, challenge, plain)):
        return None
    return greeting._replace(body=body[_PROOF_BYTES + _NUMBER_BYTES :]).values()


def make_answer(token: str, challenge: Message, greeting: Message) -> Message:
    """Return the listener's proof, for a greeting that was right."""
    return challenge._replace(body=_proof(token, _ANSWER, challenge, greeting))


def is_answer(token: str, challenge: Message, greeting: Message, answer: Message | None) -> bool:
    """Return whether ``answer`` proves that the listener knows the token, too."""
    return answer is not None and hmac.compare_digest(bytes(answer.body), _proof(token, _ANSWER, challenge, greeting))


def _proof(token: str, purpose: bytes, challenge: Message, greeting: Message) -> bytes:
    return hmac.digest(
        token.encode(), purpose + bytes(challenge.body) + greeting.header() + bytes(greeting.body), "sha256"
    )


__all__ = ["is_answer", "make_answer", "make_challenge", "make_greeting", "read_greeting"]
