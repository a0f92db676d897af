import sys

import flask
from medusa_handler import Response


def exiting():
    yield "one"
    sys.exit(3)


class Stop(BaseException):
    """What some libraries raise to end their own process."""


def stopping(*before):
    yield from before
    raise Stop


def handle(request):
    if request.text == "exit":
        sys.exit(3)
    return {
        "late": exiting(),
        "body": Response(exiting()),
        "first": Response(stopping()),
        "stop": Response(stopping("one")),
        "flask": flask.Response(stopping("one")),
        "ok": "ok",
    }[request.text]


class Asynchronous:
    async def predict(self, request):
        if request.text == "exit":
            sys.exit(3)
        return "ok"

    def close(self):
        sys.exit(3)
