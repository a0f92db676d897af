"""The date of each answer (RFC 9110, section 5.6.7). ``email.utils`` takes milliseconds to import."""

from __future__ import annotations

import functools
import time

_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


@functools.lru_cache(maxsize=1)
def http_date(unix_s: int) -> str:
    """Return a time in the form of the ``Date`` field, such as ``Sun, 06 Nov 1994 08:49:37 GMT``, in any locale."""
    at = time.gmtime(unix_s)
    date = f"{_DAYS[at.tm_wday]}, {at.tm_mday:02} {_MONTHS[at.tm_mon - 1]} {at.tm_year:04}"
    return f"{date} {at.tm_hour:02}:{at.tm_min:02}:{at.tm_sec:02} GMT"
