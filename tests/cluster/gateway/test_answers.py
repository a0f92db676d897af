"""A gateway in front of real instances: routes, holding, shedding, cancelling, and clients of all kinds."""

from __future__ import annotations

import http.client
import http.server
import json
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from certificates import make_certificates
from cluster_stand_in import StandIn, write_token
from gateway_fixtures import NAME, GatewayProcess, Instance
from medusa_runtime.storage.peer_access import PeerAccess
from waiting import until

Start = Callable[..., Any]

PROMPT = "This function returns"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def shared(served: tuple[Instance, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """One for tests that count nothing and change nothing."""
    folder = tmp_path_factory.mktemp("shared")
    with StandIn() as cluster:
        cluster.deploy(NAME)
        cluster.add(NAME, "one", served[0].url)
        started = GatewayProcess(folder, f"127.0.0.1:{cluster.port}", write_token(folder))
        yield started
        started.kill()
        assert "Traceback" not in started.output(), started.output()


def body(**more: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": PROMPT, "max_tokens": 8, "temperature": 0} | more


def test_answers_are_those_of_the_instance(shared: GatewayProcess, served: tuple[Instance, ...]) -> None:
    asked = {
        "/v1/completions": body(n=2, seed=1, temperature=1, logprobs=1),
        "/v1/chat/completions": {
            "model": NAME, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 5, "seed": 1,
        },
        "/tokenize": {"model": NAME, "prompt": PROMPT},
        "/v1/responses/input_tokens": {"model": NAME, "input": PROMPT},
        "/detokenize": {"model": NAME, "tokens": [5, 6, 7]},
    }  # fmt: skip
    for path, request in asked.items():
        status, answer = shared.post(path, request)
        assert status == 200, answer
        expected = served[0].exchange("POST", path, json.dumps(request), JSON).json
        for found in (answer, expected):
            found.pop("id", None)
            found.pop("created", None)
        assert answer == expected, path


def test_the_models_are_those_that_are_deployed(gateway: GatewayProcess, cluster: StandIn) -> None:
    cluster.deploy("org/other")
    until(lambda: len(gateway.get("/v1/models")[1]["data"]) == 2)
    status, answer = gateway.get("/v1/models")
    assert status == 200
    assert [model["id"] for model in answer["data"]] == ["org/other", NAME]
    assert gateway.get("/v1/models/org/other")[1]["object"] == "model"
    status, answer = gateway.get("/v1/models/unheard-of")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    cluster.remove("org/other")
    until(lambda: len(gateway.get("/v1/models")[1]["data"]) == 1)


BAD = (
    ("/v1/completions", b"", 400, "invalid_json"),
    ("/v1/completions", b"{", 400, "invalid_json"),
    ("/v1/completions", b"\xff\xfe\x00", 400, "invalid_json"),
    ("/v1/completions", b"[1]", 400, "invalid_json"),
    ("/v1/completions", b"[" * 200_000, 400, "invalid_json"),
    ("/v1/completions", b'{"prompt": "a"}', 400, "invalid_value"),
    ("/v1/completions", b'{"model": 3}', 400, "invalid_value"),
    ("/v1/completions", b'{"model": "unheard-of", "prompt": "a"}', 404, "model_not_found"),
    ("/v1/completions", b'{"model": "%s"}' % (b"x" * 10_000), 404, "model_not_found"),
    ("/v1/completions", b'{"model": "tiny", "prompt": {}}', 400, "invalid_value"),
    ("/v1/completions", b'{"model": "tiny", "prompt": "a", "seed": "x"}', 400, "invalid_value"),
    ("/v1/completions", b'{"model": "tiny", "prompt": "\\ud800", "max_tokens": 1}', 200, ""),
    ("/v1/completions", b'{"model": "tiny", "prompt": "a", "n": 1e999, "max_tokens": 1}', 400, "invalid_value"),
    ("/v1/unheard-of", b'{"model": "tiny"}', 404, "not_found"),
    ("/medusa/generate", b'{"model": "tiny"}', 400, "invalid_value"),
    ("/medusa/generate", b'{"model": "tiny", "frame": {"params": {"temperature": "x"}}}', 400, "bad_request"),
    ("/medusa/call", b'{"model": "tiny", "method": "close", "arguments": {}}', 400, "invalid_value"),
    ("/medusa/call", b'{"model": "tiny", "method": "tokenize", "arguments": {"x": 1}}', 400, "invalid_value"),
)


def test_a_bad_request_gets_one_clear_error(shared: GatewayProcess) -> None:
    for path, data, status, code in BAD:
        found, _, answer = shared.exchange("POST", path, data)
        assert found == status, (data[:80], answer)
        if code:
            assert answer["error"]["code"] == code, answer
            assert set(answer["error"]) >= {"message", "type", "param", "code"}
            assert len(answer["error"]["message"]) < 500


def test_a_method_that_a_route_does_not_take(shared: GatewayProcess) -> None:
    status, answer = shared.get("/v1/completions")
    assert (status, answer["error"]["code"]) == (405, "bad_method")


def test_a_body_that_is_too_large_is_refused(shared: GatewayProcess) -> None:
    connection = shared.connection()
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Length", str(10**12))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()

    def pieces() -> Any:
        for _ in range(40):
            yield b" " * 1_000_000

    connection = shared.connection()
    try:
        connection.request("POST", "/v1/completions", pieces(), JSON, encode_chunked=True)
        assert connection.getresponse().status == 413
    except (BrokenPipeError, ConnectionResetError):
        pass  # it did not wait for the rest
    finally:
        connection.close()
    assert shared.post("/v1/completions", body())[0] == 200


def test_a_request_is_held_until_there_is_an_instance(
    cluster: StandIn, start_gateway: Start, served: tuple[Instance, ...]
) -> None:
    cluster.deploy(NAME)
    cluster.on_wanted = lambda name: cluster.add(name, "late", served[0].url)
    gateway = start_gateway()
    status, answer = gateway.post("/v1/completions", body())
    assert status == 200, answer
    assert cluster.wanted == [NAME]


def test_an_instance_that_only_starts_gets_no_request(
    cluster: StandIn, start_gateway: Start, served: tuple[Instance, ...]
) -> None:
    cluster.deploy(NAME)
    cluster.add(NAME, "starting", served[0].url, state="starting")
    gateway = start_gateway()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(gateway.post, "/v1/completions", body())
        until(lambda: gateway.metric("medusa_gateway_waiting", model=NAME) == 1)
        assert cluster.calls == []
        cluster.set_state(NAME, "starting", "ready")
        assert answer.result(60)[0] == 200
        cluster.set_state(NAME, "starting", "draining")
        until(lambda: gateway.metric("medusa_gateway_ready_instances", model=NAME) == 0)
        late = pool.submit(gateway.post, "/v1/completions", body())
        until(lambda: gateway.metric("medusa_gateway_waiting", model=NAME) == 1)
        cluster.remove(NAME)
        assert late.result(60)[0] == 404


def test_a_held_request_ends_in_time_with_retry_after(cluster: StandIn, start_gateway: Start) -> None:
    cluster.deploy(NAME, hold_s="0.5")
    gateway = start_gateway()
    status, headers, answer = gateway.exchange("POST", "/v1/completions", body())
    assert (status, answer["error"]["code"]) == (503, "not_ready")
    assert int(headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [(502, "Cluster.Instance", "instance_lost"), (404, "Cluster.NoInstance", "not_ready")],
)
def test_a_request_that_loses_its_instances_is_told_where_and_why(
    cluster: StandIn, start_gateway: Start, status: int, code: str, expected: str
) -> None:
    said = json.dumps({"error": {"code": code, "message": "/models/m: expected a folder, found nothing"}}).encode()

    class Failing(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(said)

    cluster.deploy(NAME, hold_s="2")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Failing) as failing:
        threading.Thread(target=failing.serve_forever, args=(0.05,)).start()
        cluster.add(NAME, "one", f"http://127.0.0.1:{failing.server_port}")
        found, _, answer = start_gateway().exchange("POST", "/v1/completions", body())
        failing.shutdown()
    assert (found, answer["error"]["code"]) == (503, expected)
    assert "one on n1: it" in answer["error"]["message"]
    assert f"{code}: /models/m: expected a folder, found nothing" in answer["error"]["message"]


def test_requests_beyond_the_places_are_refused_fairly(cluster: StandIn, start_gateway: Start) -> None:
    """A flood of one model leaves room for another."""
    for name in ("flooded", "quiet"):
        cluster.deploy(name, hold_s="20")
    gateway = start_gateway("--max-waiting", "8")
    with ThreadPoolExecutor(12) as pool:
        flood = [pool.submit(gateway.exchange, "POST", "/v1/completions", body(model="flooded")) for _ in range(8)]
        until(lambda: gateway.metric("medusa_gateway_waiting", model="flooded") == 8)
        status, headers, answer = gateway.exchange("POST", "/v1/completions", body(model="flooded"))
        assert (status, answer["error"]["code"]) == (503, "not_ready")
        assert int(headers["retry-after"]) >= 1
        quiet = pool.submit(gateway.exchange, "POST", "/v1/completions", body(model="quiet"))
        until(lambda: gateway.metric("medusa_gateway_waiting", model="quiet") == 1)
        until(lambda: sum(asked.done() for asked in flood) == 1)
        assert gateway.metric("medusa_gateway_shed_total", model="flooded") == 2
        gateway.process.send_signal(signal.SIGKILL)
        for asked in (*flood, quiet):
            asked.exception(60)


def test_a_full_model_answers_429(cluster: StandIn, start_gateway: Start, served: tuple[Instance, ...]) -> None:
    cluster.deploy(NAME, max_concurrency="1")
    cluster.add(NAME, "one", served[0].url)
    gateway = start_gateway("--max-waiting", "2")
    long = body(max_tokens=150, ignore_eos=True)
    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(gateway.exchange, "POST", "/v1/completions", long) for _ in range(8)]
        answers = [asked.result(60) for asked in found]
    statuses = sorted(status for status, _, _ in answers)
    assert statuses.count(200) >= 3
    assert set(statuses) == {200, 429}
    for status, headers, answer in answers:
        if status == 429:
            assert answer["error"]["code"] == "overloaded"
            assert int(headers["retry-after"]) >= 1


def test_a_client_that_leaves_ends_its_work(
    cluster: StandIn, gateway: GatewayProcess, served: tuple[Instance, ...]
) -> None:
    connection = gateway.connection()
    connection.request(
        "POST", "/v1/completions", json.dumps(body(stream=True, max_tokens=480, ignore_eos=True, n=16)), JSON
    )
    assert connection.getresponse().readline().startswith(b"data: ")
    connection.close()
    until(lambda: gateway.metric("medusa_gateway_running", model=NAME) == 0)
    until(lambda: served[0].metric("medusa_engine_running") == served[0].metric("medusa_requests_in_flight") == 0)
    until(lambda: gateway.metric("medusa_gateway_requests_total", status="499") == 1)
    cluster.deploy("nowhere")
    until(lambda: len(gateway.get("/v1/models")[1]["data"]) == 2)
    held = gateway.connection()
    held.request("POST", "/v1/completions", json.dumps(body(model="nowhere")), JSON)
    until(lambda: gateway.metric("medusa_gateway_waiting", model="nowhere") == 1)
    held.close()
    until(lambda: gateway.metric("medusa_gateway_waiting", model="nowhere") == 0)


def test_tokens_are_not_collected(shared: GatewayProcess) -> None:
    """The first event comes while the others are still to be made."""
    connection = shared.connection()
    connection.request("POST", "/v1/completions", json.dumps(body(stream=True, max_tokens=450, ignore_eos=True)), JSON)
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    assert shared.metric("medusa_gateway_running", model=NAME) >= 1
    assert response.read().endswith(b"data: [DONE]\n\n")
    connection.close()


@pytest.mark.slow
def test_a_client_that_reads_nothing_is_left(
    cluster: StandIn, start_gateway: Start, served: tuple[Instance, ...]
) -> None:
    cluster.deploy(NAME)
    cluster.add(NAME, "one", served[0].url)
    gateway = start_gateway("--write-timeout-s", "2")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", gateway.port))
        data = json.dumps(body(stream=True, max_tokens=450, ignore_eos=True, n=128, logprobs=5)).encode()
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n")
        client.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(data), data))
        until(lambda: gateway.metric("medusa_gateway_running", model=NAME) == 1)
        until(lambda: gateway.metric("medusa_gateway_running", model=NAME) == 0)
        assert gateway.metric("medusa_gateway_requests_total", status="499") == 1
        assert gateway.post("/v1/completions", body())[0] == 200


