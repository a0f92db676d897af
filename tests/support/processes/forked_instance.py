"""An instance of `medusa serve` for tests, forked where there is a process that has imported all it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from fork_server import MEDUSA_MAIN, ForkServer
from medusa_adapters.bench.served_instance import ServedInstance


class ForkedInstance(ServedInstance):
    """A server in exactly this environment. What a test leaves of it is killed.

    ``command`` is of `medusa serve`. Without a ``fork_server`` it is started plainly.
    """

    grace_s = 0.0

    def __init__(
        self,
        command: Sequence[str | Path],
        environment: Mapping[str, str],
        *,
        fork_server: ForkServer | None = None,
        folder: Path | None = None,
        log: BinaryIO | None = None,
    ) -> None:
        self.fork_server = fork_server
        super().__init__(command, environment, inherit=False, folder=folder, log=log, start_timeout_s=60.0, tied=False)

    def start(self, **options: Any) -> Any:
        if self.fork_server is None:
            return super().start(**options)
        words, log = self.command[1:], options["stdout"]
        return self.fork_server.start(MEDUSA_MAIN, words, folder=options["cwd"], environ=options["env"], log=log)
