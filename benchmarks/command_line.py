"""Parts of each benchmark's command: reading lists of names, showing an error in one line, and ending at SIGTERM."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Collection

from medusa_runtime.errors import ConfigError, MedusaError


def names(flag: str, text: str, known: Collection[str]) -> tuple[str, ...]:
    """Split the value of a flag, a list with commas. Raises ConfigError for a name that is not in ``known``."""
    found = tuple(name.strip() for name in text.split(",") if name.strip())
    if unknown := [name for name in found if name not in known]:
        raise ConfigError(f"{flag}: expected names of {', '.join(known)}, found {', '.join(unknown)}")
    return found


def run(main: Callable[[], int]) -> None:
    """Run ``main`` and exit with its status. After an error it is 2 for a wrong option, and 1 otherwise."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        sys.exit(main())
    except MedusaError as error:
        print(f"{error} [{error.code}]", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


def _stop(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)
