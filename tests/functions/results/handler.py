from datetime import date

from medusa_handler import Response

RESULTS = {
    "dict": {"a": date(2026, 1, 2)},
    "list": [1, "two"],
    "str": "text ä",
    "bytes": b"\x00\x01",
    "none": None,
    "tuple": ({"made": 1}, 201),
    "headers": ("moved", 302, {"Location": "/there"}),
    "nan": {"scores": [1.0, {"a": float("nan")}]},
    "infinity": ([float("-inf")], 201),
    "response": Response("<p>", 203, {"X-A": "b"}, "text/html"),
}


def handle(request):
    if request.query["what"] == "stream":
        return iter([1.5, {"loss": float("inf")}])
    return RESULTS[request.query["what"]]
