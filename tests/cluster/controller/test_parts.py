"""The controller's parts that need no nodes."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import pytest
from medusa_cluster.controller.nodes import Gateway, KnownNode
from medusa_cluster.controller.plan_file import ClusterPlan, read_plan, write_plan
from medusa_cluster.controller.reports import Loads
from medusa_cluster.controller.state import State
from medusa_cluster.controller.status import chains
from medusa_cluster.controller.versions import Versions
from medusa_cluster.deployment import Deployment


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert read_plan(path) == ClusterPlan()
    plan = ClusterPlan(
        {"m": Deployment("m", "s3://b/m", settings={"threads": "2"})}, {"n": 2.5, "o": None}, {"s3://b/m": ["1"]}
    )
    write_plan(path, plan)
    assert read_plan(path) == plan
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text('{"deployments": [], "draining": ["n"], "versions": {}}')  # as it was written before
    assert read_plan(path) == ClusterPlan(draining={"n": None})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"deployments": [1], "draining": [], "versions": {}}',
        '{"deployments": [{"name": 1}], "draining": [], "versions": {}}',
    ],
)
def test_a_plan_that_cannot_be_read_is_kept_aside(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    assert read_plan(path) == ClusterPlan()
    assert path.with_suffix(".unreadable").read_text() == text


def test_a_plan_is_used_without_the_deployments_that_this_version_refuses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A deployment that this version refuses must not end the instances of others."""
    path, plan = tmp_path / "plan.json", ClusterPlan({"m": Deployment("m", "s3://b/m")}, {"n": 1.0})
    write_plan(path, ClusterPlan({"x": Deployment("x", "s3://b/x", min=2, max=1), **plan.deployments}, plan.draining))
    text = path.read_text()
    for _ in range(2):
        assert read_plan(path) == plan
    assert 'used without "x" (expected min up to max' in caplog.text
    write_plan(path, plan)
    assert path.with_suffix(".unreadable").read_text() == text


def test_a_plan_is_waited_for_while_its_disk_gives_errors(tmp_path: Path) -> None:
    """It was set aside, with all deployments, for an error that passes."""
    path, plan = tmp_path / "plan.json", ClusterPlan({"m": Deployment("m", "s3://b/m")})
    path.symlink_to(path)  # ELOOP, in place of EIO, ESTALE or EMFILE
    mend = threading.Timer(0.2, write_plan, (path, plan))
    mend.start()
    assert read_plan(path) == plan
    mend.join()


def test_loads_are_summed_and_die_with_their_gateway() -> None:
    loads = Loads()
    gateways = [
        Gateway("a", None, 10.0, {"m": {"waiting": 1, "running": 2, "longest_wait_s": 0.5}}),
        Gateway(
            "b",
            None,
            10.0,
            {
                "m": {
                    "waiting": 2,
                    "longest_wait_s": 0.7,
                    "tokens_per_s": 5,
                    "prefilled_per_s": 4,
                    "unanswered_tokens": 9,
                },
                "n": {},
            },
        ),
        Gateway("gone", None, 5.0, {"m": {"waiting": 100}}),
        Gateway("late", None, 10.0, {"removed": {"waiting": 1}}),
    ]
    found = loads.summed(gateways, 10.5, ("m", "n"))
    load = found["m"]
    assert (load.waiting, load.running, load.tokens_per_s, load.prefilled_per_s) == (3, 2, 5, 4)
    assert (load.longest_wait_s, load.unanswered_tokens) == (0.7, 9)
    assert load.last_request_s == 10.5
    assert found["n"].last_request_s == -math.inf
    assert set(found) == {"m", "n"}
    later = loads.summed([], 20.0, ("m", "n"))["m"]
    assert (later.waiting, later.last_request_s) == (0, 10.5)
    loads.keep(("n",))
    assert loads.summed([], 20.0, ("n",)) == {}


def _copy(version: str) -> dict[str, str]:
    return {"url": "u", "version": version}


def test_the_version_that_appeared_last_is_the_current_one() -> None:
    versions = Versions({})
    assert versions.current("u", [_copy("1")]) == ""
    assert versions.see([_copy("1")], {"u"})
    assert not versions.see([_copy("1")], {"u"})
    assert versions.see([_copy("2")], {"u"})
    assert versions.current("u", [_copy("1"), _copy("2")]) == "2"
    versions.see([_copy("1")], {"u"})  # it comes back with what it had
    assert Versions(versions.to_json()).current("u", [_copy("1"), _copy("2")]) == "2"
    assert versions.current("u", [_copy("1")]) == "1"
    versions.see([], set())
    assert versions.to_json() == {}


def test_copies_of_lost_nodes_do_not_count() -> None:
    state = State(ClusterPlan())
    for name, lost_at in (("a", None), ("b", 1.0), ("c", None)):
        state.nodes[name] = KnownNode(name, {"models": [_copy(name), {"url": f"u{name}"}]}, lost_at=lost_at)
    assert state.copies() == {
        "u": {"a": _copy("a"), "c": _copy("c")},
        "ua": {"a": {"url": "ua"}},
        "uc": {"c": {"url": "uc"}},
    }


def test_hops_are_joined_into_chains() -> None:
    hops = [("u", "b", "c"), ("u", "a", "b"), ("v", "a", "c"), ("u", "a", "d")]
    assert chains(hops) == [
        {"url": "u", "nodes": ["a", "b", "c"]},
        {"url": "u", "nodes": ["a", "d"]},
        {"url": "v", "nodes": ["a", "c"]},
    ]
    assert chains([("u", "a", "b"), ("u", "b", "a")]) == []
