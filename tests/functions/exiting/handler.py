import sys

from medusa_handler import Response


def exiting():
    yield "one"
    sys.exit(3)


def handle(request):
    if request.text == "exit":
        sys.exit(3)
    return {"late": exiting(), "body": Response(exiting()), "ok": "ok"}[request.text]


class Asynchronous:
    async def predict(self, request):
        if request.text == "exit":
            sys.exit(3)
        return "ok"

    def close(self):
        sys.exit(3)
