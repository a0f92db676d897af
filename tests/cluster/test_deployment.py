"""What a deployment says of how its model may start."""

from __future__ import annotations

from typing import Any

import pytest
from medusa_cluster.deployment import Deployment
from medusa_command import medusa
from medusa_runtime.config import from_env
from medusa_runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("engine", "settings"),
    [("torch", {}), ("vllm", {}), ("vllm", {"tensor_parallel": "1"}), ("vllm", {"vllm_args": "--max-num-seqs 4"})],
)
def test_workers_may_share_a_model_that_medusas_routes_answer_for(engine: str, settings: dict[str, Any]) -> None:
    assert Deployment("m", "/m", engine=engine, settings=settings).may_be_shared()


@pytest.mark.parametrize(
    ("engine", "settings"),
    [
        ("torch", {"lora_modules": "sql=/adapters/sql"}),
        ("torch", {"allow_lora": "/adapters/"}),
        ("vllm", {"tensor_parallel": "2"}),
        ("vllm", {"vllm_args": "--enable-lora"}),
        ("vllm", {"vllm_args": "'"}),  # refused by the instance
        ("none", {}),
    ],
)
def test_what_no_group_can_do_starts_as_one_instance(engine: str, settings: dict[str, Any]) -> None:
    assert not Deployment("m", "/m", engine=engine, settings=settings).may_be_shared()


@pytest.mark.parametrize("seconds", [True, 10**400, float("inf"), float("nan"), 0, -1, "1"])
def test_an_slo_is_a_number_of_seconds(seconds: Any) -> None:
    with pytest.raises(ConfigError, match="ttft_slo_s: expected seconds above 0"):
        Deployment.from_json({"name": "m", "url": "/m", "ttft_slo_s": seconds})


@pytest.mark.parametrize("weight", [True, 10**400, float("inf"), float("nan"), 0, -1, "1", None])
def test_a_weight_is_a_number(weight: Any) -> None:
    with pytest.raises(ConfigError, match=r"weight: expected a number from 0\.01 to 100, found"):
        Deployment.from_json({"name": "m", "url": "/m", "weight": weight})


@pytest.mark.parametrize(("engine", "whole"), [("group", "torch"), ("vllm-group", "vllm")])
def test_the_engine_of_a_groups_workers_is_no_engine_of_a_deployment(engine: str, whole: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine: expected {whole}, .* found '{engine}'"):
        Deployment.from_json({"name": "m", "url": "/m", "engine": engine})


def test_a_deployment_runs_its_model_itself() -> None:
    with pytest.raises(ConfigError, match=r"engine: expected one that runs the model itself, .* found 'cluster'"):
        Deployment.from_json({"name": "m", "url": "/m", "engine": "cluster"})
    refused = medusa("cluster", "deploy", "m", "--model", "s3://b/m", "--engine", "cluster")
    assert refused.returncode == 2
    assert "--engine: expected one of torch, vllm, found 'cluster'" in refused.stderr


def test_users_are_not_offered_the_engine_of_a_groups_workers() -> None:
    assert from_env({"MEDUSA_ENGINE": "group"}).engine == "group"  # as a node starts a worker
    with pytest.raises(ConfigError, match=r"expected one of torch, cluster, (vllm, )?none$"):
        from_env({"MEDUSA_ENGINE": "groups"})


@pytest.mark.parametrize(
    ("name", "setting", "said"),
    [
        ("m", "max-tokens=3", "--set: expected an option of medusa serve such as max_concurrency, found 'max_tokens'"),
        ("m", "port=1", "--set: port is chosen for each instance by its node"),
        ("m", "max-concurrency=many", "--set: max_concurrency='many' cannot be used"),
        ("settings:", "max-concurrency=2", "name: expected up to 64 letters, digits and . _ -, found 'settings:'"),
    ],
)
def test_a_bad_flag_of_deploy_is_named(name: str, setting: str, said: str) -> None:
    done = medusa("cluster", "deploy", name, "--model", "s3://b/m", "--set", setting)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_deployment_has_no_handler() -> None:
    """No gateway would pass a request on to it, and instances would end as often as its load raises."""
    with pytest.raises(ConfigError, match=r"settings: handler: .* medusa serve --engine cluster"):
        Deployment.from_json({"name": "m", "url": "/m", "settings": {"handler": "handler.py"}})
