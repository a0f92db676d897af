"""What is decided before Flask is there, and in which order those that waited begin."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from medusa_handler.admission import Admission
from medusa_handler.http.environ import ARRIVAL
from medusa_handler.platform import Platform
from medusa_handler.probes import Probes
from medusa_handler.server.wsgi_gateway import WsgiGateway
from medusa_runtime.config import Settings
from medusa_runtime.liveness import Heartbeats
from waiting import until


def test_held_requests_begin_in_the_order_of_arrival() -> None:
    admission = Admission(1, 8)
    begun: list[int] = []

    def hold(number: int) -> None:
        admission.start(lambda: False, 60, threading.Event(), arrived=number)
        begun.append(number)
        admission.finish()

    threads = []
    for count, number in enumerate((3, 1, 4, 0, 2), 1):
        threads.append(threading.Thread(target=hold, args=(number,)))
        threads[-1].start()
        until(lambda count=count: len(admission._queue) == count)
    admission.open()
    for thread in threads:
        thread.join(60)
    assert begun == [0, 1, 2, 3, 4]


def test_requests_beyond_the_cap_are_refused_before_the_app_is_there() -> None:
    may_build = threading.Event()
    arrived: list[int] = []

    def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        arrived.append(environ[ARRIVAL])
        start_response("200 OK", [])
        return [b"called"]

    def build() -> Any:
        may_build.wait(60)
        return app

    settings = Settings(max_waiting=1, max_concurrency=1, handler="handler.py")
    service: Any = SimpleNamespace(
        settings=settings,
        probes=Probes(settings, Platform(), None, Heartbeats()),
        admission=SimpleNamespace(refused=0),
        model=SimpleNamespace(eta_s=lambda: 7.2),
    )
    gateway = WsgiGateway(service, build)
    answers: list[tuple[str, dict[str, str], bytes]] = []

    def call() -> None:
        began: list[Any] = []
        environ = {"PATH_INFO": "/", "REQUEST_METHOD": "POST"}
        body = b"".join(gateway(environ, lambda status, headers: began.append((status, dict(headers)))))
        answers.append((*began[0], body))

    held = [threading.Thread(target=call) for _ in range(2)]
    for thread in held:
        thread.start()
    until(lambda: not gateway._room._value)
    call()
    ((status, headers, body),) = answers
    assert status == "503 Service Unavailable"
    assert headers["Retry-After"] == "8"
    assert b'{"error": "it is still starting, and 2 requests wait' in body
    assert service.admission.refused == 1
    may_build.set()
    for thread in held:
        thread.join(60)
    assert [answer[2] for answer in answers[1:]] == [b"called"] * 2
    assert sorted(arrived) == [0, 1]
