"""Flags and variables of `medusa node`, and what they allow."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.device.choice import obstacle
from medusa_runtime.errors import ConfigError, NodeError, NodeRefusedError
from medusa_runtime.node.callers.peer import Caller, Peer
from medusa_runtime.node.callers.policy import Policy, is_below_prefix
from medusa_runtime.node.regions.model_key import model_key
from medusa_runtime.node.settings import NODE_OPTIONS, AllowRule, CallerLimits, ListenSocket, node_settings

PAGE = Path(__file__).parents[3] / "docs" / "node.md"


def test_flags_win_over_variables() -> None:
    environ = {"MEDUSA_NODE_PREWARM": "torch=1", "MEDUSA_NODE_MEMORY_BUDGET": "1GB", "MEDUSA_NODE_PIN": "s3://b/a,/m"}
    settings = node_settings(environ, {"prewarm": "torch=2,vllm=1", "allow": "s3://b/=1000+1001,/models"})
    assert settings.prewarm == {"torch": 2, "vllm": 1}
    assert settings.memory_budget_bytes == 10**9
    assert settings.pin == ("s3://b/a", "/m")
    assert settings.allow == (AllowRule("s3://b/", frozenset({1000, 1001})), AllowRule("/models"))


@pytest.mark.parametrize(
    ("field", "text", "message"),
    [
        ("prewarm", "torch", "--prewarm='torch' cannot be used: expected engine=count"),
        ("prewarm", "jax=1", "engines torch, group, vllm"),
        ("prewarm", "torch=1000", "at most 64"),
        ("prewarm", "torch=²", "at most 64"),
        ("memory_budget_bytes", "0", "a size above 0"),
        ("memory_budget_bytes", "0.4", "a size above 0"),
        pytest.param("memory_budget_bytes", "9" * 400, "a size above 0", id="no size of a float"),
        pytest.param("per_caller", "fetches=" + "9" * 5000, "connections=N,fetches=N", id="more digits than int reads"),
        ("memory_budget_bytes", "-1GB", "a size above 0"),
        ("quota", "20GB", "expected prefix=size"),
        ("quota", "s3://b/=lots", "a size above 0"),
        ("allow", "", "URL prefixes"),
        pytest.param("allow", "s3://b/=" + "9" * 5000, "expected users with numbers", id="more digits than a user has"),
        ("socket", "node.sock", "an absolute path"),
        ("socket", "/a=", "PATH=PREFIX"),
        ("socket", "/a;/a", "each of them once"),
        ("per_caller", "fetches=many", "connections=N,fetches=N"),
        ("per_caller", "memory=lots", "a size above 0"),
        ("per_caller", "pause=long", "seconds, such as 90"),
        ("connections", "0", "a whole number above 0"),
    ],
)
def test_bad_values_name_flag_value_and_form(field: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        node_settings({}, {field: text})


def test_a_socket_path_that_is_too_long() -> None:
    with pytest.raises(ConfigError, match="at most 107 bytes"):
        node_settings({}, {"socket": "/" + "x" * 120})


@pytest.mark.parametrize(
    ("text", "size"), [("500MB", 500_000_000), ("16Gi", 16 << 30), ("1.5GB", 1_500_000_000), ("4096", 4096)]
)
def test_sizes(text: str, size: int) -> None:
    assert node_settings({}, {"memory_budget_bytes": text}).memory_budget_bytes == size


def test_the_page_names_every_flag_and_variable() -> None:
    text = PAGE.read_text()
    for option in NODE_OPTIONS:
        for name in (option.flag, option.variable):
            assert f"`{name}`" in text, name


def test_prefixes_end_at_a_slash() -> None:
    assert is_below_prefix("s3://b/team/m", "s3://b/team")
    assert is_below_prefix("s3://b/team", "s3://b/team/")
    assert is_below_prefix("s3://b/team/m", "*")
    assert not is_below_prefix("s3://b/team-b/m", "s3://b/team")
    assert not is_below_prefix("s3://b", "s3://b/team")


def test_one_name_for_one_checkpoint() -> None:
    assert model_key("s3://b/m/") == "s3://b/m"
    assert model_key("file:///models/a%20b/") == "/models/a b"
    assert model_key("/models/x/../m") == "/models/m"
    for url in ("https://h/a/../b", "https://h/a/%2e%2e/b"):
        with pytest.raises(NodeError, match=r"without '\.\.'"):
            model_key(url)


def test_a_rule_for_some_users() -> None:
    policy = Policy([AllowRule("s3://b/", frozenset({7})), AllowRule("s3://b/open")], {})
    seven, eight = (Caller(Peer(1, user, user)) for user in (7, 8))
    policy.check("s3://b/m", seven)
    policy.check("s3://b/open/m", eight)
    with pytest.raises(NodeRefusedError, match="by user 8"):
        policy.check("s3://b/m", eight)
    with pytest.raises(NodeRefusedError):
        policy.check("s3://other/m", seven)


def test_without_rules_a_store_is_for_the_agents_own_user() -> None:
    policy = Policy([], {})
    own = Caller(Peer(1, os.geteuid(), 7))
    policy.check("s3://b/m", own)
    for caller in (Caller(Peer(1, 7, 7)), Caller(own.peer._replace(same_pid_namespace=False))):
        with pytest.raises(NodeRefusedError, match=r"to open it, start it with --allow PREFIX=\d+, or with a socket"):
            policy.check("s3://b/m", caller)
        policy.check("/models/m", caller)


def test_a_tenants_socket_has_its_own_models_alone() -> None:
    policy = Policy([], {})
    tenant = Caller(Peer(1, 0, 0), "/run/medusa/a/node.sock", ("s3://b/a", "https://h/a"))
    assert not tenant.trusted, "root has no other right there than any user"
    policy.check("s3://b/a/m", tenant)
    policy.check("https://h/a", tenant)
    for key in ("s3://b/ab/m", "s3://b/m", "/models/m"):
        with pytest.raises(NodeRefusedError, match=r"not served on /run/medusa/a/node\.sock; expected a model below"):
            policy.check(key, tenant)


def test_sockets_and_their_tenants() -> None:
    settings = node_settings({"MEDUSA_NODE_SOCKET": "/a;/b=s3://b/x/,s3://b/y"}, {})
    assert settings.socket == (ListenSocket("/a"), ListenSocket("/b", ("s3://b/x/", "s3://b/y")))
    assert settings.path == "/a"
    limits = node_settings({}, {"per_caller": "fetches=2,memory=1GB,pause=0"}).per_caller
    assert (limits.fetches, limits.memory_bytes, limits.engines) == (2, 10**9, CallerLimits().engines)
    assert limits.pause_s == 0


def test_schemes_that_read_the_agents_own_files_are_not_fetched() -> None:
    refused = ("local:///etc", "reference://m::file:///x.json", "zip://a::http://h/b", "simplecache::s3://b/m")
    for url in (*refused, "dir://x", "memory://m", "github://o:r@m/x", "s3://b::local:///etc", "ftp://h/m"):
        with pytest.raises(NodeError, match="expected an absolute path"):
            model_key(url)


def test_no_spelling_of_a_url_passes_by_a_rule() -> None:
    for url in ("HTTP://Host:80/team/m", "http://host/te%61m/m", "http://host/team/m/"):
        assert model_key(url) == "http://host/team/m"
    for url in ("http://h//team/m", "http://h/./m", "http://h\\@evil/m", "http://h/%2E./m", "s3://b/x//y", "s3://"):
        with pytest.raises(NodeError, match="expected"):
            model_key(url)
    for url in ("file://[x/y", "/\ud800", "http://[", "/a\nb", "file:///a%0ab", "http://h:x/m", "/" + "x" * 5000):
        with pytest.raises(NodeError, match="expected"):
            model_key(url)


@pytest.mark.skipif(obstacle(os.environ) is None, reason="a GPU is here")
def test_a_gpus_context_where_there_is_no_gpu(start_node: Callable[..., Any]) -> None:
    with pytest.raises(AssertionError, match=r"--gpu-context yes cannot be had: expected .*; or leave it out"):
        start_node("--gpu-context", "yes")
