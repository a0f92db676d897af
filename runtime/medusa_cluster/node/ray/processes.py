"""The command and the environment that start Ray's processes on one node.

``ray start --block`` ends its processes when one of them dies. If it is killed itself, the kernel ends them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress

from ..settings import NodeServerSettings

NODE_LABEL = "medusa-node"
PORT_LABEL = "medusa-port"  # the node server's port, on the address that Ray knows
HEAD_LABEL = "medusa-head"  # where the controller runs; not by name, since a new head may have another name
NODE_RESOURCE = "medusa_node"  # one on each node, so that Ray's autoscaler can be asked for more nodes
CONTROL_SOCKET_VARIABLE = "MEDUSA_CLUSTER_CONTROL_SOCKET"
LEAST_NODES_VARIABLE = "MEDUSA_CLUSTER_LEAST_NODES"  # for the controller; without it, it gives no nodes back
STARTED_LINE = "Ray runtime started"

_WORKER_PORTS = 10  # the offset of the first worker's port

_LIGHT_OPTIONS = {
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_enable_timeline": "0",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    "RAY_agent_register_timeout_ms": "100000",  # Ray's agents need 15 s to start on busy cores
    "RAY_worker_niceness": "0",  # the node actor of a busy node must not wait behind its engines
    "RAY_worker_oom_score_adjustment": "0",  # nor be killed before them when memory runs out; Ray's default is 1000
    "RAY_memory_monitor_refresh_ms": "0",
    # An idle head logs 90 MB a day, into a folder that is memory on most machines. Ray would keep 3 GB of each file.
    "RAY_ROTATION_MAX_BYTES": str(4 << 20),
    "RAY_ROTATION_BACKUP_COUNT": "1",
}

# Variables by which an autoscaler recognizes a node as one of its machines. It sets them when it starts the machine.
_AUTOSCALER_VARIABLES = ("RAY_CLOUD_INSTANCE_ID", "RAY_NODE_TYPE_NAME", "RAY_enable_autoscaler_v2")

# With these, Ray notices a dead node after 1.4 s, and one that hangs after 4.2 s. With shorter ones it gives up busy
# nodes.
_HEALTH_CHECK = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


def ray_command(settings: NodeServerSettings, head_ray_address: str | None) -> list[str]:
    """Return the command line. ``head_ray_address`` is HOST:PORT of the head's Ray, or None on the head."""
    port = settings.ray_port
    labels = f"{NODE_LABEL}={settings.name},{PORT_LABEL}={settings.data_port}" + (
        f",{HEAD_LABEL}=true" if settings.is_head else ""
    )
    command = [sys.executable, "-m", "medusa_cluster.node.ray.start", "start", "--block", "--disable-usage-stats"]
    if head_ray_address is None:
        command += ["--head", f"--port={port}", "--include-dashboard=false"]
        config = settings.autoscaling_config
        command += ["--no-monitor"] if config is None else [f"--autoscaling-config={config}"]
    else:
        command += [f"--address={head_ray_address}"]
    return [
        *command,
        f"--node-ip-address={settings.host}",
        f"--temp-dir={settings.ray_folder}",
        f"--labels={labels}",
        f"--resources={json.dumps({NODE_RESOURCE: 1})}",
        "--num-cpus=0",
        f"--num-gpus={len(settings.gpus)}",
        "--object-store-memory=80000000",
        "--include-log-monitor=false",
        f"--node-manager-port={port + 1}",
        f"--object-manager-port={port + 2}",
        f"--runtime-env-agent-port={port + 3}",
        f"--dashboard-agent-grpc-port={port + 4}",
        f"--dashboard-agent-listen-port={port + 5}",
        f"--metrics-export-port={port + 6}",
        f"--min-worker-port={port + _WORKER_PORTS}",
        f"--max-worker-port={port + 39}",
    ]


def ray_environment(settings: NodeServerSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for Ray's processes and drivers. From it a node actor knows its control socket."""
    kept = {name: value for name, value in environ.items() if not name.startswith(("RAY_", "MEDUSA_"))}
    tuned = {name: value for name, value in environ.items() if name.startswith("RAY_health_check_")}
    machine = {name: environ[name] for name in _AUTOSCALER_VARIABLES if name in environ}
    found = kept | _LIGHT_OPTIONS | _HEALTH_CHECK | tuned | machine
    found |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(settings.token_file),
        "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
        CONTROL_SOCKET_VARIABLE: str(settings.control_socket),
        "PYTHONUNBUFFERED": "1",
    }
    found |= settings.log_environment
    if settings.is_head:
        found |= {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(settings.folder / "gcs")}
        if settings.least_nodes is not None:
            found[LEAST_NODES_VARIABLE] = str(settings.least_nodes)
    if settings.tls is not None:
        found |= {
            "RAY_USE_TLS": "1",
            "RAY_TLS_SERVER_CERT": str(settings.tls.certificate),
            "RAY_TLS_SERVER_KEY": str(settings.tls.key),
            "RAY_TLS_CA_CERT": str(settings.tls.authority),
        }
    return found


def forget_address(settings: NodeServerSettings) -> None:
    """Remove the file in which Ray keeps the cluster's address, so that the head can start again.

    With the file, Ray refuses to start a head while any raylet of this machine names that address.
    """
    with suppress(FileNotFoundError):
        os.unlink(settings.ray_folder / "ray_current_cluster")
