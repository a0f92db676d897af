"""A generator becomes server-sent events: each item is sent when it is made, [DONE] ends the stream."""

import time

from medusa_handler import HttpError


def handle(request):
    """{"text": "…", "delay_s": 0.2} → an event for each line with its words, then one with the total."""
    text = request.json.get("text")
    if not isinstance(text, str):
        raise HttpError(400, 'expected {"text": "…"}')
    return count(text, float(request.json.get("delay_s", 0)))


def count(text, delay_s):
    total = 0
    for number, line in enumerate(text.splitlines(), 1):
        time.sleep(delay_s)  # the work of one step
        words = len(line.split())
        total += words
        yield {"line": number, "words": words}
    yield {"total": total}
