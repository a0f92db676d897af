"""Bodies of requests that are compressed, which a model's routes and a function's `request.json` refuse."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from typing import Any

Serve = Callable[..., Any]
PLAIN = b'{"prompt": "a", "max_tokens": 1, "name": "Ada"}'
ROUTES = (
    "/", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/pooling", "/classify",
    "/score", "/rerank", "/tokenize", "/detokenize", "/v1/load_lora_adapter", "/medusa/generate",
)  # fmt: skip


def test_a_models_routes_refuse_them(serve: Serve) -> None:
    served = serve()
    for path in ROUTES:
        for kind, encoding in (("application/json", "gzip"), ("text/plain", "GZIP"), ("", "x-unknown")):
            headers = {"Content-Type": kind, "Content-Encoding": encoding}
            status, answer, _ = served.request("POST", path, gzip.compress(PLAIN), headers)
            assert (status, answer["error"]["code"]) == (415, "bad_content_encoding"), (path, answer)
            assert f"found it encoded ({encoding.lower()}); send it uncompressed" in answer["error"]["message"]
    for path in ("/", "/v1/completions"):
        assert served.request("POST", path, gzip.compress(PLAIN))[0] == 400
        assert served.request("POST", path, b'{"prompt": "a"}', {"Content-Encoding": "identity"})[0] == 200


def test_a_functions_json_names_the_encoding(serve: Serve) -> None:
    served = serve(handler="function/handler.py:handle")
    named = {"Content-Encoding": "deflate"}
    status, answer, _ = served.request("POST", "/", zlib.compress(PLAIN), named)
    assert (status, answer["error"]) == (
        415, "expected the body as it is, found it encoded (deflate); send it uncompressed"
    )  # fmt: skip
    assert served.request("POST", "/", PLAIN, named)[1]["hello"] == "Ada", "it was unpacked on its way"