def test_many_clients_and_two_gateways_share_the_instances(
    cluster: StandIn, start_gateway: Start, served: tuple[Instance, ...]
) -> None:
    cluster.deploy(NAME)
    for name, instance in zip(("one", "two"), served, strict=True):
        cluster.add(NAME, name, instance.url)
    gateways = [start_gateway("--name", f"gateway-{number}") for number in range(2)]
    for gateway in gateways:
        until(lambda gateway=gateway: gateway.metric("medusa_gateway_ready_instances", model=NAME) == 2)  # type: ignore[misc]
    expected = gateways[0].post("/v1/completions", body(max_tokens=30))[1]["choices"]
    cluster.calls.clear()
    with ThreadPoolExecutor(48) as pool:
        found = list(pool.map(lambda n: gateways[n % 2].post("/v1/completions", body(max_tokens=30)), range(96)))
    assert [status for status, _ in found] == [200] * 96
    assert all(answer["choices"] == expected for _, answer in found)
    shares = [
        sum(name == instance for name, path in cluster.calls if "completions" in path) for instance in ("one", "two")
    ]
    assert sum(shares) == 96
    assert min(shares) >= 24, shares
    until(lambda: set(cluster.loads) == {"gateway-0", "gateway-1"})
    assert set(cluster.loads["gateway-0"][NAME]) == {
        "waiting",
        "running",
        "tokens_per_s",
        "unanswered_tokens",
        "prefilled_per_s",
        "decoded_per_s",
        "longest_wait_s",
    }


