"""The Prometheus alerts, by promtool: each fires on what it is for, and is quiet about what is usual."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from medusa_runtime.prometheus import SECONDS

ALERTS = Path(__file__).parents[2] / "monitoring" / "prometheus-alerts.yaml"

pytestmark = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")

OK, BAD = 'status="200"', 'status="500"'


def first_tokens(after_s: float) -> dict[str, str]:
    """The buckets of an instance whose requests all have their first token after so many seconds."""
    bounds = [*((str(bound), bound) for bound in SECONDS), ("+Inf", float("inf"))]
    return {
        f'medusa_time_to_first_token_seconds_bucket{{le="{text}"}}': f"0+{int(after_s <= bound)}x60"
        for text, bound in bounds
    }


FULL = {"medusa_engine_kv_tokens_used": "99x60", "medusa_engine_kv_tokens": "100x60"}
# Alert, minute, and series of an instance (or agent, or gateway) with a value a minute: where it fires, where not.
CASES: dict[str, tuple[int, dict[str, str], dict[str, str]]] = {
    "MedusaErrors": (
        20,
        {f"medusa_requests_total{{{OK}}}": "0+10x60", f"medusa_requests_total{{{BAD}}}": "0+1x60"},
        {f"medusa_requests_total{{{OK}}}": "0+100x60", f"medusa_requests_total{{{BAD}}}": "0+1x60"},
    ),
    "MedusaRefusesRequests": (
        20, {"medusa_requests_refused_total": "0+1x60"}, {"medusa_requests_refused_total": "9x60"}
    ),
    "MedusaDoesNotBecomeReady": (20, {"medusa_ready": "0x60"}, {"medusa_ready": "0x5 1x60"}),
    "MedusaSlowerStarts": (1500, {"medusa_cold_start_seconds": "1x1440 9x90"}, {"medusa_cold_start_seconds": "1x1500"}),
    "MedusaBundleNotUsed": (5, {"medusa_state_artifact_used": "0x9"}, {"medusa_state_artifact_used": "1x9"}),
    "MedusaNodeAgentNotUsed": (5, {"medusa_node_agent_used": "0x9"}, {"medusa_node_agent_used": "1x9"}),
    # The second one's fetch failed often when it started, hours ago.
    "MedusaStoreFails": (200, {"medusa_fetch_retries_total": "_x180 25x60"}, {"medusa_fetch_retries_total": "25x300"}),
    "MedusaSlowFirstToken": (
        25,
        first_tokens(after_s=11),
        first_tokens(after_s=1),
    ),
    "MedusaKvCacheFull": (
        25,
        {"medusa_engine_preemptions_total": "0+1x60", **FULL},
        {"medusa_engine_preemptions_total": "5x60", **FULL},
    ),
    "MedusaProcessRestarts": (
        30, {"medusa_process_restarts_total": "0+1x60"}, {"medusa_process_restarts_total": "0x10 1x50"}
    ),
    "MedusaProcessHangs": (5, {"medusa_process_hung": "1x9"}, {"medusa_process_hung": "0x9"}),
    "MedusaNodeRefuses": (
        30,
        {'medusa_node_refused_total{code="Node.Refused"}': "0x5 3x60"},
        {'medusa_node_refused_total{code="Node.Failed"}': "0x5 3x60"},
    ),
    "MedusaNodeFetchesFail": (
        30,
        {'medusa_node_fetches_total{result="failed"}': "0+1x60"},
        {'medusa_node_fetches_total{result="failed"}': "5x60"},
    ),
    "MedusaNodeEnginesGivenUp": (5, {"medusa_node_engines_given_up": "1x9"}, {"medusa_node_engines_given_up": "0x9"}),
    "MedusaGatewayErrors": (
        20,
        {f"medusa_gateway_requests_total{{{OK}}}": "0+10x60", f"medusa_gateway_requests_total{{{BAD}}}": "0+1x60"},
        {f"medusa_gateway_requests_total{{{OK}}}": "0+100x60", f"medusa_gateway_requests_total{{{BAD}}}": "0+1x60"},
    ),
    "MedusaGatewayRefuses": (20, {"medusa_gateway_shed_total": "0+1x60"}, {"medusa_gateway_shed_total": "9x60"}),
    "MedusaGatewayWaits": (
        20,
        {"medusa_gateway_waiting": "3x60", "medusa_gateway_ready_instances": "0x60"},
        {"medusa_gateway_waiting": "3x60", "medusa_gateway_ready_instances": "0x5 1x60"},
    ),
    "MedusaControllerAway": (
        5, {"medusa_gateway_controller_away_seconds": "99x9"}, {"medusa_gateway_controller_away_seconds": "0x9"}
    ),
    "MedusaCertificateEnds": (  # after 10 and 20 days
        5,
        {"medusa_cluster_node_certificate_expiration_timestamp_seconds": "864000x9"},
        {"medusa_gateway_certificate_expiration_timestamp_seconds": "1728000x9"},
    ),
}  # fmt: skip


def test_each_alert_has_its_case() -> None:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    assert {rule["alert"] for group in groups for rule in group["rules"]} == set(CASES)


def _case(name: str, minute: int, series: dict[str, str], firing: bool) -> dict[str, Any]:
    labelled = {key if "{" in key else f"{key}{{}}": values for key, values in series.items()}
    return {
        "name": f"{name}: {'fires' if firing else 'quiet'}",
        "interval": "1m",
        "input_series": [
            {"series": key.replace("{", '{model="m",instance="i",', 1), "values": values}
            for key, values in labelled.items()
        ],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}})',
                "eval_time": f"{minute}m",
                "exp_samples": [{"labels": "{}", "value": 1}] if firing else [],
            }
        ],
    }


def test_each_alert_fires_on_what_it_is_for_and_on_nothing_usual(tmp_path: Path) -> None:
    tests = [
        _case(name, minute, series, firing)
        for name, (minute, fires, quiet) in CASES.items()
        for series, firing in ((fires, True), (quiet, False))
    ]
    (tmp_path / "tests.yaml").write_text(
        yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests})
    )
    ran = subprocess.run(["promtool", "test", "rules", tmp_path / "tests.yaml"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
