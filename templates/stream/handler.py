"""A generator becomes server-sent events: each item is sent when it is made, [DONE] ends the stream."""

import time

from medusa_handler import HttpError


def handle(request):
    """{"text": "…", "delay_s": 0.2} → an event for each line with its words, then one with the total."""
    text, delay_s = request.object.get("text"), request.object.get("delay_s", 0)
    if not isinstance(text, str) or not isinstance(delay_s, int | float) or not 0 <= delay_s <= 10:
        raise HttpError(400, 'expected {"text": "…", "delay_s": 0 to 10}')
    return count(text, delay_s)


def count(text, delay_s):
    total = 0
    for number, line in enumerate(text.splitlines(), 1):
        time.sleep(delay_s)  # the work of one step
        words = len(line.split())
        total += words
        yield {"line": number, "words": words}
    yield {"total": total}
