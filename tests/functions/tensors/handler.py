import json


def handle(request):
    """Return the request's body, or the answer that its query names."""
    what = request.query.get("what", "echo")
    if what == "echo":
        return request.json
    if what == "items":
        return iter(request.json)
    if what == "raise":
        raise KeyError("secret-value")
    if what == "created":
        return request.json, 201, {"X-Path": request.path}
    return json.loads(what)
