"""The end of this folder's commands: one line for an error, and the exit of all context managers at SIGTERM."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

from medusa_runtime.errors import ConfigError, MedusaError


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
