import json


def handle(event, context):
    """``event`` has body, headers, method, query and path; ``context`` has the model, where the function has one."""
    name = json.loads(event.body).get("name", "world") if event.body else "world"
    return {"statusCode": 200, "body": {"hello": name}}
