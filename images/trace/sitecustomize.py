"""Write the path of every file that this process or a child of it opens. Used only while the image is built."""

from __future__ import annotations

import os
import sys

_FD = os.open(os.environ["MEDUSA_TRACE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
os.set_inheritable(_FD, True)


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    # "open" is raised for sources and bytecode, too; compiled modules are opened by the dynamic linker ("import").
    path = arguments[0] if event == "open" else arguments[1] if event == "import" and len(arguments) > 1 else None
    if isinstance(path, bytes):
        path = os.fsdecode(path)
    if isinstance(path, str) and path.startswith("/opt/medusa/"):
        try:
            os.write(_FD, path.encode() + b"\n")
        except OSError:
            pass  # the process has closed all descriptors


sys.addaudithook(_audit)
