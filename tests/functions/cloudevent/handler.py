from cloudevents.core.v1.event import CloudEvent
from cloudevents.v1.http import CloudEvent as OldEvent


def handle(event: CloudEvent):
    attributes = {"type": "reply", "source": "/test", "id": "r-" + event.get_id(), "specversion": "1.0"}
    attributes["datacontenttype"] = "application/json"
    return CloudEvent(attributes, {"got": event.get_data()})


def old(event: OldEvent):
    return {"id": event["id"], "data": event.data}
