"""The command `medusa`. It handles Ctrl-C, which ends it quietly, before it imports its parts."""

from __future__ import annotations

import sys

# These commands handle Ctrl-C themselves: they have processes of their own, and let requests finish.
_OWN_SIGNALS = (["serve"], ["batch"], ["node"], ["cluster", "start"], ["cluster", "gateway"], ["cluster", "lab"])


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 2 for a bad call, 130 after Ctrl-C, 1 for every other failure."""
    try:
        given = sys.argv[1:] if argv is None else argv
        if argv is None and given[:1] in (["serve"], ["node"]) and sys.platform == "linux":
            from .serving_process import resume

            resume(given)
        from .command_line import run

        # Only for the process's own command line: a caller with arguments has its own signal handlers.
        return run(given, in_child=argv is None and sys.platform == "linux" and not _ends_itself(given))
    except KeyboardInterrupt:
        return 130


def _ends_itself(given: list[str]) -> bool:
    return any(given[: len(command)] == command for command in _OWN_SIGNALS)


if __name__ == "__main__":
    sys.exit(main())
