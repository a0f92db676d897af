from medusa_handler import HttpError


def deeper(secret):
    raise KeyError(secret)


def handle(request):
    if request.text == "gone":
        raise HttpError(410, "it is gone", {"X-Why": "test"})
    if request.text == "unsendable":
        return object()
    return deeper("secret-value")


class Loading:
    def load(self, context):
        raise ValueError("no such index")

    def predict(self, request):
        return ""


class Nameless:
    def other(self, request):
        return ""


class PanicException(BaseException):
    """As libraries in Rust raise it (PyO3)."""


class Panicking:
    def load(self, context):
        raise PanicException("at the disco")

    def predict(self, request):
        return ""
