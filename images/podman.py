"""Settings that podman needs on machines that are containers themselves."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

# Without CAP_SYS_RESOURCE podman's own limits cannot be set, and crun refuses a cgroup v1 and v2 hybrid.
CONTAINERS_CONF = """[containers]
default_ulimits = ["nofile=20000:20000","nproc=4096:4096"]
[engine]
runtime = "runc"
"""


def environment(scratch: Path) -> dict[str, str]:
    """Write a configuration into ``scratch``, and return podman's variables for it. One that is already set is kept."""
    if "CONTAINERS_CONF" in os.environ or shutil.which("runc") is None:
        return {}
    configuration = scratch / "containers.conf"
    configuration.write_text(CONTAINERS_CONF)
    return {"CONTAINERS_CONF": str(configuration)}
