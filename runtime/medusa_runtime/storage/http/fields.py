"""A strict parser of the head of an HTTP/1.1 response and its fields. What the RFCs do not allow is an error.

Sources: RFC 9110 (fields, ranges, validators) and RFC 9112 (the message on the wire). What a server sends is used in
later requests (an ETag returns in If-Match) and decides where an answer ends, so nothing is guessed. Every number
consists of ASCII digits and has a largest value. Every function here takes time linear in its input.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from urllib.parse import SplitResult

# No control characters but the tab (RFC 9110 §5.5), and line ends only as CR LF (RFC 9112 §2.2).
_FORBIDDEN = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\r(?!\n)|(?<!\r)\n")
_STATUS_LINE = re.compile(rb"HTTP/1\.([0-9]) ([1-5][0-9]{2}) .*", re.DOTALL)
_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_NUMBER = re.compile(r"[0-9]{1,18}")  # stays below 2^63
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?", re.DOTALL)
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})", re.IGNORECASE)
_UNSATISFIED = re.compile(r"bytes \*/([0-9]{1,18})", re.IGNORECASE)
_ENTITY_TAG = re.compile(r'(?:W/)?"[\x21\x23-\x7e\x80-\xff]*"')
_USED_UP = re.compile(r";\s*r=0\s*;\s*t=([0-9]{1,18})")
_DAYS = frozenset(["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"])
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
# Names of days and months are looked up afterwards: alternatives for them would take 1.7 ms of each start to compile.
_DATE = re.compile("(...), ([0-9]{2}) (...) ([0-9]{4}) ([0-9]{2}):([0-9]{2}):([0-9]{2}) GMT")
# The fields that a reader of ranges acts upon and that may come only once (RFC 9110 §5.5 calls them singletons).
_ONCE = frozenset(
    ("content-length", "content-range", "etag", "last-modified", "location", "retry-after", "x-amz-bucket-region")
)


class FieldError(Exception):
    """A response that is not HTTP/1.1 as the RFCs define it."""


class Head(NamedTuple):
    """The status line and the fields, whose names are in lower case. ``minor`` is 1 for HTTP/1.1."""

    minor: int
    status: int
    fields: dict[str, str]


class ContentRange(NamedTuple):
    """The range [start, stop) that a 206 holds, of an object of ``size`` bytes."""

    start: int
    stop: int
    size: int


def parse_head(head: bytes) -> Head:
    """Parse a response's head, without the empty line that ends it. Raises FieldError for what is not allowed."""
    minor, status, lines = parse_lines(head)
    fields: dict[str, str] = {}
    for name, value in lines:
        if name not in fields:
            fields[name] = value
        elif name not in _ONCE:
            fields[name] = f"{fields[name]}, {value}".strip()
        elif fields[name] != value:
            raise FieldError(f"expected {name} once, found {fields[name][:60]!r} and {value[:60]!r}")
    return Head(minor, status, fields)


def parse_lines(head: bytes) -> tuple[int, int, list[tuple[str, str]]]:
    """Parse a head like ``parse_head``, but return the fields as they came: in order, each as often as it was sent.

    Returns the minor version, the status and the fields.
    """
    if wrong := _FORBIDDEN.search(head):
        raise FieldError(f"expected lines that end in CR LF and no control characters, found {_near(head, wrong)}")
    status_line, *rest = head.split(b"\r\n")
    status = _STATUS_LINE.fullmatch(status_line)
    if not status:
        raise FieldError(f"expected an HTTP/1.1 answer, found {status_line[:60]!r}")
    lines: list[tuple[str, str]] = []
    for line in rest:
        if line[:1] in (b" ", b"\t") and lines:  # a folded line (RFC 9112 §5.2)
            name, value = lines.pop()
            lines.append((name, f"{value} {_value(line)}".strip()))
            continue
        raw, colon, value_bytes = line.partition(b":")
        if not colon or not _TOKEN.fullmatch(raw):
            raise FieldError(f"expected a field (name: value), found {line[:60]!r}")
        lines.append((raw.decode("ascii").lower(), _value(value_bytes)))
    return int(status[1]), int(status[2]), lines


def _value(raw: bytes) -> str:
    return raw.strip(b" \t").decode("latin-1")


def _near(head: bytes, found: re.Match[bytes]) -> str:
    return repr(head[max(found.start() - 30, 0) : found.end() + 30])


def framing(head: Head) -> tuple[int | None, bool]:
    """Return the body's length, if it is stated, and whether it is chunked.

    (None, False) means that the body ends with the connection. Source: RFC 9112 §6.3. Raises FieldError for an answer
    with both a length and a transfer coding: two readers could disagree about where it ends.
    """
    length, coding = head.fields.get("content-length"), head.fields.get("transfer-encoding")
    if coding is not None:
        if length is not None or head.minor == 0 or coding.lower() != "chunked":
            raise FieldError(
                f"expected Content-Length or Transfer-Encoding: chunked, found {length} and {coding[:60]!r}"
            )
        chunked = True
    else:
        chunked = False
    if head.status < 200 or head.status in (204, 304):
        return 0, False
    return (None, chunked) if length is None else (number("Content-Length", length), False)


