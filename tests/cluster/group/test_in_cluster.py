"""A cluster in a laboratory starts a model as a group: the group answers, and one instance goes on."""

from __future__ import annotations

import pytest
from lab_cluster import GROUP_LINK, GROUP_SLO_S, ClusterWithoutRay, ClusterWithRay, completion, until
from medusa_cluster.lab.laboratory import Laboratory
from medusa_cluster.lab.link import Link

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.root,
    pytest.mark.slow,
]


@pytest.mark.parametrize("kind", [ClusterWithoutRay, ClusterWithRay])
def test_a_group_answers_and_becomes_an_instance(kind: type[ClusterWithRay]) -> None:
    with Laboratory(3, GROUP_LINK, origin_link=Link(50e6)) as lab:
        cluster = kind(lab)
        cluster.start()
        for node in lab.nodes:
            until(lambda node=node: cluster.is_warm(node))
        cluster.start_gateway(8080)
        url = lab.forward(0, "switch", 8080)
        (asked,) = cluster.ask_for_a_group(url, "torch")
        by_group = asked.result()
        assert "group-alone" not in cluster.kinds(), cluster.told()
        until(lambda: "group-consolidated" in cluster.kinds())
        until(lambda: len(cluster.instances()) == 1, cluster.told)
        assert completion(url) == by_group
        until(lambda: cluster.status()["models"][0]["starts"], cluster.told)
        start = cluster.status()["models"][0]["starts"][0]
        assert start["workers"] > 1
        assert 0 < start["predicted_s"] < GROUP_SLO_S
        cluster.call("remove", name="m")
        cluster.end()
