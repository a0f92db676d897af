"""The command `medusa`. It imports its parts where an interrupt (Ctrl-C) is awaited already, and ends quietly."""

from __future__ import annotations

import sys


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 2 for a call that cannot be meant so, 130, or 1 for the rest."""
    try:
        from .command_line import run

        return run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
