"""Stop strings in text that comes piece by piece."""

from __future__ import annotations

import random
import time

import pytest
from medusa_runtime.engine.serving.detokenizer import Detokenizer
from medusa_runtime.engine.serving.transcript import Transcript


def decode(ids: list[int]) -> str:
    return bytes(ids).decode(errors="replace")


def read(text: str, stop: tuple[str, ...], include: bool = False) -> tuple[list[str], str | None]:
    transcript = Transcript(Detokenizer(decode, []), stop, include_stop=include)
    pieces = []
    for byte in text.encode():
        pieces.append(transcript.push(byte))
        if transcript.stopped_by:
            return pieces, transcript.stopped_by
    return [*pieces, transcript.finish()], transcript.stopped_by


@pytest.mark.parametrize("include", [False, True])
def test_any_split_stops_where_the_whole_text_does(include: bool) -> None:
    rng = random.Random(1)
    for _ in range(300):
        text = "".join(rng.choice("abé") for _ in range(30))
        stops = tuple("".join(rng.choice("abé") for _ in range(rng.randrange(2, 6))) for _ in range(2))
        pieces, stopped_by = read(text, stops, include)
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        if not ends:
            assert ("".join(pieces), stopped_by) == (text, None)
            continue
        assert stopped_by in stops
        assert text.find(stopped_by) + len(stopped_by) == min(ends)  # the one that was complete first
        assert "".join(pieces) == text[: min(ends) - (0 if include else len(stopped_by))]


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    pieces, _ = read("one END two EN", ("END.",))
    assert pieces[:7] == ["o", "n", "e", " ", "", "", ""]
    assert pieces[7] == "END "
    assert pieces[-1] == "EN"


def test_a_stop_string_does_not_count_before_it_may() -> None:
    transcript = Transcript(Detokenizer(decode, []), ("b",), include_stop=False)
    assert transcript.push(ord("b"), may_stop=False) == "b"
    assert transcript.stopped_by is None
    assert transcript.push(ord("b")) == ""
    assert transcript.stopped_by == "b"


def test_stop_strings_are_found_where_vllm_finds_them() -> None:
    """It looks, once there are more than ``min_tokens``, for the one that ends first in the tokens after these."""
    rng = random.Random(3)
    pieces = ["a", "b", "ab", "ba", "aab", "bab", "abba"]
    met = 0
    for _ in range(2000):
        stops = tuple("".join(rng.choice("ab") for _ in range(rng.randrange(1, 6))) for _ in range(3))
        min_tokens, include = rng.randrange(6), rng.random() < 0.5
        transcript = Transcript(
            Detokenizer(lambda ids: "".join(pieces[i] for i in ids), []), stops, include_stop=include
        )
        text, sent, settled = "", "", 0
        for count in range(1, 12):
            token = rng.randrange(len(pieces))
            text, before = text + pieces[token], len(text)
            sent += transcript.push(token, may_stop=count > min_tokens)
            settled = len(text) if count <= min_tokens else settled
            ends = [text.find(stop, max(before - len(stop) + 1, 0)) + len(stop) for stop in stops]
            found = [(end, stop) for end, stop in zip(ends, stops, strict=True) if end >= len(stop) and end > settled]
            if not found:
                assert transcript.stopped_by is None
                continue
            end, stop = min(found, key=lambda each: each[0])
            assert transcript.stopped_by == stop
            assert sent == text[: end if include else end - len(stop)]
            met += end - len(stop) < settled
            break
        else:
            assert sent + transcript.finish() == text
    assert met > 50  # those that begin before they may end


def test_the_same_text_is_held_back_as_by_comparing_the_whole_text() -> None:
    rng = random.Random(2)
    for _ in range(300):
        stops = tuple("".join(rng.choice("ab") for _ in range(rng.randrange(1, 9))) for _ in range(3))
        transcript, text, sent = Transcript(Detokenizer(decode, []), stops, include_stop=False), "", ""
        while len(text) < 40:
            piece = rng.choice("ab")
            text += piece
            sent += transcript.push(ord(piece))
            if transcript.stopped_by is not None:
                assert text.endswith(transcript.stopped_by)
                break
            assert not any(stop in text for stop in stops)
            beginnings = [length for stop in stops for length in range(len(stop)) if text.endswith(stop[:length])]
            assert len(text) - len(sent) == max(beginnings)


def test_long_stop_strings_that_are_nearly_reached_cost_little_for_each_token() -> None:
    length = 30_000
    stops = ("a" * length + "b", *("~" * length + str(number) for number in range(15)))
    transcript = Transcript(Detokenizer(lambda ids: "a" * len(ids), []), stops, include_stop=False)
    began = time.process_time()
    assert not any(transcript.push(1) for _ in range(length))
    assert time.process_time() - began < 5  # comparing took minutes
    assert len(transcript.finish()) == length
