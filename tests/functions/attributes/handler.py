ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"


def handle(request):
    given = request.headers[ATTRIBUTES]
    return {"given": given}, 200, {ATTRIBUTES: f"seen:{given}"}