def test_sigterm_lets_requests_end(gateway: GatewayProcess) -> None:
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(gateway.post, "/v1/completions", body(max_tokens=450, ignore_eos=True))
        until(lambda: gateway.metric("medusa_gateway_running", model=NAME) == 1)
        assert gateway.stop() == 0
        status, found = answer.result(60)
    assert status == 200
    assert found["usage"]["completion_tokens"] == 450
    with pytest.raises(ConnectionRefusedError):
        gateway.get("/livez")


def test_what_still_waits_at_the_end_is_told(cluster: StandIn, start_gateway: Start) -> None:
    cluster.deploy(NAME)
    gateway = start_gateway("--drain-s", "1")
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(gateway.exchange, "POST", "/v1/completions", body())
        until(lambda: gateway.metric("medusa_gateway_waiting", model=NAME) == 1)
        assert gateway.stop() == 1
        status, headers, answer = held.result(60)
    assert (status, answer["error"]["code"]) == (503, "not_ready")
    assert headers["connection"] == "close"


def test_a_second_signal_ends_at_once(gateway: GatewayProcess, cluster: StandIn) -> None:
    cluster.deploy("nowhere")
    until(lambda: len(gateway.get("/v1/models")[1]["data"]) == 2)
    held = gateway.connection()
    held.request("POST", "/v1/completions", json.dumps(body(model="nowhere")), JSON)
    until(lambda: gateway.metric("medusa_gateway_waiting", model="nowhere") == 1)
    gateway.process.send_signal(signal.SIGTERM)
    time.sleep(1)
    assert gateway.process.poll() is None
    assert gateway.stop() == 1
    held.close()


