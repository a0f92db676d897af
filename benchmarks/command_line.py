"""How the commands of this folder end: with one line for an error, and through context managers at SIGTERM."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

from medusa_runtime.errors import ConfigError, MedusaError


def run(main: Callable[[], int]) -> None:
    """Run ``main`` and exit with its status: 2 for a call that cannot be meant so, 1 for the rest."""
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
