"""The command `medusa`. It imports its parts where an interrupt (Ctrl-C) is awaited already, and ends quietly."""

from __future__ import annotations

import sys

# They end by themselves, orderly: `serve` and `node` have processes of their own and let requests finish.
_OWN_SIGNALS = (["serve"], ["node"])


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 2 for a call that cannot be meant so, 130, or 1 for the rest."""
    try:
        from .command_line import run

        given = sys.argv[1:] if argv is None else argv
        # Of the process's own command line only: who calls this with arguments has signals of their own.
        return run(given, in_child=argv is None and sys.platform == "linux" and given[:1] not in _OWN_SIGNALS)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
