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


def challenge(group: int) -> Message:
    """Return the listener's first message."""
    return Message(Kind.CHALLENGE, group, body=os.urandom(_NUMBER_BYTES))


def greeting(token: str, asked: Message, group: int, rank: int, values: dict[str, Any]) -> Message:
    """Return the answer to a challenge. Raises EngineError if ``asked`` is no challenge."""
    if asked.kind is not Kind.CHALLENGE or len(asked.body) != _NUMBER_BYTES:
        raise EngineError("expected the challenge of a group's worker, found something else")
    body = os.urandom(_NUMBER_BYTES) + json.dumps(values, separators=(",", ":")).encode()
    plain = Message(Kind.GREETING, group, stage=rank, body=body)
    return plain._replace(body=_proof(token, _GREETING, asked, plain) + body)


def read_greeting(token: str, asked: Message, found: Message) -> dict[str, Any] | None:
    """Return a greeting's values, or None unless it proves, in answer to ``asked``, that its sender knows the token.

    Raises EngineError if the values are no JSON object.
    """
    if found.kind is not Kind.GREETING or found.group != asked.group:
        return None
    body = bytes(found.body)
    plain = found._replace(body=body[_PROOF_BYTES:])
    if not hmac.compare_digest(body[:_PROOF_BYTES], _proof(token, _GREETING, asked, plain)):
        return None
    return found._replace(body=body[_PROOF_BYTES + _NUMBER_BYTES :]).values()


def answer(token: str, asked: Message, found: Message) -> Message:
    """Return the listener's proof, for a greeting that was right."""
    return asked._replace(body=_proof(token, _ANSWER, asked, found))


def is_answer(token: str, asked: Message, sent: Message, found: Message | None) -> bool:
    """Return whether ``found`` proves that the listener knows the token, too."""
    return found is not None and hmac.compare_digest(bytes(found.body), _proof(token, _ANSWER, asked, sent))


def _proof(token: str, purpose: bytes, asked: Message, said: Message) -> bytes:
    return hmac.digest(token.encode(), purpose + bytes(asked.body) + said.header() + bytes(said.body), "sha256")


__all__ = ["answer", "challenge", "greeting", "is_answer", "read_greeting"]
