"""A vLLM worker that is not the leader. It is a rank of the pipeline until the group is dissolved."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from medusa_runtime.config import Settings
from medusa_runtime.engine.base import GenerateRequest
from medusa_runtime.engine.serving.requests import Sink
from medusa_runtime.errors import OverloadedError
from medusa_runtime.region.reader import Region
from medusa_runtime.state.kv_plan import KvPlan
from medusa_runtime.timeline import Timeline
from medusa_vllm.engine import VllmEngine

from ..fetch_throttle import FetchThrottle
from ..membership import serve_group
from ..plan import GroupPlan
from .configuration import RankConfig, layers_of, rank_config

if TYPE_CHECKING:
    from .rank import Rank

logger = logging.getLogger(__name__)


class VllmFollower(VllmEngine):
    """The engine of a rank above 0; see the module. ``run`` serves the group, and later requests as an instance."""

    def __init__(self, region: Region, settings: Settings, timeline: Timeline, plan: GroupPlan) -> None:
        self.plan = plan
        self.link = plan.emulated_link()
        self.released: str | None = None  # "end" or "instance"
        self._layers = layers_of(region, settings)
        self._rank_config: RankConfig | None = None
        self._rank: Rank | None = None
        self._instance = threading.Event()
        super().__init__(region, settings, timeline)
        self._throttle = FetchThrottle(region, self._loaded_own, full=plan.full, layers=self._layers)

    def add(self, request: GenerateRequest, sink: Sink) -> None:
        if not self._instance.is_set():
            raise OverloadedError("this worker holds a part of its model; expected the request at its group's leader")
        super().add(request, sink)

    def _loaded_own(self) -> bool:
        return self._rank is not None and self._rank.loaded

    def close(self) -> None:
        self._throttle.release()
        super().close()

    def run(self, stop: threading.Event) -> None:
        self.released = serve_group(lambda: self._join(stop), self.plan, stop)
        if self.released == "instance" and not stop.is_set():
            self._throttle.release()
            self._instance.set()
            super().run(stop)
        elif not self.plan.exit:
            stop.wait()

    def _on_configured(self, plan: KvPlan) -> None:
        self._rank_config = rank_config(
            self.config, self._arguments, self._layers, self.plan, plan, self._region, self._settings, self._timeline
        )

    def _join(self, stop: threading.Event) -> Rank:
        from .rank import Rank

        assert self._rank_config is not None
        self._rank = Rank(self._rank_config, self.plan, self.link, self._timeline, stop.is_set, self._throttle)
        return self._rank


__all__ = ["VllmFollower"]
