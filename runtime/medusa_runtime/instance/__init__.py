"""One instance of a function: the processes of its cold start, and the supervisor that orders and watches them."""

from .observer import Observer
from .resources import InstanceHandle
from .supervisor import Instance, serve

__all__ = ["Instance", "InstanceHandle", "Observer", "serve"]
