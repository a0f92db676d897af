"""`medusa node` until its idle engine process is warm, which no request waits for."""

from __future__ import annotations

import sys
from contextlib import closing

from medusa_adapters.bench.coldstart.contestants import Question, Sample
from medusa_adapters.bench.coldstart.resumed import Snapshot, check_continues
from medusa_adapters.bench.node import Node
from medusa_adapters.bench.process import pss_bytes, rss_bytes
from medusa_adapters.bench.served_instance import medusa_command


class NodeStart:
    """A yardstick: a node agent from its exec until an engine process is warm, and the memory of all its processes.

    With ``resumed``, the agent must continue from a snapshot, which is made at the first sample.
    """

    def __init__(self, engine: str, *, name: str, python: str = sys.executable, resumed: bool = False) -> None:
        self.name = name
        self._engine = engine
        self._command = medusa_command(python)
        self._snapshot = Snapshot(self._command, engine) if resumed else None

    def sample(self, question: Question) -> Sample:
        env = self._snapshot.env() if self._snapshot else {"MEDUSA_SNAPSHOTS": "none"}
        with closing(Node(self._command, self._engine, env)) as node:
            node.wait_warm(question.model)
            warm_s, pids = node.process.since_start_s(), node.process.tree()
            memory = {"pss_mb": pss_bytes(pids) / 1e6, "rss_mb": rss_bytes(pids) / 1e6}
            if self._snapshot:
                check_continues(node.process)
            return Sample(warm_s, **memory)

    def close(self) -> None:
        if self._snapshot:
            self._snapshot.close()
