"""The process's own memory, to distinguish addresses of the host from addresses on the device and from numbers."""

from __future__ import annotations

import os
from pathlib import Path

_MAPS = Path("/proc/self/maps")


def own_memory() -> tuple[tuple[int, int], ...]:
    """Return the (start, stop) of this process's executable, with its variables, and of its heap and stack.

    Other anonymous mappings are left out, because they may be the driver's, for memory on the device.
    """
    found: list[tuple[int, int]] = []
    program, after_program = os.path.realpath("/proc/self/exe"), False
    for line in _MAPS.read_text().splitlines():
        fields = line.split(maxsplit=5)
        start, _, stop = fields[0].partition("-")
        path = fields[5].strip() if len(fields) > 5 else ""
        # Variables that are zero at first are in a mapping without a name, behind the program's last one.
        own = path in (program, "[heap]", "[stack]") or (not path and after_program and found[-1][1] == int(start, 16))
        after_program = own and path in (program, "")
        if own:
            found.append((int(start, 16), int(stop, 16)))
    return tuple(found)


__all__ = ["own_memory"]
