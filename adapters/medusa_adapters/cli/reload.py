"""``medusa serve --reload``: serve again whenever the handler's code changes. For development."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from medusa_runtime.errors import ConfigError
from medusa_runtime.process import terminate

_POLL_S = 0.5
_END_S = 60.0
_SUFFIXES = (".py", ".json", ".toml", ".yaml", ".yml", ".jinja")
_SKIPPED = ("__pycache__", "node_modules", "site-packages")
_MOST_FILES = 10_000


def serve_with_reload(argv: Sequence[str], handler: str | None) -> int:
    """Run ``medusa`` with these arguments in a child, until a signal. Each change beside the handler restarts it."""
    if handler is None:
        raise ConfigError("--reload: expected --handler, whose code can change, found none")
    folder = _folder(handler)
    stopping: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda got, _: stopping.append(got))
    command = [sys.executable, "-m", "medusa_adapters", *(word for word in argv if word != "--reload")]
    environment = {name: value for name, value in os.environ.items() if name != "MEDUSA_RELOAD"}
    while True:
        seen = _stamps(folder)
        child = subprocess.Popen(command, env=environment, process_group=0)
        said = False
        while not stopping and (now := _stamps(folder)) == seen:
            if child.poll() is not None and not said:
                print(f"ended with status {child.returncode}; waiting for a change in {folder}", file=sys.stderr)
                said = True
            time.sleep(_POLL_S)
        status = terminate(child, _END_S)
        if stopping:
            return status
        changed = next((name for name in sorted(set(now) | set(seen)) if now.get(name) != seen.get(name)), "")
        print(f"{os.path.relpath(changed)} has changed; starting again", file=sys.stderr, flush=True)


def _folder(handler: str) -> Path:
    place = handler.partition(":")[0]
    path = Path(place)
    if place.endswith(".py"):
        if not path.is_file():
            raise ConfigError(f"--reload: expected the file {place}, found none")
        return path.resolve().parent
    return Path.cwd()  # where `medusa serve` looks for modules first


def _stamps(folder: Path) -> dict[str, int]:
    """Return the files whose changes count, and when each was last written."""
    found: dict[str, int] = {}
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _SKIPPED]
        for name in names:
            if name.endswith(_SUFFIXES) and not name.startswith("."):
                path = os.path.join(place, name)
                try:
                    found[path] = os.stat(path).st_mtime_ns
                except OSError:
                    continue
        if len(found) > _MOST_FILES:
            raise ConfigError(f"--reload: expected at most {_MOST_FILES} files of code below {folder}, found more")
    return found
