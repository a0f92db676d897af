"""Adapters of deployed models: each is a model of its own to the gateway's clients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from adapter_fixtures import write_adapter
from cluster_stand_in import StandIn
from gateway_fixtures import MODEL, NAME, Stream
from waiting import until

ASKED = {"prompt": "This function returns", "max_tokens": 12, "temperature": 0}


def test_requests_for_an_adapter_go_to_the_instances_of_its_model(
    cluster: StandIn, start_gateway: Callable[..., Any], start_instance: Callable[..., Any], tmp_path: Path
) -> None:
    write_adapter(tmp_path / "one", MODEL, seed=0, rank=4)
    modules = f"one={tmp_path / 'one'}"
    gateway = start_gateway()
    cluster.deploy(NAME, lora_modules=modules)
    cluster.deploy("other", lora_modules="not names")
    instance = start_instance("--dtype", "float32", "--lora-modules", modules)
    cluster.add(NAME, "instance", instance.url)
    answers = {name: gateway.post("/v1/completions", ASKED | {"model": name}) for name in (NAME, "one", "two")}
    assert [status for status, _ in answers.values()] == [200, 200, 404]
    assert answers["one"][1]["model"] == "one"
    texts = {name: answers[name][1]["choices"][0]["text"] for name in (NAME, "one")}
    assert texts[NAME] != texts["one"]
    stream = Stream(gateway, "/v1/completions", ASKED | {"model": "one", "stream": True})
    stream.rest()
    assert stream.texts() == {0: texts["one"]}
    models = {model["id"]: model for model in gateway.get("/v1/models")[1]["data"]}
    assert {name: model["parent"] for name, model in models.items()} == {NAME: None, "one": NAME, "other": None}
    assert gateway.get("/v1/models/one")[1] == models["one"]
    assert gateway.get("/v1/models/two")[0] == 404
    requests = {"route": "/v1/completions", "status": "200", "model": NAME}
    until(lambda: gateway.metric("medusa_gateway_requests_total", **requests) == 3)  # counted when it has been sent
