"""A CloudEvent in, a CloudEvent out: on Knative the reply goes back to the broker."""

from cloudevents.core.v1.event import CloudEvent
from medusa_handler import HttpError


def handle(event: CloudEvent) -> CloudEvent:
    """Return the price of an order. An event may be delivered twice; the same id gives the same reply."""
    try:
        total = sum(float(item["price"]) * int(item.get("count", 1)) for item in event.get_data()["items"])
    except (AttributeError, KeyError, TypeError, ValueError):
        # A bad event stays bad. After a 400, the broker does not deliver it again, as it would after a 5xx.
        raise HttpError(400, 'expected data {"items": [{"price": 1.5, "count": 2}]}') from None
    attributes = {
        "type": "example.order.priced",
        "source": "/prices",
        "id": f"{event.get_id()}-priced",
        "datacontenttype": "application/json",
    }
    return CloudEvent(attributes, {"order": event.get_id(), "total": total})
