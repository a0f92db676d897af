from medusa_handler import Response

RESULTS = {
    "ok": "ok",
    "status": ("", 99),
    "long status": ("", 1_000_000),
    "header": ("", 200, {"X-A": "→"}),
    "name": Response("", headers={"a b": ""}),
    "length": ("", 200, {"Content-Length": "many"}),
}


def handle(request):
    return RESULTS[request.text]
