"""Requests from the laboratory's switch to a gateway there."""

from __future__ import annotations

import http.client
import json
from contextlib import closing
from typing import Any

from medusa_cluster.lab.cluster import LabCluster
from medusa_cluster.lab.laboratory import SWITCH
from medusa_runtime.errors import LabError

_WITHIN_S = 600.0


def ask(cluster: LabCluster, port: int, body: dict[str, Any]) -> bytes:
    """The gateway's answer to a completion. Raises LabError for an error, OSError and HTTPException without one."""
    with closing(http.client.HTTPConnection(cluster.lab.address(SWITCH), port, timeout=_WITHIN_S)) as connection:
        with cluster.lab.network(SWITCH):
            connection.connect()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
    if response.status != 200:
        raise LabError(f"status {response.status}: {answer[:300]!r}")
    return answer
