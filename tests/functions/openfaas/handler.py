def handle(event, context):
    return {
        "statusCode": 201,
        "headers": {"X-Host": context.hostname},
        "body": {"method": event.method, "body": event.body.decode(), "query": event.query["q"], "path": event.path},
    }