def test_the_official_client(shared: GatewayProcess) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{shared.url}/v1", api_key="any", max_retries=0)
    assert [model.id for model in client.models.list()] == [NAME]
    messages = [{"role": "user", "content": PROMPT}]
    whole = client.chat.completions.create(model=NAME, messages=messages, max_tokens=12, seed=4)
    stream = client.chat.completions.create(
        model=NAME, messages=messages, max_tokens=12, seed=4, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="unheard-of", prompt="a")
    assert caught.value.code == "model_not_found"
    with client.completions.create(model=NAME, prompt=PROMPT, max_tokens=400, stream=True) as left:
        next(iter(left))
    client.close()


def test_a_gateway_with_a_token_demands_it(
    cluster: StandIn, start_gateway: Start, served: tuple[Instance, ...], tmp_path: Path
) -> None:
    file = tmp_path / "client-token"
    file.touch(mode=0o600)
    file.write_text("what-every-client-must-show")
    cluster.deploy(NAME)
    cluster.add(NAME, "one", served[0].url)
    gateway = start_gateway("--client-token-file", str(file))
    for given in ({}, {"Authorization": "Bearer wrong"}):
        for method, path in (
            ("POST", "/v1/completions"),
            ("GET", "/"),
            ("GET", "/cluster/status"),
            ("GET", "/metrics"),
        ):
            status, _, answer = gateway.exchange(method, path, body() if method == "POST" else None, given)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    shown = {"Authorization": "Bearer what-every-client-must-show"}
    assert gateway.exchange("POST", "/v1/completions", body(), shown)[0] == 200
    assert gateway.get("/livez")[0] == 200


