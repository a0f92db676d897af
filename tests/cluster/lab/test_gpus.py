"""The GPUs of a laboratory's machine: no two of its nodes lend the same one."""

from __future__ import annotations

from pathlib import Path

import pytest
from medusa_cluster.lab.cluster import LabCluster
from medusa_cluster.lab.laboratory import Laboratory
from waiting import until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.root,
]


def environment_of(pid: int) -> list[str]:
    """The variables of a process, which has none between its fork and its own program."""
    return until(Path(f"/proc/{pid}/environ").read_text).split("\0")


def test_nodes_divide_the_gpus_of_their_machine() -> None:
    with Laboratory(3) as lab:
        cluster = LabCluster(lab, gpus=("0", "1", "2", "3"))
        assert cluster.describe_gpus() == "GPUs of this machine: n1 has 0, 3; n2 has 1; n3 has 2"
        seen = []
        for node in lab.nodes:
            cluster.start_node(node)
            seen.append([line for line in environment_of(cluster.servers[node].pid) if line.startswith("CUDA_")])
        order = "CUDA_DEVICE_ORDER=PCI_BUS_ID"
        assert [sorted(found) for found in seen] == [
            [order, "CUDA_VISIBLE_DEVICES=0,3"],
            [order, "CUDA_VISIBLE_DEVICES=1"],
            [order, "CUDA_VISIBLE_DEVICES=2"],
        ]


def test_nodes_for_which_no_gpu_is_left_have_none() -> None:
    with Laboratory(3) as lab:
        cluster = LabCluster(lab, gpus=("GPU-aa",))
        assert cluster.describe_gpus() == "GPUs of this machine: n1 has GPU-aa; none is left for n2, n3"
        cluster.start_node("n2")
        assert "CUDA_VISIBLE_DEVICES=" in environment_of(cluster.servers["n2"].pid)
        assert LabCluster(lab, gpus=()).describe_gpus() is None
