"""The parts of `medusa batch`: its lines, where they come from, and what waits for its turn."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from medusa_adapters.cli.batch import feed, lines
from medusa_adapters.cli.batch.custom_ids import CustomIds
from medusa_adapters.cli.batch.feed import Feed
from medusa_adapters.cli.batch.lines import BadLineError, BatchRequest, parse_request
from medusa_adapters.cli.batch.source import Source, split_url
from medusa_runtime.errors import ConfigError

GOOD: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "ü"}}


def test_a_request_is_read() -> None:
    found = parse_request(3, json.dumps(GOOD).encode())
    assert (found.number, found.custom_id, found.url, json.loads(found.body)) == (3, "a", GOOD["url"], GOOD["body"])


@pytest.mark.parametrize(
    ("line", "text", "custom_id"),
    [
        (None, "a shorter line", None),
        ("[1]", "found an array", None),
        ("{", "found something else", None),
        ('{"a": NaN}', "NaN", None),
        ('{"a":' * 100_000, "less depth", None),
        ("[" + "1," * 2_000_000 + "1]", "at most 1,000,000 values", None),
        (GOOD | {"custom_id": 3}, "a custom_id", None),
        (GOOD | {"custom_id": ""}, "a custom_id", None),
        (GOOD | {"custom_id": "x" * 513}, "a custom_id", None),
        (GOOD | {"method": "GET"}, 'expected "POST", found "GET"', "a"),
        (GOOD | {"url": "https://api.openai.com/v1/completions"}, "a route", "a"),
        (GOOD | {"url": "/v1/completions HTTP/1.1\r\nX: y"}, "a route", "a"),
        (GOOD | {"url": None}, "a route", "a"),
        (GOOD | {"body": []}, "an object", "a"),
        (GOOD | {"body": {"stream": True}}, "whole answers", "a"),
        (GOOD | {"model": "x"}, 'found "model"', "a"),
    ],
)
def test_a_bad_line_says_what_is_wrong(line: Any, text: str, custom_id: str | None) -> None:
    data = line if line is None else (line if isinstance(line, str) else json.dumps(line)).encode()
    with pytest.raises(BadLineError, match="line 7: ") as caught:
        parse_request(7, data)
    assert text in str(caught.value)
    assert caught.value.custom_id == custom_id


def test_a_result_is_one_line_whatever_the_server_sends() -> None:
    for body, shown in (
        (b'{"a":1}', {"a": 1}),
        (b'{\n "a": "\xc3\xbc"\n}', {"a": "ü"}),
        (b"<html>\n", "<html>\n"),
        (b"", ""),
        (b"\xff", "\ufffd"),
    ):
        line = lines.result('a"\n', 500, "id", body)
        assert line.count(b"\n") == 1
        found = json.loads(line)
        assert found["response"] == {"status_code": 500, "request_id": "id", "body": shown}
        assert (found["custom_id"], found["error"], lines.key_of(line)) == ('a"\n', None, 'a"\n')


def test_custom_ids_that_are_no_unicode_stay_different() -> None:
    """Each lone surrogate was once written as a question mark, so that --resume skipped the request of that name."""
    for custom_id in ("\ud800", "\ud801", "?", "\U0001f600"):
        request = parse_request(1, json.dumps(GOOD | {"custom_id": custom_id, "body": {"prompt": custom_id}}).encode())
        assert json.loads(request.body) == {"prompt": custom_id}
        for line in (lines.result(custom_id, 200, "id", b"{}"), lines.failure(custom_id, "connection_lost", "x")):
            assert lines.key_of(line) == custom_id


def test_a_failed_request_is_known_by_its_id_and_a_bad_line_by_its_number() -> None:
    assert lines.key_of(lines.failure("a", "connection_lost", "line 3: x")) == "a"
    for custom_id in (None, "a"):
        bad = lines.failure(custom_id, lines.INVALID, "line 3: x")
        assert lines.key_of(bad) == lines.bad_line_key("line 3: x") != lines.bad_line_key("line 4: x")


@pytest.mark.parametrize("line", [
    {"custom_id": 5, "error": None}, {"custom_id": None, "error": None}, {"custom_id": ["a"], "error": None},
    {"custom_id": "a"}, {"custom_id": "a", "error": "x"},
    {"custom_id": {}, "error": {"code": "x"}},
    [], "a", 5,
])  # fmt: skip
def test_what_is_no_result_has_no_key(line: Any) -> None:
    with pytest.raises(ValueError, match="expected a"):
        lines.key_of(json.dumps(line).encode())


@pytest.mark.parametrize("piece_bytes", [1, 3, 1 << 20])
def test_lines_are_found_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    from medusa_adapters.cli.batch import source as module

    monkeypatch.setattr(module, "_PIECE_BYTES", piece_bytes)
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"one\n\n \n" + b"x" * 20 + b"\ntwo\r\n" + b"y" * 11 + b"\nlast")
    expected = [(1, b"one"), (4, None), (5, b"two\r"), (6, None), (7, b"last")]
    for place in (str(path), f"file://{path}"):
        source = Source(place, 10, lambda: False)
        assert list(source.lines()) == expected
        assert source.read_bytes == source.size_bytes == path.stat().st_size
        source.close()
    path.write_bytes(b"a\n" + b"z" * 50)
    source = Source(str(path), 10, lambda: False)
    assert list(source.lines()) == [(1, b"a"), (2, None)]
    source.close()


def test_a_file_is_found_in_its_folder() -> None:
    assert split_url("s3://bucket/a/in.jsonl") == ("s3://bucket/a", "in.jsonl")
    assert split_url("https://host/in.jsonl?sig=a/b") == ("https://host?sig=a/b", "in.jsonl")
    for url in ("s3://bucket", "s3://bucket/", "https://host"):
        with pytest.raises(ConfigError, match="URL of a file"):
            split_url(url)


def test_custom_ids_are_remembered() -> None:
    ids = CustomIds()
    assert [ids.add(name) for name in ("a", "b", "a", "\ud800")] == [True, True, False, True]
    assert ("b" in ids, "c" in ids) == (True, False)
    ids.close()


def test_the_feed_is_limited_in_number_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "_MOST_BYTES", 100)
    waiting = Feed(3)

    def put(size: int) -> threading.Thread:
        thread = threading.Thread(target=waiting.put, args=(BatchRequest(1, "a", "/", b"x" * size),))
        thread.start()
        thread.join(0.3)
        return thread

    assert not put(1000).is_alive()  # alone, it may be as large as it is
    blocked = put(10)
    assert blocked.is_alive()
    first = waiting.take()
    assert first is not None
    waiting.done(first)
    blocked.join(10)
    assert [put(10).is_alive() for _ in range(2)] == [False, False]
    fourth = put(10)
    assert fourth.is_alive()
    waiting.stop()
    fourth.join(10)
    assert waiting.take() is None
