"""Requests to a gateway in the network of the laboratory's switch."""

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
    """Send a completion request to the gateway, and return the body of its answer.

    Raises LabError for an answer that is an error, and OSError or HTTPException when there is no answer.
    """
    with closing(http.client.HTTPConnection(cluster.lab.address(SWITCH), port, timeout=_WITHIN_S)) as connection:
        with cluster.lab.network(SWITCH):
            connection.connect()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
    if response.status != 200:
        raise LabError(f"status {response.status}: {answer[:300]!r}")
    return answer
