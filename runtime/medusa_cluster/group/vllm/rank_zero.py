"""Rank 0 of a vLLM pipeline: a fork of the leader's engine process, which has imported vLLM."""

from __future__ import annotations

import logging
import os
import signal
import time

from medusa_runtime.process import die_with_parent, name_process
from medusa_runtime.timeline import Timeline
from medusa_vllm.cpu.ranks import drop_sockets

from ..plan import GroupPlan
from ..wire.emulated_link import EmulatedLink
from .configuration import RankConfig
from .rank import Rank

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def fork_rank_zero(rank_config: RankConfig, plan: GroupPlan, link: EmulatedLink | None, timeline: Timeline) -> int:
    """Fork rank 0, which serves until the group is dissolved, and return its process id.

    The kernel kills it when the calling thread ends.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        die_with_parent(parent)
        name_process("group-rank-0")
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        drop_sockets()
        _serve(rank_config, plan, link, timeline.named("rank 0"))
        status = 0
    except Exception:
        logger.exception("rank 0 of the group failed")
    finally:
        os._exit(status)  # never run the parent's exit handlers


def _serve(rank_config: RankConfig, plan: GroupPlan, link: EmulatedLink | None, timeline: Timeline) -> None:
    rank = Rank(rank_config, plan, link, timeline, lambda: False)
    rank.run(time.monotonic() + plan.form_s)


__all__ = ["fork_rank_zero"]
