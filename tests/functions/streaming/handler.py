import pathlib
import time

from medusa_handler import HttpError, Response


def handle(request):
    """A generator streams; the body says which."""
    if request.text == "early":
        raise HttpError(418, "no coffee")
    yield "one\ntwo"
    if request.text == "late":
        raise RuntimeError("secret detail")
    if request.text == "slow":
        time.sleep(1.0)
    while request.text == "silent" and not pathlib.Path("go").exists():
        time.sleep(0.02)
    if request.text == "endless":
        try:
            while True:
                time.sleep(0.02)
                yield "more"
        finally:
            pathlib.Path("closed").touch()
    yield {"three": 3}


def raw(request):
    return Response(iter(["a", b"b", "c"]), content_type="text/csv")
