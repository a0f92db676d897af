"""Links: what a rate is, and the shaper that gives it."""

from __future__ import annotations

import pytest
from medusa_cluster.lab.link_speed import LinkSpeed
from medusa_runtime.errors import ConfigError


@pytest.mark.parametrize("text", ["400mbit", "50MB", "50mb/s", "0.4gbit", " 400 Mbit "])
def test_bits_and_bytes_name_the_same_payload(text: str) -> None:
    assert LinkSpeed.parse(text) == LinkSpeed(50e6)


def test_the_shaper_adds_what_headers_take() -> None:
    # Measured: 419 Mbit/s on the wire carry 50.1 MB/s of payload.
    assert LinkSpeed(50e6).shaper() == "root tbf rate 418232044bit burst 262144 latency 50ms"
    assert "burst 5227901" in LinkSpeed.parse("10gbit").shaper()


@pytest.mark.parametrize("text", ["", "fast", "400", "-1mbit", "1bit", "9000gbit", "nan mbit"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a rate such as 400mbit or 50MB"):
        LinkSpeed.parse(text)
