import asyncio
import pathlib
import time

from medusa_handler import HttpError, Response


def handle(request):
    """Waits for a file."""
    while request.text != "quick" and not pathlib.Path("go").exists():
        time.sleep(0.01)
    return "went"


async def wait(request):
    while request.text != "quick":
        await asyncio.sleep(0.01)
    return "went"


def count(request):
    """Endless, and never silent."""
    while request.text != "quick":
        time.sleep(0.01)
        yield "more"
    yield "done"


def flood(request):
    def pieces():
        try:
            while True:
                yield b"x" * 65536
        finally:
            pathlib.Path("closed").touch()

    return Response(pieces(), content_type="application/octet-stream")


def large(request):
    return b"x" * (32 << 20)


def check(request):
    if request.path == "/am-i" and not pathlib.Path("go").exists():
        raise HttpError(503, "not yet")
    return "yes"