@pytest.mark.skipif(not shutil.which("openssl"), reason="needs openssl, to make certificates")
def test_a_gateway_with_certificates_speaks_tls_with_the_nodes(served: tuple[Instance, ...], tmp_path: Path) -> None:
    ca, cert, key = make_certificates(tmp_path)
    token = write_token(tmp_path)
    flags = ("--tls-ca", str(ca), "--tls-cert", str(cert), "--tls-key", str(key))
    with StandIn(PeerAccess.of(str(token), str(ca), str(cert), str(key))) as cluster:
        cluster.deploy(NAME)
        cluster.add(NAME, "one", served[0].url)
        gateway = GatewayProcess(tmp_path, f"127.0.0.1:{cluster.port}", token, *flags)
        try:
            assert gateway.post("/v1/completions", body())[0] == 200
        finally:
            gateway.kill()
        stranger = GatewayProcess(tmp_path, f"127.0.0.1:{cluster.port}", token, ready=False)
        try:
            until(lambda: "the controller is away" in stranger.output(), stranger.output)
        finally:
            stranger.kill()


def test_a_wrong_token_of_the_cluster_is_named(cluster: StandIn, tmp_path: Path) -> None:
    file = tmp_path / "wrong-token"
    file.touch(mode=0o600)
    file.write_text("not-the-token-of-this-cluster")
    gateway = GatewayProcess(tmp_path, f"127.0.0.1:{cluster.port}", file, "--hold-s", "0.5", ready=False)
    try:
        until(lambda: "the controller is away" in gateway.output(), gateway.output)
        assert "refused the token; expected the cluster's, see --token-file" in gateway.output()
        assert gateway.get("/readyz")[0] == gateway.get("/health")[0] == 503
        status, answer = gateway.post("/v1/completions", body())
        assert (status, answer["error"]["code"]) == (503, "not_ready")
        assert gateway.output().count("WARNING") == 1
    finally:
        assert gateway.stop() == 0


def test_idle_connections_do_not_keep_others_out(shared: GatewayProcess) -> None:
    idle = [socket.create_connection(("127.0.0.1", shared.port)) for _ in range(300)]
    for number, connection in enumerate(idle):
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100\r\n"[: number % 50])
    assert shared.post("/v1/completions", body())[0] == 200
    for connection in idle:
        connection.close()


def test_a_connection_is_kept_for_the_next_request(shared: GatewayProcess) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", shared.port, timeout=240)
    connection.connect()
    mine = connection.sock.getsockname()
    for stream in (False, True, False):
        connection.request("POST", "/v1/completions", json.dumps(body(stream=stream)), JSON)
        assert connection.getresponse().read()
        assert connection.sock.getsockname() == mine
    connection.close()


def test_metrics_are_those_of_the_page(gateway: GatewayProcess) -> None:
    assert gateway.post("/v1/completions", body(stream=True, ignore_eos=True))[0] == 200
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| (`medusa_gateway_[^|]*) \| (\w+) \|", page, re.MULTILINE)
    documented = {name: kind for names, kind in rows for name in re.findall(r"`(\w+)`", names)}
    del documented["medusa_gateway_certificate_expiration_timestamp_seconds"]  # only with TLS
    text = gateway.get("/metrics")[1]
    assert dict(re.findall(r"(?m)^# TYPE (\S+) (\S+)$", text)) == documented
    for line in text.splitlines():
        assert line.startswith("#") or re.fullmatch(
            r'medusa_gateway_\w+(\{\w+="[^"]*"(,\w+="[^"]*")*\})? [-\d.e+]+', line
        ), line
    assert gateway.metric("medusa_gateway_tokens_total", model=NAME) == 8
    assert gateway.metric("medusa_gateway_time_to_first_token_seconds_count", model=NAME) == 1


def test_a_burst_of_threads_ends(gateway: GatewayProcess) -> None:
    """Nothing is left in the queues and counters when all have their answers."""
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(gateway.post, ["/v1/completions"] * 24, [body()] * 24))
    assert [status for status, _ in answers] == [200] * 24, answers
    assert gateway.metric("medusa_gateway_requests_total", model=NAME, status="200") == 24
    until(lambda: gateway.metric("medusa_gateway_running") == gateway.metric("medusa_gateway_waiting") == 0)
