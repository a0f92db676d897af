"""The function's address: what it may be, and the URL that leads there."""

from __future__ import annotations

import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from medusa_runtime.config import Settings
from medusa_runtime.errors import ConfigError
from medusa_runtime.instance.listeners import bind, url_of


class Answer(BaseHTTPRequestHandler):
    """Answers with nothing."""

    def do_GET(self) -> None:
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:"),
        ("::1", "http://[::1]:"),
        ("0.0.0.0", "http://0.0.0.0:"),
        ("::", "http://[::]:"),
    ],
)
def test_the_url_of_an_address_leads_there(host: str, url: str) -> None:
    with bind(Settings(host=host, port=0)) as listener:
        assert url_of(listener).startswith(url)
        server = HTTPServer(("", 0), Answer, bind_and_activate=False)
        server.socket.close()
        server.socket = listener
        Thread(target=server.handle_request, daemon=True).start()
        with urllib.request.urlopen(url_of(listener), timeout=10) as answer:
            assert answer.status == 204


@pytest.mark.parametrize("host", ["192.0.2.1", "nowhere.invalid", "a" * 64, "a..b", "\udc80"])
def test_what_is_no_address_of_this_machine_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="expected an address of this machine as --host"):
        bind(Settings(host=host, port=0))