def keeps_open(head: Head) -> bool:
    """Return whether the server keeps the connection open for another request."""
    options = head.fields.get("connection", "").lower().split(",")
    return head.minor > 0 and "close" not in (option.strip() for option in options)


def number(name: str, text: str) -> int:
    """Parse a number of ASCII digits, below 10^18. Raises FieldError, which calls it ``name``."""
    if not _NUMBER.fullmatch(text):
        raise FieldError(f"expected {name} to be a number, found {text[:60]!r}")
    return int(text)


def chunk_size(line: bytes) -> int:
    """Parse the line in front of a chunk; extensions are ignored (RFC 9112 §7.1)."""
    found = _CHUNK_SIZE.fullmatch(line)
    if not found or _FORBIDDEN.search(line):
        raise FieldError(f"expected the size of a chunk, found {line[:60]!r}")
    return int(found[1], 16)


def content_range(text: str) -> ContentRange:
    """Parse the Content-Range of a 206, which must lie within the object (RFC 9110 §14.4)."""
    found = _CONTENT_RANGE.fullmatch(text)
    if not found or not int(found[1]) <= int(found[2]) < int(found[3]):
        raise FieldError(f"expected Content-Range: bytes first-last/size, found {text[:60]!r}")
    return ContentRange(int(found[1]), int(found[2]) + 1, int(found[3]))


def unsatisfied_size(text: str) -> int:
    """Parse the Content-Range of a 416, which holds the object's size."""
    found = _UNSATISFIED.fullmatch(text)
    if not found:
        raise FieldError(f"expected Content-Range: bytes */size, found {text[:60]!r}")
    return int(found[1])


def entity_tag(text: str) -> str | None:
    """Return the ETag unchanged, or None if it is not valid. Azure's old API leaves out the quotes, for example."""
    return text if _ENTITY_TAG.fullmatch(text) else None


def http_date(text: str) -> str | None:
    """Return the date unchanged, or None if it is not in the form that servers must use (RFC 9110 §5.6.7)."""
    return text if _date(text) else None


def retry_after_s(text: str, answered: str, now: float) -> float | None:
    """Return the seconds to wait according to a Retry-After, which is a number or a date; None if it is neither.

    A date is compared with ``answered``, the Date of the same answer, because our clock may be wrong. ``now``, in
    seconds since the epoch, is for servers that send none.
    """
    if _NUMBER.fullmatch(text):
        return float(text)
    until, at = _moment(text), _moment(answered)
    return None if until is None else max(until - (now if at is None else at), 0.0)


def wait_s(fields: Mapping[str, str], now: float) -> float | None:
    """Return how many seconds a server asks to wait, by its Retry-After or a used up RateLimit; None if it does not.

    Source of the latter: draft-ietf-httpapi-ratelimit-headers. The Hugging Face Hub sends ``"resolvers";r=0;t=217``.
    """
    after_s = retry_after_s(fields.get("retry-after", ""), fields.get("date", ""), now)
    used_up = _USED_UP.search(fields.get("ratelimit", ""))
    return float(used_up[1]) if after_s is None and used_up else after_s


def _moment(text: str) -> float | None:
    """Return a date in seconds since the epoch, or None if it is not a valid one."""
    date = _date(text)
    if not date:
        return None
    import calendar  # 5 ms, and dates are rare here

    try:
        return float(calendar.timegm(date))
    except ValueError:  # the thirty-first of February
        return None


def _date(text: str) -> tuple[int, ...] | None:
    """Return a date's year, month, day, hour, minute and second; None if it is not a valid date."""
    found = _DATE.fullmatch(text)
    if not found or found[1] not in _DAYS or found[3] not in _MONTHS:
        return None
    _, day, month, year, *clock = found.groups()
    return int(year), _MONTHS.index(month) + 1, int(day), *map(int, clock)


def is_encoded(text: str) -> bool:
    """Return whether a Content-Encoding changes the bytes. ``aws-chunked``, which some stores keep, does not."""
    return any(coding.strip().lower() not in ("", "identity", "aws-chunked") for coding in text.split(","))


def basic_authorization(parts: SplitResult) -> str | None:
    """Return the Authorization value for the user and password in a URL; None if it has no user (RFC 7617)."""
    if parts.username is None:
        return None
    import base64
    from urllib.parse import unquote

    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return "Basic " + base64.b64encode(pair.encode()).decode()
