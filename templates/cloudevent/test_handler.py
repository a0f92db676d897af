"""The function as a broker calls it, in both of CloudEvents' HTTP modes."""

import json

import pytest
from medusa_adapters.trial import Trial

ORDER = {"items": [{"price": 2.5, "count": 2}, {"price": 1}]}
BINARY = {
    "ce-specversion": "1.0",
    "ce-id": "42",
    "ce-type": "example.order.placed",
    "ce-source": "/shop",
    "content-type": "application/json",
}


@pytest.fixture(scope="module")
def function():
    with Trial("--handler", "handler.py", "--platform", "knative") as function:
        yield function


def test_binary_event(function):
    answer = function.post("/", json.dumps(ORDER), BINARY)
    assert answer.status == 200
    assert (answer.headers["ce-type"], answer.headers["ce-id"]) == ("example.order.priced", "42-priced")
    assert answer.json == {"order": "42", "total": 6.0}


def test_structured_event(function):
    event = {name.removeprefix("ce-"): value for name, value in BINARY.items() if name.startswith("ce-")}
    event |= {"datacontenttype": "application/json", "data": ORDER}
    answer = function.post("/", json.dumps(event), {"content-type": "application/cloudevents+json"})
    assert (answer.status, answer.json["total"]) == (200, 6.0)


def test_what_is_no_event_and_what_is_no_order(function):
    assert function.post("/", "{}", {"content-type": "application/json"}).status == 400
    for order in ('{"items": 3}', '{"items": [{"count": 2}]}', '{"items": [{"price": "x"}]}', "[1]"):
        assert function.post("/", order, BINARY).status == 400
