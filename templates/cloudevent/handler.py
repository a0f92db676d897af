"""A CloudEvent in, a CloudEvent out: on Knative the reply goes back to the broker."""

from cloudevents.core.v1.event import CloudEvent
from medusa_handler import HttpError


def handle(event: CloudEvent) -> CloudEvent:
    """An order → what it costs. An event may be delivered twice: the same id gives the same reply."""
    order = event.get_data()
    if not isinstance(order, dict) or not isinstance(order.get("items"), list):
        raise HttpError(400, 'expected data {"items": [{"price": 1.5, "count": 2}]}')  # 400 is not delivered again
    total = sum(item["price"] * item.get("count", 1) for item in order["items"])
    attributes = {
        "type": "example.order.priced",
        "source": "/prices",
        "id": f"{event.get_id()}-priced",
        "datacontenttype": "application/json",
    }
    return CloudEvent(attributes, {"order": event.get_id(), "total": total})
