"""The classes of events of the package cloudevents, told apart without importing it."""

from __future__ import annotations


def is_cloud_event_class(kind: object) -> bool:
    """Return whether ``kind`` is a class of the package cloudevents, in any of its versions."""
    module = getattr(kind, "__module__", "")
    return isinstance(module, str) and module.split(".")[0] == "cloudevents"
