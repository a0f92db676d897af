"""Hands the region and the timeline to vLLM's processes: as paths, in the load configuration.

Only forks inherit descriptors, and on a GPU vLLM may start ranks as new interpreters. A path through /proc names the
same memory in any process of this user.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Any

from medusa_runtime.config import Settings
from medusa_runtime.errors import ConfigError
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline

_REGION, _TIMELINE, _KERNELS = "medusa_region", "medusa_timeline", "medusa_kernels"
_SHARED, _LAYERS, _RELEASES = "medusa_shared", "medusa_layers", "medusa_releases"

# By a region's path, what was attached to it in this process: a state bundle's code, beside an agent's region. A rank
# that is another process goes on without.
_attached_files: dict[str, Mapping[str, bytes]] = {}


def loader_config(region: Region, timeline: Timeline, settings: Settings) -> dict[str, str]:
    """Return the ``model_loader_extra_config`` for processes that load from this region."""
    own = f"/proc/{os.getpid()}/fd"
    _attached_files[f"{own}/{region.fd}"] = region.attached_files
    paths = {_REGION: f"{own}/{region.fd}", _TIMELINE: f"{own}/{timeline.fd}", _KERNELS: settings.kernels}
    shared = {_SHARED: "1"} if region.from_agent else {}
    return paths | shared | ({_RELEASES: "1"} if settings.host_weights == "release" else {})


def layers_config(start: int, stop: int) -> dict[str, str]:
    """Return the setting that limits a process to these layers.

    It also loads what belongs to the model's first or last layer, if that is among them.
    """
    return {_LAYERS: f"{start}:{stop}"}


def layers_of(load_config: Any) -> tuple[int, int] | None:
    """Return the layers [start, stop) to which a load configuration is limited; None for all."""
    found = (load_config.model_loader_extra_config or {}).get(_LAYERS)
    if found is None:
        return None
    start, _, stop = str(found).partition(":")
    return int(start), int(stop)


class AttachedRegion:
    """A region and a timeline, opened from their paths. ``kernels`` is the setting of that name.

    ``releases``: the region's bytes are freed once a GPU has them.
    """

    def __init__(self, region: str, timeline: str, kernels: str, shared: bool, releases: bool) -> None:
        self._paths = region, timeline
        self._shared = shared
        self.kernels = kernels
        self.releases = releases
        self.model: str | None = None  # vLLM's name of the model whose weights these are
        self.was_uploaded = False

    @classmethod
    def of(cls, load_config: Any) -> AttachedRegion:
        """Open the region and timeline of a load configuration. Raises ConfigError if we did not start this vLLM."""
        extra = load_config.model_loader_extra_config
        if not isinstance(extra, dict) or _REGION not in extra:
            raise ConfigError(
                "--load-format medusa: expected to be started by `medusa serve --engine vllm`, found no region to "
                "load from"
            )
        paths, shared = (extra[_REGION], extra[_TIMELINE]), _SHARED in extra
        # A path names another region once its descriptor was closed and its number used again.
        return _attached_region(*paths, extra[_KERNELS], shared, _RELEASES in extra, os.stat(paths[0]).st_ino)

    @cached_property
    def region(self) -> Region:
        """Map the region private and writable: a page that vLLM changes in place becomes this process's own copy."""
        access = os.O_RDWR if self.releases and not self._shared else os.O_RDONLY  # an agent's can only be read
        region = Region(os.open(self._paths[0], access | os.O_CLOEXEC), private=True, from_agent=self._shared)
        for name, data in _attached_files.get(self._paths[0], {}).items():
            region.attach_file(name, data)
        return region

    @cached_property
    def timeline(self) -> Timeline:
        return Timeline(os.open(self._paths[1], os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC), "engine")


@lru_cache(maxsize=1)
def _attached_region(
    region: str, timeline: str, kernels: str, shared: bool, releases: bool, inode: int
) -> AttachedRegion:
    return AttachedRegion(region, timeline, kernels, shared, releases)


__all__ = ["AttachedRegion", "layers_config", "layers_of", "loader_config"]
