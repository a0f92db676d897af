"""A prompt goes where its beginning was computed, unless another instance would have done it sooner."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from medusa_cluster.gateway.call import parse_call
from medusa_cluster.gateway.dispatch import Dispatch, Lease
from medusa_cluster.gateway.metrics import Metrics
from medusa_cluster.gateway.prefixes import PIECE_BYTES, Prefixes
from medusa_cluster.gateway.routes import DeployedModel, Instance, Routes

CHAT = "/v1/chat/completions"


def prefix(route: str = CHAT, model: str = "m", **body: Any) -> tuple[bytes, ...]:
    return parse_call(route, json.dumps({"model": model, **body}).encode(), {}).prefix


def said(role: str, length: int, text: str = "abc ") -> dict[str, str]:
    return {"role": role, "content": (text * length)[:length]}


def test_the_next_turn_of_a_chat_begins_with_the_pieces_of_this_one() -> None:
    turn = [said("system", 3000), said("user", 2000)]
    first, second = prefix(messages=turn), prefix(messages=[*turn, said("assistant", 3000), said("user", 2000)])
    assert len(first) == 5000 // PIECE_BYTES
    assert len(second) == 10_000 // PIECE_BYTES
    assert second[: len(first)] == first
    assert len(set(second)) == len(second)
    assert len(prefix(messages=[said("user", 100_000)])) == 32


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"cache_salt": "salt"},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"messages": [said("system", 3000, "abd ")]},
        {"messages": [said("user", 3000)]},
    ],
)
def test_what_differs_at_its_beginning_shares_nothing(change: dict[str, Any]) -> None:
    plain = {"messages": [said("system", 3000)]}
    assert not set(prefix(**plain)) & set(prefix(**plain | change))


@pytest.mark.parametrize(
    ("route", "body", "longer"),
    [
        ("/v1/completions", {"prompt": "abc " * 600}, {"prompt": "abc " * 1600}),
        ("/v1/completions", {"prompt": [1234] * 500}, {"prompt": [1234] * 900}),
        ("/v1/responses", {"instructions": "abc " * 600, "input": "a"}, {"instructions": "abc " * 600, "input": "b"}),
        ("/v1/messages", {"system": "abc " * 600, "messages": []}, {"system": "abc " * 900, "messages": []}),
        (
            "/medusa/generate",
            {"frame": {"prompt": "abc " * 600, "params": {}}},
            {"frame": {"prompt": "abc " * 700, "params": {}}},
        ),
    ],
)
def test_every_interface_has_prefixes(route: str, body: dict[str, Any], longer: dict[str, Any]) -> None:
    found = prefix(route, **body)
    assert len(found) >= 2
    assert prefix(route, **longer)[: len(found)] == found


def test_a_short_prompt_and_other_routes_have_none() -> None:
    assert prefix(messages=[said("user", 500)]) == ()
    assert prefix("/v1/embeddings", input="abc " * 1000) == ()


@pytest.mark.parametrize("messages", ["\ud800" * 3000, {"a": "b" * 3000}, [["x"] * 900, None, 5], None, 7, True])
def test_odd_prompts_are_no_error(messages: Any) -> None:
    prefix(messages=messages, system=[{"a": "b" * 3000}, "\ud800" * 2000], tools="x" * 3000)


def test_the_table_is_bounded_and_knows_the_last_holders() -> None:
    table, long = Prefixes(most=10), prefix(messages=[said("user", 8000)])
    for name in "abcdef":
        table.note(long, name)
    assert table.pieces(long) == dict.fromkeys("cdef", len(long))
    table.note(long[:3], "a")
    assert table.pieces(long) == {"a": 3, **dict.fromkeys("def", len(long))}
    table.note(prefix(messages=[said("user", 7500, "xyz ")]), "b")
    assert len(table._holders) == 10
    assert table.pieces(long) == dict.fromkeys("adef", 3)  # what had not been asked for since is gone
    for _ in range(2):
        table.note(prefix(messages=[said("user", 7500, "xyz ")]), "b")
        table.note(long, "a")
    assert table.pieces(long) == {"a": len(long), **dict.fromkeys("def", 3)}  # of the other, its end is gone
    assert table.pieces(prefix(messages=[said("user", 7500, "xyz ")])) == {"b": 3}


async def lease(dispatch: Dispatch, found: tuple[bytes, ...], cost: float = 1.0, avoid: str = "") -> Lease:
    deadline = asyncio.get_running_loop().time() + 30
    return await dispatch.lease("m", cost, avoid=frozenset(avoid), deadline=deadline, prefix=found)


def cluster(*names: str) -> Routes:
    found = tuple(Instance(name, "n", f"http://n/instances/{name}", "ready") for name in names)
    return Routes("1", {"m": DeployedModel("m", {"settings": {"max_concurrency": "64"}}, found)})


def test_a_prompt_follows_its_beginning_as_long_as_that_saves_more_than_it_waits() -> None:
    chat, other = prefix(messages=[said("user", 17_000)]), prefix(messages=[said("user", 17_000, "xyz ")])
    assert len(chat) == 16  # two sequences' worth

    async def work() -> None:
        dispatch = Dispatch(100, Metrics(), lambda: None)
        dispatch.update(cluster("a", "b", "c"))
        busy = await lease(dispatch, (), cost=0.5)
        assert busy.instance.id == "a"
        chosen = []
        for found in (chat, other, chat, other):  # b and c are idle in turn
            given = await lease(dispatch, found)
            chosen.append(given.instance.id)
            dispatch.release(given)
        assert chosen == ["b", "b", "b", "b"]  # nobody has less work than the one that has both
        held = [await lease(dispatch, chat) for _ in range(4)]
        assert [one.instance.id for one in held] == ["b", "b", "b", "c"]
        assert (await lease(dispatch, chat, avoid="b")).instance.id == "c"
        dispatch.set_lost("b", True)
        dispatch.set_lost("c", True)
        assert (await lease(dispatch, chat)).instance.id == "a"
        dispatch.update(cluster("d"))  # all others are gone
        assert (await lease(dispatch, chat)).instance.id == "d"

    asyncio.run(work())
