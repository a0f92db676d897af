"""Fleets as YAML: what is read, what is refused, and that the schema says the same."""

from __future__ import annotations

import copy
import json
from collections import Counter
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from medusa_cluster.simulation.experiment import simulate
from medusa_cluster.simulation.fleet_file import parse, read_simulation_plan
from medusa_cluster.simulation.profiles import PROFILES
from medusa_cluster.simulation.strategy import STRATEGIES
from medusa_cluster.simulation.trace import LENGTHS
from medusa_runtime.errors import ConfigError

EXAMPLE = Path(__file__).parents[3] / "examples/fleet/two-testbeds.yaml"
PLAN: dict[str, Any] = {
    "machines": [{"name": "n", "count": 2, "link": "16Gbit", "memory": "188GB", "device": "a10"}],
    "models": [{"name": "m", "count": 2, "profile": "llama2-7b@a10", "slo": {"ttft": 7.5}}],
    "requests": {"rate": 1, "cv": [1, 8]},
}
OWN = {
    "name": "own",
    "size": "1.6GB",
    "layers": 16,
    "times": {"container": 0.1, "load": "8GB/s", "prefill": 0.02, "prefill_per_token": 0.0001, "decode": 0.03},
}


def schema() -> Any:
    return json.loads(resources.files("medusa_cluster.simulation").joinpath("data/fleet.schema.json").read_text())


def changed(path: str, value: object) -> dict[str, Any]:
    plan = copy.deepcopy(PLAN)
    found: Any = plan
    *steps, last = path.split(".")
    for step in steps:
        found = found[int(step)] if step.isdecimal() else found[step]
    if value is None:
        del found[last]
    else:
        found[last] = value
    return plan


def test_a_plan_is_read() -> None:
    plan = parse(PLAN)
    assert plan.fleet.machines[0].link_bytes_per_s == 2e9
    assert plan.fleet.machines[0].memory_bytes == 188 * 10**9
    assert [model.name for model in plan.fleet.models] == ["m-0", "m-1"]
    assert plan.fleet.models[0].ttft_slo_s == 7.5
    assert (plan.workload.rates, plan.workload.cvs) == ((1.0,), (1.0, 8.0))
    assert len(plan.workload.requests(plan.fleet.models, plan.lengths, 1.0, 1.0)) > 3000


@pytest.mark.parametrize("link", ["16Gbit", "16Gbps", "16 Gbit/s", "2GB/s", "2GB", 2e9])
def test_a_link_is_read_as_people_write_it(link: str | float) -> None:
    assert parse(changed("machines.0.link", link)).fleet.machines[0].link_bytes_per_s == 2e9


