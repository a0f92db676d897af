"""What a forked child must not keep of the agent: a connection's end is seen only when nobody holds it any more."""

from __future__ import annotations

import os


def close_others(*keep: int) -> None:
    """Close all descriptors but these and the standard streams.

    Python objects that own them must stay referenced: they would close the numbers a second time.
    """
    kept = {0, 1, 2, *keep}
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        if descriptor not in kept:
            try:
                os.close(descriptor)
            except OSError:
                pass  # the one that listed them
