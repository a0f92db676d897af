"""`medusa serve --engine cluster`: a user's function whose engine is a model of the cluster."""

from __future__ import annotations

import http.server
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from cluster_stand_in import StandIn
from forked_instance import ForkedInstance
from gateway_fixtures import NAME, GatewayProcess, Instance
from medusa_adapters.bench.served_instance import serve_command
from medusa_cluster.remote.engine import ClusterEngine
from medusa_cluster.remote.gateways import Gateways
from medusa_runtime.config import Settings
from medusa_runtime.errors import EngineError
from plain_environ import plain_environ
from waiting import until

Start = Callable[..., Any]

PROMPT = "This function returns"
HANDLER = """
class Handler:
    def load(self, context):
        self.model = context.model

    def predict(self, request):
        asked = request.object
        if "messages" in asked:
            return {"text": self.model.chat(asked["messages"], max_tokens=12, temperature=0)}
        if "tokenize" in asked:
            ids = self.model.tokenize(asked["tokenize"])
            return {"ids": ids, "text": self.model.detokenize(ids), "engine": self.model.info.engine}
        return {"text": self.model.generate(asked["prompt"], **asked["sampling"])}
"""


class Function(ForkedInstance):
    """A function process without an engine of its own."""

    def __init__(self, gateway: str, *arguments: str | Path, model: str = NAME) -> None:
        command = serve_command("--engine", "cluster", "--model", model, "--cluster", gateway, *arguments)
        super().__init__(command, plain_environ())

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        answer = self.exchange("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return answer.status, answer.json


@pytest.fixture
def start_function(gateway: GatewayProcess) -> Iterator[Start]:
    started: list[Function] = []

    def start(*arguments: str | Path, url: str = gateway.url, model: str = NAME, ready: bool = True) -> Function:
        started.append(Function(url, *arguments, model=model))
        if ready:
            started[-1].wait_ready()
        return started[-1]

    yield start
    for function in started:
        function.close()


def test_a_function_uses_the_model_of_the_cluster(
    start_function: Start, served: tuple[Instance, ...], tmp_path: Path
) -> None:
    (tmp_path / "handler.py").write_text(HANDLER)
    function = start_function("--handler", tmp_path / "handler.py")
    sampling = {"max_tokens": 12, "temperature": 1.0, "seed": 5}
    direct = json.loads(_completion(served[0], prompt=PROMPT, **sampling))["choices"][0]["text"]
    assert function.post("/", {"prompt": PROMPT, "sampling": sampling}) == (200, {"text": direct})
    messages = [{"role": "user", "content": PROMPT}]
    chat = {"model": NAME, "messages": messages, "max_tokens": 12, "temperature": 0}
    reference = served[0].exchange("POST", "/v1/chat/completions", json.dumps(chat), JSON).json
    answer = function.post("/", {"messages": messages})
    assert answer == (200, {"text": reference["choices"][0]["message"]["content"]})
    status, found = function.post("/", {"tokenize": "a value"})
    assert (status, found["text"], found["engine"]) == (200, "a value", "torch")
    assert not any("libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in function.tree())


def test_the_openai_routes_answer_as_an_instance_does(start_function: Start, served: tuple[Instance, ...]) -> None:
    """Token ids and log-probabilities come unchanged: so do the answers, to the last digit."""
    function = start_function()
    bodies = {
        "/v1/completions": {"prompt": PROMPT, "max_tokens": 20, "n": 2, "seed": 3, "logprobs": 3, "stop": ["."]},
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 9, "seed": 3, "logprobs": True,
            "top_logprobs": 2,
        },
        "/tokenize": {"prompt": PROMPT},
    }  # fmt: skip
    for path, body in bodies.items():
        status, found = function.post(path, {"model": NAME} | body)
        expected = served[0].exchange("POST", path, json.dumps({"model": NAME} | body), JSON).json
        assert status == 200, found
        for answer in (found, expected):
            answer.pop("id", None)
            answer.pop("created", None)
        assert found == expected


def test_errors_of_the_engine_reach_the_client_as_they_are(start_function: Start) -> None:
    function = start_function()
    status, answer = function.post("/v1/completions", {"prompt": PROMPT * 500, "max_tokens": 4})
    assert status == 400
    assert "tokens" in answer["error"]["message"]


class Embedder(http.server.BaseHTTPRequestHandler):
    """A gateway that embeds, and takes for ever for "slow". It notes what was sent, and when that client has left."""

    sent: ClassVar[list[Any]] = []
    asked, left = threading.Event(), threading.Event()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.sent.append(body)
        if body["arguments"]["inputs"] == ["slow"]:
            self.asked.set()
            assert self.connection.recv(1) == b""
            self.left.set()
            return
        self.do_GET(b'{"value": [[3, "AAAAAA=="]]}')

    def do_GET(self, body: bytes = b"{}") -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def embedding() -> Iterator[ClusterEngine]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Embedder) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        engine = object.__new__(ClusterEngine)
        url = f"http://127.0.0.1:{server.server_port}"
        engine._model, engine._gateways = "m", Gateways.of(Settings(engine="cluster", cluster=url))
        yield engine
        server.shutdown()


