import sys


def handle(request):
    imported = [name for name in ("opentelemetry.sdk", "medusa_handler.server.tracing") if name in sys.modules]
    return {"traceparent": request.headers.get("traceparent"), "imported": imported}