def test_a_model_of_ones_own() -> None:
    plan = parse(changed("models", [OWN]))
    profile = plan.fleet.models[0].profile
    assert (profile.size_bytes, profile.layers, profile.stages.load_bytes_per_s) == (1_600_000_000, 16, 8e9)
    assert profile.speed.prefill(100) == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("machines", [], r"fleet: machines: expected a list with at least one entry, found \[\]"),
        ("machines", None, r"fleet: expected machines, a list, found none"),
        (
            "machines.0.link",
            "fast",
            r"fleet: machines\[0\]\.link: expected a size above 0 such as 12\.5GB or 16Gbit, found \"fast\"",
        ),
        ("machines.0.link", None, r"fleet: machines\[0\]: expected link"),
        ("machines.0.link", 0, r"machines\[0\]\.link: expected a size above 0 .*, found 0"),
        ("machines.0.link", "10Gb", r"such as 12\.5GB or 16Gbit \(a small b may be a bit or a byte\), found \"10Gb\""),
        ("goal", 200, r"fleet: goal: expected a number of at least 0 and at most 100, found 200"),
        ("goal", 0.95, r"fleet: goal: expected percent, such as 95, found 0\.95"),
        ("machines.0.device_memory", "much", r"device_memory: expected a size such as .*, found \"much\""),
        ("machines.0.count", 0, r"machines\[0\]\.count: expected a whole number of at least 1, found 0"),
        ("machines.0.gpus", 4, r"machines\[0\]: unknown key 'gpus'; known are count"),
        ("models.0.profile", "gpt", r"models\[0\]\.profile: expected one of opt-2\.7b@a10"),
        ("models.0.slo", 5, r"models\[0\]\.slo: expected a mapping, found 5"),
        ("models.0.slo.ttft", "soon", r"slo\.ttft: expected a number of at least 0, in seconds, found \"soon\""),
        ("models.0.min", True, r"models\[0\]\.min: expected a whole number of at least 0, found true"),
        ("requests.rate", 0, r"requests\.rate: expected a number above 0, or a list of them, found 0"),
        ("requests.rate", None, r"requests: expected rate"),
        ("requests.arrivals", "uniform", r"requests\.arrivals: expected gamma, poisson"),
        ("strategies", ["medusa", "magic"], r"fleet: strategies\[1\]: expected one of medusa, .*, found \"magic\"$"),
        ("strategies", [], r"fleet: strategies: expected a list of medusa"),
        ("strategies", ["serverlesslm"], r"found \"serverlesslm\"; did you mean 'serverlessllm'\?"),
        ("models.0.profile", "llama2-7b@a10g", r"did you mean 'llama2-7b@a100?'\?"),
        ("requests.second", 60, r"requests: unknown key 'second'; known are .*; did you mean 'seconds'\?"),
        ("device", "x", r"fleet: unknown key 'device'"),
    ],
)
def test_a_mistake_is_named_with_its_place_and_the_schema_sees_it_too(path: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(changed(path, value))
    jsonschema = pytest.importorskip("jsonschema")
    if path not in ("requests.arrivals", "requests.rate"):  # a file's name, and rates of a recorded trace
        assert not jsonschema.Draft202012Validator(schema()).is_valid(changed(path, value))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("models.0.device", "h100", r"models\[0\]\.device: expected a device of the machines \(a10\), found \"h100\""),
        ("models", [{"name": "m", "profile": "llama2-7b@a10"}] * 2, "expected different names, found 'm' twice"),
        (
            "machines.0.memory",
            "8GB",
            r"models\[0\]\.profile: expected weights that fit .* \(at most 8 GB\), found \"12\.5",
        ),
        (
            "machines.0.device_memory",
            "14GB",
            r"models\[0\]\.profile: expected weights that fit in a device .* \(at most 11\.9 GB, .*, found \"12\.5",
        ),
        ("models.0.min", 3, r"fleet: models: expected a min of at most 2 instances together, .* found 6"),
        ("models", [{**OWN, "min": 2, "max": 1}], r"models\[0\]\.min: expected at most max \(1\), found 2"),
        ("requests.seconds", 0, r"requests\.seconds: expected a number above 0, found 0"),
        (
            "requests",
            {"arrivals": "poisson", "rate": 1, "cv": 8},
            r"requests\.cv: expected none, as only gamma arrivals have one and these are poisson, found 8",
        ),
    ],
)
def test_mistakes_that_no_schema_sees(path: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(changed(path, value))


@pytest.mark.parametrize(
    ("path", "misspelt", "message"),
    [
        ("models", "modls", r"fleet: expected models, a list, found none, but 'modls'; did you mean 'models'\?"),
        ("machines.0.link", "lnik", r"machines\[0\]: expected link, .*, found none, but 'lnik'; did you mean 'link'\?"),
        ("machines.0.link", "wire", r"machines\[0\]: expected link, .*, found none$"),
    ],
)
def test_a_misspelt_key_is_named_where_the_right_one_is_missing(path: str, misspelt: str, message: str) -> None:
    plan = changed(path, None)
    parent = plan["machines"][0] if "." in path else plan
    parent[misspelt] = []
    with pytest.raises(ConfigError, match=message):
        parse(plan)


def test_a_device_of_machines_that_name_none() -> None:
    plan = changed("machines.0.device", None)
    plan["models"][0]["device"] = "a10"
    with pytest.raises(ConfigError, match=r"models\[0\]\.device: expected none, as no machine names its device"):
        parse(plan)


def test_a_run_without_requests_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected a longer time or a higher rate, found no request at 0\.001 a"):
        simulate(parse(changed("requests", {"rate": 0.001, "seconds": 1})), "medusa", 0.001, 1.0)


def test_the_schema_accepts_what_is_read_and_knows_all_names() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    yaml = pytest.importorskip("yaml")
    validator = jsonschema.Draft202012Validator(schema())
    validator.check_schema(schema())
    validator.validate(PLAN)
    validator.validate(changed("models", [OWN]))
    validator.validate(yaml.safe_load(EXAMPLE.read_text()))
    model = schema()["properties"]["models"]["items"]["properties"]
    assert model["profile"]["enum"] == list(PROFILES)
    assert model["lengths"]["enum"] == list(LENGTHS)
    assert schema()["properties"]["strategies"]["items"]["enum"] == list(STRATEGIES)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml could not be read: No such file or directory$"):
        read_simulation_plan(tmp_path / "none.yaml")
    path = tmp_path / "fleet.yaml"
    path.write_text("machines:\n  - {count: 8; devices: 4}\n")
    with pytest.raises(ConfigError, match=r"fleet\.yaml, line 2, column 23: expected YAML: expected ',' or '}'"):
        read_simulation_plan(path)
    path.write_text("- 1")
    with pytest.raises(ConfigError, match="expected a mapping"):
        read_simulation_plan(path)


def test_a_recorded_trace_is_dealt_among_the_models_of_a_fleet_of_ten_thousand_devices() -> None:
    plan = read_simulation_plan(EXAMPLE.with_name("ten-thousand-devices.yaml"))
    assert plan.fleet.devices == 10_000
    assert plan.workload.seconds == 86_400
    workload = replace(plan.workload, seconds=60)
    requests = workload.requests(plan.fleet.models, plan.lengths, 20, 1)
    counts = Counter(request.model for request in requests)
    assert len(requests) > 500
    assert len(counts) > 100
    assert counts.most_common(1)[0][0] == 0
    assert simulate(replace(plan, workload=workload), "medusa", 20, 1).unanswered == 0