def test_texts_are_embedded_as_the_engines_client_asks(embedding: ClusterEngine) -> None:
    found = embedding.embed(inputs=["x"], dimensions=None, truncate=None, classify=True, cancelled=threading.Event())
    assert found == [[3, "AAAAAA=="]]
    assert (Embedder.sent[-1]["method"], Embedder.sent[-1]["arguments"]["classify"]) == ("embed", True)


@pytest.mark.timeout(60)
def test_embedding_that_is_cancelled_ends_at_the_gateway(embedding: ClusterEngine) -> None:
    """The worker once went on computing for a client that had left."""
    cancelled = threading.Event()
    threading.Thread(target=lambda: Embedder.asked.wait() and cancelled.set(), daemon=True).start()
    with pytest.raises(EngineError, match="the request was cancelled"):
        embedding.embed(inputs=["slow"], cancelled=cancelled)
    assert Embedder.left.wait(30)


def test_an_unknown_model_ends_the_start(start_function: Start) -> None:
    function = start_function(model="unheard-of", ready=False)
    until(lambda: not function.alive(), function.output)
    assert function.process.returncode == 1
    assert "the model 'unheard-of' does not exist in this cluster" in function.output()


def test_a_gateway_that_cannot_be_reached_is_named_while_it_is_tried() -> None:
    with Function("http://127.0.0.1:9", "--hold-s", "60") as function:
        said = "no gateway of the cluster can be reached (http://127.0.0.1:9: "
        until(lambda: said in function.output())
        assert "it is tried for 60 s" in function.output()
        assert function.alive()


def test_a_client_that_leaves_ends_the_work_at_the_instance(
    start_function: Start, served: tuple[Instance, ...], gateway: GatewayProcess
) -> None:
    function = start_function()
    connection = function.connect()
    body = {"prompt": PROMPT, "max_tokens": 480, "ignore_eos": True, "stream": True, "n": 8}
    connection.request("POST", "/v1/completions", json.dumps(body), JSON)
    assert connection.getresponse().readline().startswith(b"data: ")
    assert gateway.metric("medusa_gateway_running", model=NAME) > 0
    connection.close()
    until(lambda: gateway.metric("medusa_gateway_running", model=NAME) == 0)
    until(lambda: served[0].metric("medusa_engine_running") == served[0].metric("medusa_requests_in_flight") == 0)


def test_the_other_gateway_is_used_when_one_ends(
    start_function: Start, start_gateway: Start, gateway: GatewayProcess
) -> None:
    second = start_gateway()
    function = start_function(url=f"{gateway.url},{second.url}")
    gateway.kill()
    status, answer = function.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 4})
    assert status == 200, answer


@pytest.mark.parametrize(("route", "most"), [("/tokenize", {}), ("/v1/completions", {"max_tokens": 4})])
def test_the_other_gateway_is_used_when_one_stands_still(
    start_function: Start, start_gateway: Start, gateway: GatewayProcess, route: str, most: dict[str, int]
) -> None:
    second = start_gateway()
    function = start_function(url=f"{gateway.url},{second.url}")
    os.kill(gateway.process.pid, signal.SIGSTOP)
    began = time.monotonic()
    status, answer = function.post(route, {"model": NAME, "prompt": PROMPT} | most)
    assert status == 200, answer
    assert time.monotonic() - began < 25
    began = time.monotonic()
    assert function.post(route, {"model": NAME, "prompt": PROMPT} | most)[0] == 200
    assert time.monotonic() - began < 2, "the one that stood still is tried last"


def test_a_gateway_that_stands_still_ends_its_requests_by_an_error(
    start_function: Start, gateway: GatewayProcess
) -> None:
    function = start_function()
    os.kill(gateway.process.pid, signal.SIGSTOP)
    status, answer = function.post("/tokenize", {"model": NAME, "prompt": PROMPT})
    assert (status, answer["error"]["message"]) == (
        503, f"the gateway at {gateway.url} takes requests and answers none; it may hang"
    )  # fmt: skip
    os.kill(gateway.process.pid, signal.SIGCONT)
    assert function.post("/tokenize", {"model": NAME, "prompt": PROMPT})[0] == 200


def test_an_instance_that_is_killed_is_not_noticed_by_the_function(
    start_function: Start, start_instance: Start, cluster: StandIn, served: tuple[Instance, ...]
) -> None:
    victim = start_instance()
    cluster.add(NAME, "a-victim", victim.url)
    cluster.drop(NAME, "one")
    function = start_function()
    body = {"prompt": PROMPT, "max_tokens": 300, "ignore_eos": True, "seed": 1}
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(function.post("/v1/completions", body)))
    cluster.calls.clear()
    asking.start()
    until(lambda: ("a-victim", "medusa/generate") in cluster.calls)
    cluster.add(NAME, "one", served[0].url)
    victim.signal(signal.SIGKILL)
    asking.join(60)
    status, answer = answers[0]
    assert status == 200, answer
    assert answer["choices"][0]["text"] == json.loads(_completion(served[0], **body))["choices"][0]["text"]


JSON = {"Content-Type": "application/json"}


def _completion(instance: Instance, **body: Any) -> str:
    return instance.exchange("POST", "/v1/completions", json.dumps(body), JSON).text
