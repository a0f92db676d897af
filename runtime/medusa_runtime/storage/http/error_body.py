"""Reading the body of an error response: the store's error code, and some words for a message."""

from __future__ import annotations

import re

_CODE = re.compile(rb"<Code>([A-Za-z]{1,60})</Code>")


def error_code(body: bytes) -> str:
    """Return the code of an error in XML, as S3, Google Cloud Storage and Azure send it; "" if there is none."""
    found = _CODE.search(body)
    return found[1].decode() if found else ""


def first_words(body: bytes) -> str:
    """Return the start of an error page's text for a message, without tags, line ends and control characters."""
    text = re.sub(r"<[^>]*>|\s+", " ", body[:2000].decode("utf-8", "replace"))
    text = "".join(each if each.isprintable() else " " for each in text)
    return f"({' '.join(text.split())[:160]})" if text.strip() else ""
