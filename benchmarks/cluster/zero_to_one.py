"""The time to the first token of a model without an instance, through the cluster and from `medusa serve` alone.

Both take the region and a pre-warmed engine from the same agent. The difference is what the cluster adds: the gateway,
the controller, the node actor, the node server, and the request's way through them.

If other work disturbs both, two more rows are more exact than the difference. ``before_exec_ms`` is the time from the
request to the exec of `medusa serve`, and ``after_token_ms`` the time from its first token to the client's.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from medusa_adapters.bench.openai_client import stream
from medusa_adapters.bench.served_instance import stages_from_json
from medusa_cluster.json_lines import call
from medusa_cluster.lab.cluster import DATA_PORT, LabCluster
from medusa_cluster.lab.laboratory import SWITCH, Laboratory
from medusa_cluster.lab.link_speed import LinkSpeed
from medusa_runtime.errors import LabError
from medusa_runtime.timeline import Stage

from benchmarks.cluster.options import Options
from benchmarks.result_row import row
from benchmarks.waiting import until

_NAME = "model"
_NODE = "n1"
_GATEWAY_PORT = 8080
_PROMPT = {"prompt": "This function returns", "max_tokens": 4, "temperature": 0}
_WITHIN_S = 120.0
_QUIET_S = 1.0  # how long to wait before a sample once an engine is warm


def rows(options: Options) -> list[dict[str, Any]]:
    """Measure both in turn on one node that does nothing else. Raises LabError if their answers differ."""
    link = LinkSpeed(options.link_bytes_per_s)
    with Laboratory(1, link, cpus=options.cpus, origin={_NAME: options.model}) as lab:
        cluster = LabCluster(lab, ["--prewarm", "torch=1"])
        try:
            cluster.start()
            cluster.start_gateway(_GATEWAY_PORT)
            alone, through = _samples(lab, cluster, options.runs)
        finally:
            cluster.stop()
    return [
        row("zero_to_one", "added_ms", "ms", [one.ttft_ms - other for one, other in zip(through, alone, strict=True)]),
        row("zero_to_one", "ttft_ms", "ms", [sample.ttft_ms for sample in through]),
        row("zero_to_one", "alone_ttft_ms", "ms", alone),
        row("zero_to_one", "before_exec_ms", "ms", [sample.before_exec_ms for sample in through]),
        row("zero_to_one", "after_token_ms", "ms", [sample.after_token_ms for sample in through]),
    ]


class Sample(NamedTuple):
    """The times of a start through the cluster. All processes of the machine share one clock."""

    ttft_ms: float
    before_exec_ms: float
    after_token_ms: float


def _samples(lab: Laboratory, cluster: LabCluster, runs: int) -> tuple[list[float], list[Sample]]:
    alone, through = [], []
    url = f"{lab.origin_url}/{_NAME}"
    socket = str(lab.node_folder(_NODE) / "node.sock")
    flags = ["--model", url, "--served-model-name", _NAME, "--node-socket", socket]
    request = json.dumps(_PROMPT | {"model": _NAME})
    command = [sys.executable, "-m", "benchmarks.cluster.alone", request, *flags]
    with lab.popen(_NODE, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as runner:
        assert runner.stdin
        try:
            _line(runner)
            for number in range(runs + 1):
                _settle(lab, cluster)
                runner.stdin.write("\n")
                runner.stdin.flush()
                took_ms, text = json.loads(_line(runner))
                _settle(lab, cluster)
                sample, cluster_text = _through_gateway(lab, cluster)
                if text != cluster_text:
                    raise LabError(f"the cluster answered {cluster_text!r}; expected {text!r}")
                if number:  # the first starts also fetch the model and read code from disk, so they do not count
                    alone.append(took_ms)
                    through.append(sample)
        finally:
            runner.stdin.close()
    return alone, through


def _settle(lab: Laboratory, cluster: LabCluster) -> None:
    """Deploy the model again, without an instance, and wait until an engine is warm."""
    if cluster.status()["models"]:
        cluster.call("remove", name=_NAME)
    until(lambda: not any(node["instances"] for node in cluster.status()["nodes"]), _WITHIN_S, "no instance")
    cluster.deploy(_NAME, max=1)
    control = lab.node_folder(_NODE) / "control.sock"

    def idle() -> bool:
        status = asyncio.run(call(control, {"op": "status"}))
        complete = [model["state"] for model in status["models"]] == ["done"]
        return complete and bool(status["agent"]["engines"]["torch"]["warm"])

    until(idle, _WITHIN_S, "a quiet cluster")
    time.sleep(_QUIET_S)


def _through_gateway(lab: Laboratory, cluster: LabCluster) -> tuple[Sample, str]:
    connection = http.client.HTTPConnection(lab.address(SWITCH), _GATEWAY_PORT, timeout=_WITHIN_S)
    with lab.network(SWITCH):
        connection.connect()
    began_ns = time.monotonic_ns()
    try:
        completion = stream(connection, _PROMPT | {"model": _NAME})
    finally:
        connection.close()
    stages = _stages(lab, cluster)
    exec_ns = next(stage.start_ns for stage in stages if (stage.process, stage.name) == ("supervisor", "exec"))
    token_ns = min(stage.end_ns for stage in stages if stage.name == "first_token")
    times = (completion.first_token_ns - began_ns, exec_ns - began_ns, completion.first_token_ns - token_ns)
    return Sample(*(nanoseconds / 1e6 for nanoseconds in times)), completion.text


def _stages(lab: Laboratory, cluster: LabCluster) -> Sequence[Stage]:
    """Return the stages of the only instance's start, from its own report."""
    (instance,) = cluster.call("routes")["models"][_NAME]["instances"]
    connection = http.client.HTTPConnection(lab.address(_NODE), DATA_PORT, timeout=_WITHIN_S)
    with lab.network(SWITCH):
        connection.connect()
    try:
        path = f"/instances/{instance['id']}/timeline"
        connection.request("GET", path, headers={"Authorization": f"Bearer {cluster.token}"})
        return stages_from_json(json.loads(connection.getresponse().read()))
    finally:
        connection.close()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    line = process.stdout.readline()
    if not line:
        raise LabError("the process that starts `medusa serve` alone has ended; its message is above")
    return line
