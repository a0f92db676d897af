"""The Grafana dashboard and the Prometheus alerts: of metrics that a running function has."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from medusa_adapters.cli.node_metrics import open_listener
from medusa_cluster.gateway.gateway import Gateway, GatewayOptions
from medusa_runtime import __version__
from medusa_runtime.errors import ConfigError
from medusa_runtime.prometheus import expiration
from medusa_runtime.storage.peer_access import PeerAccess
from plain_environ import plain_environ

MONITORING = Path(__file__).parents[2] / "monitoring"
EXAMPLE = Path(__file__).parents[2] / "examples" / "pydoc-lm"
ALERTS = MONITORING / "prometheus-alerts.yaml"
DASHBOARD = MONITORING / "grafana-dashboard.json"
_METRIC = re.compile(r"\bmedusa_[a-z_]+")


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    return [target["expr"] for panel in panels for target in panel["targets"]] + [rule["expr"] for rule in rules]


def test_they_ask_for_metrics_that_a_running_function_and_its_node_agent_have(
    launch: Callable[..., Any], start_node: Callable[..., Any], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    node = start_node("--metrics-port", str(port), "--prewarm", "torch=1")
    client = node.client()
    client.region(str(EXAMPLE)).close()
    (tmp_path / "manifest.json").write_text("{}")
    slow = ("--state", str(tmp_path), "--node-socket", str(tmp_path / "none"))
    instance = launch("--model", str(EXAMPLE), *slow, MEDUSA_PLATFORM="local")
    body = {"prompt": "a", "max_tokens": 2}
    assert instance.request("POST", "/v1/completions", body).status == 200
    page = instance.request("GET", "/metrics").body.decode()
    assert 'medusa_state_artifact_used{artifact="the state bundle",model="pydoc-lm"} 0\n' in page
    versions = rf'runtime="{__version__}",engine="torch",engine_version="{__version__}",weights="[0-9a-f]{{16}}"'
    assert re.search(rf'medusa_info{{{versions},model="pydoc-lm"}} 1\n', page)
    assert 'medusa_node_agent_used{model="pydoc-lm"} 0\n' in page
    assert 'medusa_fetch_retries_total{model="pydoc-lm"} 0\n' in page
    agent = _page(node, port, f'medusa_node_model_in_use_by{{model="{EXAMPLE}"}} 1\n')
    no_session: Any = None
    gateway = Gateway(GatewayOptions(("head:1",), PeerAccess("t" * 16, expires_at_s=9.0)), no_session, "")
    gateway.metrics.of("lm").requests["/v1/completions", 200] += 1
    page += agent + gateway.metrics_text() + "\n".join(expiration("medusa_cluster_node", 9.0))
    documented = (
        (MONITORING.parent / "docs/metrics.md").read_text().partition("## A node agent")[2].partition("\n## ")[0]
    )
    assert set(re.findall(r"`(medusa_node_\w+)`", documented)) == set(re.findall(r"# TYPE (\w+)", agent))
    there = {re.split("[{ ]", line)[0] for line in page.splitlines() if line and not line.startswith("#")}
    labels = {name: set(re.findall(r'(\w+)="', line)) for line in page.splitlines() for name in [line.split("{")[0]]}
    asked = {name for expression in expressions() for name in _METRIC.findall(expression)}
    # A counter that begins with its first event, and gauges of models that a controller has told a gateway of.
    later = {"medusa_process_restarts_total", "medusa_gateway_waiting", "medusa_gateway_ready_instances"}
    assert asked - there <= later
    for expression in expressions():
        for grouped in re.findall(r"by \(([^)]*)\)", expression):
            names = _METRIC.findall(expression)
            for label in (each.strip() for each in grouped.split(",")):
                assert any(label in labels.get(name, set()) for name in names) or set(names) & later, (
                    label,
                    expression,
                )


def test_the_agents_metrics_come_back_when_their_process_ends(start_node: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    node = start_node("--metrics-port", str(port))
    assert "medusa_node_budget_bytes" in _page(node, port)
    for pid in [pid for pid, name in node.children().items() if name == "metrics"]:
        os.kill(pid, signal.SIGKILL)
    assert "medusa_node_budget_bytes" in _page(node, port)  # the agent kept the port open
    assert "the metrics process has ended; starting it again" in node.output()
    with pytest.raises(urllib.error.HTTPError, match="404") as refused:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60)
    refused.value.close()
    with pytest.raises(ConfigError, match=rf"--metrics-port={port} cannot be used: Address already in use"):
        open_listener(port)


def _page(node: Any, port: int, part: str = "") -> str:
    """Return the page, once it has this part: it is made once a second."""
    page = ""
    for _ in range(100):
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read().decode()
            if part in page:
                return page
        time.sleep(0.05)
    pytest.fail(page + node.output())


def test_every_alert_says_what_to_do_and_every_panel_has_its_place() -> None:
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            assert {"alert", "expr", "labels", "annotations"} <= set(rule)
            assert {"summary", "description"} == set(rule["annotations"])
            assert rule["labels"]["severity"] in ("warning", "critical")
    dashboard = json.loads(DASHBOARD.read_text())
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(places) == len(set(places)) == len({panel["id"] for panel in dashboard["panels"]})


def test_each_line_of_the_log_is_an_object_that_names_its_request(tmp_path: Path) -> None:
    (tmp_path / "handler.py").write_text(
        "import logging, os\n\n\ndef handle(request):\n    logging.getLogger('shop').warning('sold')\n"
        "    os.kill(os.getpid(), 9) if request.path == '/end' else 1 / 0\n"
    )
    command = ["serve", "--log-format", "json", "--host", "127.0.0.1", "--port", "0", "--node-socket", "none"]
    environ = plain_environ()
    started = [sys.executable, "-m", "medusa_adapters.cli.main", *command, "--handler", "handler.py"]
    with subprocess.Popen(started, cwd=tmp_path, env=environ, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = json.loads(process.stderr.readline())["message"].rpartition(" ")[2]
        request = urllib.request.Request(url, b"{}", {"X-Request-Id": "order-7"})
        with pytest.raises(urllib.error.HTTPError, match="500") as failed:
            urllib.request.urlopen(request, timeout=60)
        failed.value.close()
        with pytest.raises(OSError, match=r"reset|closed"):
            urllib.request.urlopen(f"{url}/end", timeout=60)
        process.terminate()
        lines = [json.loads(line) for line in process.stderr]
    assert {"time", "level", "process", "logger", "message"} <= set.intersection(*map(set, lines))
    of_request = [line for line in lines if line.get("request_id") == "order-7"]
    assert [(line["logger"], line["level"]) for line in of_request][:1] == [("shop", "warning")]
    assert "ZeroDivisionError" in of_request[1]["message"]
    (ended,) = (line for line in lines if line["logger"] == "gunicorn.error")
    said = "the worker ended (killed by SIGKILL), and with it the requests that were running"
    assert (ended["message"], ended["level"]) == (said, "error")
    failed = subprocess.run([*started[:3], *command, "--model", "/nope"], env=environ, capture_output=True, text=True)
    assert failed.stdout == ""
    assert json.loads(failed.stderr.splitlines()[-1])["code"] == "Storage.NotFound"
