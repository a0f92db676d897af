"""The spans of a gateway's requests, above those of the instances."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from cluster_stand_in import StandIn
from gateway_fixtures import NAME, GatewayProcess, Instance
from scripted_server import ScriptedServer
from span_collector import Collector, collector
from waiting import until

__all__ = ["collector"]

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ROUTE = "/v1/completions"
ASKED = {"model": NAME, "prompt": "a", "max_tokens": 1}


def test_a_request_its_waits_and_its_runs_are_spans(
    start_gateway: Callable[..., GatewayProcess],
    start_instance: Callable[..., Instance],
    cluster: StandIn,
    collector: Collector,
) -> None:
    cluster.deploy(NAME)
    cluster.add(NAME, "gone", "http://127.0.0.1:9")  # where nothing listens
    gateway = start_gateway("--traces", "otlp")
    instance = start_instance("--traces", "otlp")
    cluster.add(NAME, "one", instance.url)
    for sampled in ("00", "01"):
        sent = {"Traceparent": f"00-{TRACE}-{PARENT}-{sampled}"}
        assert gateway.exchange("POST", ROUTE, ASKED, sent)[0] == 200
    assert gateway.exchange("POST", ROUTE, ASKED | {"model": "none"})[0] == 404
    until(lambda: len(collector.named(f"POST {ROUTE}")) >= 3 and collector.named("run"))

    spans = collector.named(f"POST {ROUTE}")
    ours = next(span for span in spans if span.parent_span_id.hex() == PARENT)
    assert ours.trace_id.hex() == TRACE
    given = {item.key: item.value for item in ours.attributes}
    assert given["medusa.model"].string_value == NAME
    assert given["http.response.status_code"].int_value == 200
    parts = [span for span in collector.spans if span.parent_span_id == ours.span_id]
    runs = sorted((span for span in parts if span.name == "run"), key=lambda span: span.start_time_unix_nano)
    assert len([span for span in parts if span.name == "wait for an instance"]) == len(runs)
    where = {item.key: item.value.string_value for item in runs[-1].attributes}
    assert where["medusa.instance"] == "one"
    assert [span.status.code for span in runs[:-1]] == [2] * (len(runs) - 1)  # lost: an error

    served = next(span for span in spans if span.parent_span_id == runs[-1].span_id)
    assert served.trace_id.hex() == TRACE
    refused = next(span for span in spans if not span.parent_span_id)
    assert {item.key: item.value for item in refused.attributes}["http.response.status_code"].int_value == 404
    assert len(spans) == 3, "what its caller does not sample is not sent"


def test_what_a_gateway_has_noted_is_sent_at_its_end(
    start_gateway: Callable[..., GatewayProcess], cluster: StandIn, served: tuple[Instance, ...], collector: Collector
) -> None:
    cluster.deploy(NAME)
    cluster.add(NAME, "one", served[0].url)
    gateway = start_gateway("--traces", "otlp")
    assert gateway.post(ROUTE, ASKED)[0] == 200
    assert gateway.stop() == 0
    assert len(collector.named(f"POST {ROUTE}")) == 1
    assert collector.service == "medusa-gateway"


@pytest.mark.parametrize("answers", ["nothing", "an error"])
def test_a_bad_collector_holds_up_neither_requests_nor_the_end(
    start_gateway: Callable[..., GatewayProcess],
    cluster: StandIn,
    served: tuple[Instance, ...],
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
    answers: str,
) -> None:
    cluster.deploy(NAME)
    cluster.add(NAME, "one", served[0].url)
    with ExitStack() as closed:
        if answers == "nothing":
            port = closed.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
        else:
            error = b"HTTP/1.1 503 Away\r\nRetry-After: 3600\r\nContent-Length: 0\r\n\r\n"
            port = closed.enter_context(ScriptedServer(lambda _: error)).port
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        gateway = start_gateway("--traces", "otlp")
        odd = {"Traceparent": "00-\xff\xb2", "Tracestate": "\xff=,,", "Baggage": "\xff;" * 1000}
        for headers in ({}, odd, {"Traceparent": f"00-{TRACE}-{PARENT}-01", "Tracestate": "\x80"}):
            assert gateway.exchange("POST", ROUTE, ASKED, headers)[0] == 200
        assert gateway.stop() == 0
