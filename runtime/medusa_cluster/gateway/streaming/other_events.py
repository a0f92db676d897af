"""Events of a stream without choices: the usage, and those of the Responses API and of Anthropic's Messages API."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from ..faults import compact
from ..large_json import LARGE_BYTES, pieces

# Fields that differ from run to run.
_IDS = ("id", "item_id", "response_id", "call_id", "message_id")
_LOGPROBS = "logprobs"  # has no ids, and may have a million values
_TIMES = ("created", "created_at", "completed_at")
# A message begins with the length of its prompt, if that is known by then.
_VARYING = (*_IDS, *_TIMES, "usage")
_TIME = re.compile(rb'"(?:created|created_at|completed_at)": ?[^,}]*')
_HEAD_BYTES = 64 << 10  # in which the times of an event stand that is not parsed


class DivergedError(Exception):
    """A second run of a request gave another answer than the one that the client has begun to get."""


class OtherEvents:
    """The events that the client has, and how many of them the present run has repeated.

    A second run has to give the same events one by one. Its ids are replaced by those of the first run.
    """

    def __init__(self) -> None:
        self._sent: list[bytes] = []
        self._repeated = 0
        self._ids: list[str] = []  # in the order of their first appearance
        self._new_ids: dict[str, int] = {}  # id of the present run → its place in that order

    def rewind(self) -> None:
        self._repeated = 0
        self._new_ids = {}

    def take(self, raw: bytes, data: bytes, value: dict[str, Any]) -> bytes | None:
        """Return what to send for an event, or None if the client has it already. Raises DivergedError.

        ``raw`` is the whole event, ``data`` its data and ``value`` the data's JSON.
        """
        self._note_ids(value)
        if not self._is_new(_digest(_lasting(value), large=len(data) >= LARGE_BYTES)):
            return None
        names = {new: self._ids[place] for new, place in self._new_ids.items() if self._ids[place] != new}
        return raw.replace(data, compact(_renamed(value, names))) if names else raw

    def take_unparsed(self, raw: bytes, data: bytes) -> bytes | None:
        """Do the same for an event that would take too much memory if it were parsed.

        Its ids have stood in earlier events: it is one of the last of a response.
        """
        same = data
        for new, place in self._new_ids.items():
            same = same.replace(_quoted(new), b'"%d"' % place)
        found = hashlib.sha256(_TIME.sub(b"", same[:_HEAD_BYTES]))
        found.update(memoryview(same)[_HEAD_BYTES:])
        if not self._is_new(found.digest()[:16]):
            return None
        for new, place in self._new_ids.items():
            if self._ids[place] != new:
                raw = raw.replace(_quoted(new), _quoted(self._ids[place]))
        return raw

    def _is_new(self, digest: bytes) -> bool:
        """Return whether the client does not have the event of this digest. Raises DivergedError if it has another."""
        self._repeated += 1
        if self._repeated > len(self._sent):
            self._sent.append(digest)
            return True
        if self._sent[self._repeated - 1] != digest:
            raise DivergedError
        return False

    def _note_ids(self, value: Any) -> None:
        if isinstance(value, list):
            for part in value:
                self._note_ids(part)
        elif isinstance(value, dict):
            for name, part in value.items():
                if name in _IDS and isinstance(part, str) and part:
                    place = self._new_ids.setdefault(part, len(self._new_ids))
                    if place == len(self._ids):
                        self._ids.append(part)
                elif name != _LOGPROBS:
                    self._note_ids(part)


def _digest(value: dict[str, Any], *, large: bool) -> bytes:
    found = hashlib.sha256()
    for piece in pieces(value) if large else (json.dumps(value, sort_keys=True),):
        found.update(piece.encode())
    return found.digest()[:16]


def _quoted(text: str) -> bytes:
    return b'"%s"' % text.encode("utf-8", "surrogatepass")


def _lasting(value: Any) -> Any:
    """Return a value without the fields that differ from run to run."""
    if isinstance(value, list):
        return [_lasting(part) for part in value]
    if isinstance(value, dict):
        return {
            name: part if name == _LOGPROBS else _lasting(part) for name, part in value.items() if name not in _VARYING
        }
    return value


def _renamed(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, list):
        return [_renamed(part, names) for part in value]
    if isinstance(value, dict):
        return {
            name: names.get(part, part) if name in _IDS and isinstance(part, str) else _renamed(part, names)
            for name, part in value.items()
        }
    return value
