"""More models than the nodes' memory holds: each of them starts when it is asked for."""

from __future__ import annotations

import json
import urllib.request

import pytest
from lab_cluster import EXAMPLE, SETTINGS, ClusterWithoutRay
from medusa_cluster.lab.laboratory import Laboratory
from waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.root, pytest.mark.slow]

NAMES = ("a", "b", "c")
BUDGET = "14MB"  # for two of them


def completion(url: str, model: str) -> str:
    asked = {"model": model, "prompt": "This function returns", "max_tokens": 4, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(asked).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def test_a_model_without_a_place_in_the_pool_starts_in_that_of_another() -> None:
    with Laboratory(1, "800mbit", origin=dict.fromkeys(NAMES, EXAMPLE)) as lab:
        cluster = ClusterWithoutRay(lab, memory_budget=BUDGET)
        cluster.start()
        cluster.start_gateway(8080)
        url = lab.forward(0, "switch", 8080)
        for name in NAMES:
            cluster.deploy(name, max=1, settings=SETTINGS)

        def held() -> set[str]:
            (node,) = cluster.status()["nodes"]
            return {model["url"][-1] for model in node["models"] if model["state"] == "done"}

        until(lambda: len(held()) == 2, cluster.told)
        (missing,) = set(NAMES) - held()
        answers = {missing: completion(url, missing)}
        assert missing in held(), cluster.told()
        answers |= {name: completion(url, name) for name in NAMES}
        assert len(set(answers.values())) == 1  # they are one model under three names
        cluster.end()
