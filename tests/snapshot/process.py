"""A process that is saved as a snapshot, or continues from one: `process.py save|resume FOLDER BODY [ARGUMENT…]`.

BODY is a file of Python code with a function ``resumed(arguments)``. Where no snapshot is used, "plain" and the
reason are printed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from medusa_snapshot import library_files
from medusa_snapshot.resuming import resume


def main() -> None:
    what, folder, body, *arguments = sys.argv[1:]
    names: dict[str, Any] = {}
    if what == "resume":
        print("plain", resume(folder, "test", arguments))
        return
    library_files.open_high()
    exec(Path(body).read_text(), names)
    from medusa_runtime.compiled_library import LIBRARY
    from medusa_snapshot.saving import SnapshotError, save

    try:
        save(folder, "test", LIBRARY, dict(os.environ), lambda given: names["resumed"](given) or 0)
    except SnapshotError as error:
        print("not saved:", error)


if __name__ == "__main__":
    main()
