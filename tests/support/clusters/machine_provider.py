"""A cloud for Ray's autoscaler whose machines are files: whoever watches the folder starts and ends what runs on them.

Ray loads `Machines` in the process of its autoscaler, by the name in the configuration.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ray.autoscaler.node_provider import NodeProvider


class Machines(NodeProvider):  # type: ignore[misc]  # Ray's classes have no types
    """Each machine is `<folder>/<number>.json`: its tags, its address, and whether it is wanted still."""

    def __init__(self, provider_config: dict[str, Any], cluster_name: str) -> None:
        super().__init__(provider_config, cluster_name)
        self._folder = Path(provider_config["folder"])

    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        found = {path.stem: json.loads(path.read_text()) for path in sorted(self._folder.glob("*.json"))}
        return [
            name
            for name, machine in found.items()
            if machine["wanted"] and tag_filters.items() <= machine["tags"].items()
        ]

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> None:
        for _ in range(count):
            number = len(list(self._folder.glob("*.json")))
            self._write(str(number), {"tags": tags, "host": f"127.0.0.{number + 2}", "wanted": True})

    def terminate_node(self, node_id: str) -> None:
        self._write(node_id, self._read(node_id) | {"wanted": False})

    def set_node_tags(self, node_id: str, tags: dict[str, str]) -> None:
        machine = self._read(node_id)
        self._write(node_id, machine | {"tags": machine["tags"] | tags})

    def node_tags(self, node_id: str) -> dict[str, str]:
        tags: dict[str, str] = self._read(node_id)["tags"]
        return tags

    def is_running(self, node_id: str) -> bool:
        return bool(self._read(node_id)["wanted"])

    def is_terminated(self, node_id: str) -> bool:
        return not self.is_running(node_id)

    def internal_ip(self, node_id: str) -> str:
        return str(self._read(node_id)["host"])

    external_ip = internal_ip

    def _read(self, node_id: str) -> dict[str, Any]:
        machine: dict[str, Any] = json.loads((self._folder / f"{node_id}.json").read_text())
        return machine

    def _write(self, node_id: str, machine: dict[str, Any]) -> None:
        path = self._folder / f"{node_id}.json"
        new = path.with_suffix(".new")
        new.write_text(json.dumps(machine))
        os.replace(new, path)
