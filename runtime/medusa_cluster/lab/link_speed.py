"""The speed of a node's link, and the traffic shaper for it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from medusa_runtime.errors import ConfigError

# With an MTU of 1500, and Ethernet, IP and TCP headers with timestamps, 1448 of 1514 bytes on the wire are payload.
_FRAME_BYTES, _PAYLOAD_BYTES = 1514, 1448
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "kb": 8e3, "mb": 8e6, "gb": 8e9}
# Below 128 KiB the kernel cuts each large segment, which takes five times the CPU. 256 KiB gave the steadiest rate.
_LEAST_BURST_BYTES = 256 << 10
_BURSTS_PER_S = 250
_QUEUE_MS = 50


@dataclass(frozen=True)
class LinkSpeed:
    """The speed of a link in each direction, in bytes of payload a second. Headers come on top."""

    bytes_per_s: float

    @classmethod
    def parse(cls, text: str, name: str = "--link") -> Self:
        """Read a rate per second such as ``400mbit`` or ``50MB``, which are equal. Raises ConfigError."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg](?:bit|b))(?:/s|ps)?", text.strip(), re.IGNORECASE)
        if not found or not 1e5 <= float(found[1]) * _BITS[found[2].lower()] <= 1e12:
            raise ConfigError(
                f"{name}: expected a rate such as 400mbit or 50MB, from 100kbit to 1000gbit, found {text!r}"
            )
        return cls(float(found[1]) * _BITS[found[2].lower()] / 8)

    def shaper(self, share: float = 1.0) -> str:
        """Return the arguments of ``tc qdisc add dev …`` for this link, or for a ``share`` of it."""
        bits_per_s = self.bytes_per_s * share * 8 * _FRAME_BYTES / _PAYLOAD_BYTES
        burst_bytes = max(_LEAST_BURST_BYTES, round(bits_per_s / 8 / _BURSTS_PER_S))
        return f"root tbf rate {bits_per_s:.0f}bit burst {burst_bytes} latency {_QUEUE_MS}ms"

    def __str__(self) -> str:
        return f"{self.bytes_per_s * 8 / 1e6:g} Mbit/s"
