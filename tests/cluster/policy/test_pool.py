"""The parameter pool: a copy of each deployed model, whatever dies."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st
from medusa_cluster.policy.index import Index
from medusa_cluster.policy.pool import Restoration, evict, restore, sources
from medusa_cluster.policy.state import Copy, Deployment, Drop, Instance, Node, Pin


def node(name: str, *copies: Copy, memory: int = 1000, **changes: object) -> Node:
    used = sum(copy.total_bytes for copy in copies)
    made = Node(name, memory_bytes=memory, memory_used_bytes=used, copies=copies)
    return replace(made, **changes)  # type: ignore[arg-type]


def whole(url: str, size: int = 100, **changes: object) -> Copy:
    return replace(Copy(url, size, size, pinned=True), **changes)  # type: ignore[arg-type]


def model(url: str, size: int = 100, version: str = "") -> Deployment:
    return Deployment(url.upper(), url, size_bytes=size, version=version)


def restored(nodes: list[Node], *deployments: Deployment) -> Restoration:
    index = Index()
    named = {node.name: node for node in nodes}
    index.update(named)
    return restore(index, named, {deployment.url: deployment for deployment in deployments})


def test_a_model_without_a_copy_goes_where_the_pool_is_emptiest() -> None:
    nodes = [node("a", whole("x")), node("b"), node("c", whole("y", 50))]
    found = restored(nodes, model("x"), model("y", 50), model("z", 60))
    assert found == Restoration({"z": "b"}, ())


def test_models_are_spread_evenly_by_size() -> None:
    nodes = [node(name) for name in "abc"]
    found = restored(nodes, model("p", 300), model("q", 200), model("r", 150), model("s", 150), model("t", 100))
    sizes = {"p": 300, "q": 200, "r": 150, "s": 150, "t": 100}
    filled = {name: sum(sizes[url] for url, where in found.fetches.items() if where == name) for name in "abc"}
    assert sorted(filled.values()) == [300, 300, 300]


def test_a_node_holds_as_many_times_more_as_its_link_is_faster_while_it_has_room() -> None:
    nodes = [node("a", link_bytes_per_s=1e9), node("b", link_bytes_per_s=3e9), node("c", link_bytes_per_s=1e9)]
    found = restored(nodes, *(model(url) for url in "pqrst"))
    assert [list(found.fetches.values()).count(name) for name in "abc"] == [1, 3, 1]
    assert restored(nodes, model("x")).fetches == {"x": "b"}
    small = node("b", link_bytes_per_s=30e9, memory=150)
    fetches = restored([nodes[0], small], model("x"), model("y"), model("z")).fetches
    assert sorted(fetches.values()) == ["a", "a", "b"]


def test_what_is_spread_by_the_links_stays() -> None:
    slow, fast = node("a", link_bytes_per_s=1e9), node("b", *map(whole, "xyz"), link_bytes_per_s=10e9)
    deployed = (model("x"), model("y"), model("z"))
    assert restored([slow, fast], *deployed) == Restoration({}, ())
    assert restored([replace(fast, link_bytes_per_s=1e9), slow], *deployed).fetches == {"z": "a"}


def test_a_model_that_fits_nowhere_is_left_out_and_the_others_are_not() -> None:
    found = restored([node("a", memory=100)], model("big", 500), model("small", 50))
    assert found == Restoration({"small": "a"}, (), frozenset({"big"}))


def test_a_dead_or_draining_node_has_no_copy_but_one_that_drains_is_a_source() -> None:
    gone = node("a", whole("x"), state="draining")
    assert restored([gone, node("b")], model("x")).fetches == {"x": "b"}
    assert restored([replace(gone, state="lost"), node("b")], model("x")).fetches == {"x": "b"}
    index = Index()
    index.update({"a": gone})
    assert sources(index, {"a": gone}, model("x")) == [gone]


def test_a_cache_becomes_the_pools_copy_and_one_that_arrives_is_waited_for() -> None:
    cached = whole("x", pinned=False)
    assert restored([node("a"), node("b", cached)], model("x")) == Restoration({}, (Pin("b", "x"),))
    arriving = replace(whole("x"), fetched_bytes=1)
    assert restored([node("a"), node("b", arriving)], model("x")) == Restoration({}, ())


def test_an_older_version_is_no_copy_and_goes_unless_it_serves() -> None:
    old = node("a", whole("x", version="1"))
    found = restored([old, node("b")], model("x", version="2"))
    assert found.fetches["x"] in ("a", "b")
    assert [(type(change), change.node) for change in found.changes] == [(Drop, "a")]
    serving = replace(old, instances=(Instance("i", "X", "a", "ready"),))
    assert restored([serving, node("b")], model("x", version="2")) == Restoration({"x": "b"}, ())


def test_one_of_two_pinned_copies_and_those_of_removed_models_are_let_go() -> None:
    nodes = [node("a", whole("x"), whole("y")), node("b", whole("x"))]
    assert restored(nodes, model("x"), model("y")).changes == (Pin("a", "x", pinned=False),)
    assert restored(nodes[1:]).changes == (Pin("b", "x", pinned=False),)


def test_a_new_node_is_given_a_share_one_copy_at_a_time() -> None:
    full = node("a", whole("x", 300), whole("y", 300), whole("z", 200))
    deployed = (model("x", 300), model("y", 300), model("z", 200))
    assert restored([full, node("b")], *deployed).fetches == {"y": "b"}
    moving = replace(whole("y", 300), fetched_bytes=1)
    assert restored([full, node("b", moving)], *deployed) == Restoration({}, ())
    moved = node("b", whole("y", 300))
    assert restored([full, moved], *deployed).changes == (Pin("a", "y", pinned=False),)
    balanced = node("a", whole("x", 300), whole("z", 200))
    assert restored([balanced, moved], *deployed) == Restoration({}, ())


def test_eviction_takes_removed_models_first_then_the_least_recently_used() -> None:
    copies = (
        whole("pool"),
        whole("old", pinned=False, used_at_s=1.0),
        whole("new", pinned=False, used_at_s=9.0),
        whole("removed", pinned=False, used_at_s=99.0),
        replace(whole("arriving", pinned=False), fetched_bytes=1),
        whole("serving", pinned=False, used_at_s=0.0),
    )
    busy = node("a", *copies, memory=600, instances=(Instance("i", "SERVING", "a", "ready"),))
    deployed = {url: model(url) for url in ("pool", "old", "new", "arriving", "serving")}

    def dropped(needed: int, *, pinned: bool = False) -> list[str] | None:
        drops = evict(busy, needed, deployed, pinned=pinned)
        return None if drops is None else [drop.url for drop in drops]

    assert dropped(0) == []
    assert dropped(100) == ["removed"]
    assert dropped(150) == ["removed", "old"]
    assert dropped(300) == ["removed", "old", "new"]
    assert dropped(301) is None
    assert dropped(300, pinned=True) == ["removed", "old", "new"]
    assert dropped(301, pinned=True) == ["removed", "old", "new", "pool"]
    assert dropped(401, pinned=True) is None


@given(
    st.lists(st.integers(1, 200), max_size=12),
    st.lists(st.integers(0, 1000), min_size=1, max_size=6),
    st.integers(0, 5),
)
@example([1, 1, 3, 4], [13, 14, 26], 1)  # the larger node has more, and is filled less
def test_the_pool_settles_and_survives_the_death_of_a_node(sizes: list[int], memories: list[int], victim: int) -> None:
    deployed = [model(f"m{number}", size) for number, size in enumerate(sizes)]
    nodes = {f"n{number}": node(f"n{number}", memory=memory) for number, memory in enumerate(memories)}
    index = Index()
    for turn in range(60):
        if turn == 30 and len(nodes) > 1:
            nodes.pop(f"n{victim % len(nodes)}")
        index.update(nodes)
        found = restore(index, nodes, {item.url: item for item in deployed})
        for url, name in found.fetches.items():
            size = next(item.size_bytes for item in deployed if item.url == url)
            others = tuple(copy for copy in nodes[name].copies if copy.url != url)
            drops = evict(nodes[name], size, {item.url: item for item in deployed})
            assert drops is not None
            gone = {drop.url for drop in drops}
            nodes[name] = node(
                name,
                *(copy for copy in others if copy.url not in gone),
                whole(url, size),
                memory=nodes[name].memory_bytes,
            )
        for change in found.changes:
            assert isinstance(change, Pin)
            copies = nodes[change.node].copies
            changed = (replace(c, pinned=change.pinned) if c.url == change.url else c for c in copies)
            nodes[change.node] = node(change.node, *changed, memory=nodes[change.node].memory_bytes)
        if turn in (29, 59):
            held = {copy.url for item in nodes.values() for copy in item.copies if copy.pinned}
            room = max((item.memory_bytes for item in nodes.values()), default=0)
            if sum(sizes) <= room:
                assert held == {item.url for item in deployed}
            assert not any(item.free_bytes < 0 for item in nodes.values())
            if turn == 59:
                assert (found.fetches, found.changes) == ({}, ()) or len(held) < len(deployed)


def test_a_new_node_that_has_a_cache_of_it_only_pins_it() -> None:
    full = node("a", whole("x", 300), whole("y", 300))
    cached = node("b", replace(whole("y", 300, pinned=False), fetched_bytes=10))
    assert restored([full, cached], model("x", 300), model("y", 300)) == Restoration({}, (Pin("b", "y"),))
