import flask
from medusa_handler import HttpError, Response


def length(count):
    """Return headers as they come from a server that compresses: they say how long another body is."""
    return {"Content-Length": str(count)}


RESULTS = {
    "ok": "ok",
    "status": ("", 99),
    "long status": ("", 1_000_000),
    "header": ("", 200, {"X-A": "→"}),
    "name": Response("", headers={"a b": ""}),
    "length": ("", 200, length("many")),
    "negative": ("", 200, length(-1)),
    "too long": lambda: ("all of it", 200, length(100)),
    "too short": lambda: ("all of it", 200, length(3)),
    "flask": lambda: flask.Response("all of it", headers=length(100)),
    "error status": lambda: HttpError(100, "go on"),
    "error text": lambda: HttpError("404", "a status in text"),
    "error header": lambda: HttpError(400, "", {"X-A": "a\r\nX-B: b"}),
    "error name": lambda: HttpError(400, "", {"a b": ""}),
    "cookies": ("", 200, [("Set-Cookie", "a=1"), ("Set-Cookie", "b=2")]),
    "error": lambda: HttpError(500, "all of it", length(100)),
    "right stream": lambda: Response(iter(["all ", "of it"]), headers=length(9)),
    "short stream": lambda: Response(iter(["all ", "of it"]), headers=length(100)),
    "long stream": lambda: Response(iter(["all ", "of it"]), headers=length(3)),
}


def handle(request):
    result = RESULTS[request.text]
    result = result() if callable(result) else result
    if isinstance(result, HttpError):
        raise result
    return result
