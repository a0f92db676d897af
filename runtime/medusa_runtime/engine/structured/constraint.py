"""The grammar of one sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .process import GrammarProcess


class Constraint:
    """The grammar that a sequence's text must follow, kept in another process (``process.py``).

    ``number`` is the grammar's number there. ``unsent`` are the sequence's tokens that the process has not been sent
    yet. ``end_token_ids_sent`` says whether it has been sent the tokens that end the sequence.
    """

    def __init__(self, process: GrammarProcess, number: int) -> None:
        self.process = process
        self.number = number
        self.unsent: list[int] = []
        self.end_token_ids_sent = False

    def close(self) -> None:
        """Have the process forget the grammar. Call it in the engine's thread."""
        self.process.closed.append(self.number)
