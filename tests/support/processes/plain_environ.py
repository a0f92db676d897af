"""The environment without our variables, so that those of whoever runs the tests change nothing."""

from __future__ import annotations

import os


def plain_environ() -> dict[str, str]:
    """A snapshot that the installation has is not used either: it may be older than the code."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MEDUSA_")}
    return kept | {"MEDUSA_SNAPSHOTS": "none"}
