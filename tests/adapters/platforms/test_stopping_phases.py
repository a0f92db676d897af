"""SIGTERM in every phase of a start, on every platform: it ends cleanly, and who waits is told so in the right form."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .test_conformance import PLACES, Place

Launch = Callable[..., Any]
EXAMPLE = Path(__file__).parents[3] / "examples" / "pydoc-lm"


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Place:
    found = PLACES[request.param]
    quick = {"healthcheck_interval": "100ms"} if request.param == "openfaas" else {}
    return found._replace(env=found.env | quick)


class Stuck(http.server.ThreadingHTTPServer):
    """A store that has everything of the example but sends no weights, only their header, before it is let go."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        self.go = threading.Event()
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Stuck

    def do_GET(self) -> None:
        path = EXAMPLE / Path(self.path).name
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        start, stop = int(first), min(int(last or len(data)) + 1, len(data))
        if path.suffix == ".safetensors" and start > 0:
            self.server.go.wait()
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        self.send_header("Content-Length", str(stop - start))
        self.send_header("ETag", '"one"')
        self.end_headers()
        self.wfile.write(data[start:stop])

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None: ...

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:
            pass


@pytest.fixture
def stuck() -> Iterator[str]:
    with Stuck() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.go.set()
        server.shutdown()


def ended(instance: Any) -> None:
    """It ends by itself with 0, says nothing of a defect, and leaves nothing."""
    assert instance.process.wait(60) == 0, instance.output()
    assert "Traceback" not in instance.output()
    assert list((instance.folder / "tmp").iterdir()) == []


def test_as_soon_as_it_listens(launch: Launch, place: Place) -> None:
    starting = launch("--model", str(EXAMPLE), wait=False, **place.env)
    starting.terminate()
    ended(starting)


def test_while_the_function_loads(launch: Launch, place: Place) -> None:
    loading = launch(handler="slow_load/handler.py:Handler", wait=False, **place.env)
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(loading.request("POST", place.path, b"")))
    waiting.start()
    loading.until(lambda: loading.metric("medusa_requests_held") == 1)
    loading.terminate()
    waiting.join()
    ended(loading)
    (answer,) = answers
    assert answer.status == 503
    assert "stopping" in answer.json["error"]
    assert int(answer.headers["retry-after"]) >= 1


def test_while_the_weights_are_fetched(launch: Launch, place: Place, stuck: str) -> None:
    fetching = launch("--model", stuck, wait=False, **place.env)
    fetching.until(lambda: json.loads(fetching.request("GET", "/readyz").body).get("total_bytes", 0) > 0)
    answers: list[Any] = []
    body = {"prompt": "This", "max_tokens": 2}
    waiting = threading.Thread(target=lambda: answers.append(fetching.request("POST", place.path, body)))
    waiting.start()
    fetching.until(lambda: fetching.metric("medusa_requests_in_flight") == 1)
    fetching.terminate()
    waiting.join()
    ended(fetching)
    (answer,) = answers
    assert answer.status == 503
    assert "stopping" in str(answer.json["error"])


def test_while_it_answers(launch: Launch, place: Place) -> None:
    """What runs is answered to its end, though a stream may need longer than the stop takes otherwise."""
    serving = launch("--model", str(EXAMPLE), **place.env)
    body = {"prompt": "This", "max_tokens": 300, "temperature": 0, "ignore_eos": True, "stream": True}
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(serving.request("POST", place.path, body)))
    asking.start()
    serving.until(lambda: bool(answers) or serving.metric("medusa_requests_in_flight") == 1)
    serving.terminate()
    asking.join()
    ended(serving)
    (answer,) = answers
    assert answer.status == 200
    assert answer.body.endswith(b"data: [DONE]\n\n")
    assert b'"error"' not in answer.body
