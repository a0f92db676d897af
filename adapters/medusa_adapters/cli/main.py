"""The command `medusa`. It imports its parts only where Ctrl-C is already handled, and then ends quietly."""

from __future__ import annotations

import sys

# They end by themselves, orderly: they have processes of their own and let requests finish.
_OWN_SIGNALS = (["serve"], ["node"], ["cluster", "start"], ["cluster", "gateway"], ["cluster", "lab"])


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 2 for a bad call, 130 after Ctrl-C, 1 for every other failure."""
    try:
        from .command_line import run

        given = sys.argv[1:] if argv is None else argv
        # Of the process's own command line only: who calls this with arguments has signals of their own.
        return run(given, in_child=argv is None and sys.platform == "linux" and not _ends_itself(given))
    except KeyboardInterrupt:
        return 130


def _ends_itself(given: list[str]) -> bool:
    return any(given[: len(command)] == command for command in _OWN_SIGNALS)


if __name__ == "__main__":
    sys.exit(main())
