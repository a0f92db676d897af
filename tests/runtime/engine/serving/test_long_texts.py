"""Texts of a megabyte and more: the same tokens, others go on meanwhile, and there is a largest size."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from engine_fixtures import byte_level_tokenizer
from medusa_runtime.engine.base import EngineInfo
from medusa_runtime.engine.serving.tokenizer import Tokenizer
from medusa_runtime.errors import LimitError, OverloadedError, RequestError
from medusa_runtime.timeline import Timeline

TEXT = "It's a text, naïve 😀, of many words and 12345 numbers.\n\tNext line. " * 6000


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_tokenizer().to_str().encode(), Timeline.create("test"))


def longest_pause_s(tokenizer: Tokenizer, work: str) -> tuple[float, float]:
    """The longest time for which another thread did not run while ``work`` was done, and the time of all the work."""
    ids = tokenizer.encode(TEXT, True) if work == "decode" else []
    tokenizer.wait(1 << 30)
    ended = threading.Event()
    pauses = [0.0]

    def tick() -> None:
        last = time.monotonic()
        while not ended.is_set():
            time.sleep(0.001)
            pauses.append((now := time.monotonic()) - last)
            last = now

    ticking = threading.Thread(target=tick)
    ticking.start()
    began = time.monotonic()
    {
        "encode": lambda: tokenizer.encode(TEXT, True),
        "encode_pair": lambda: tokenizer.encode_pair(TEXT, TEXT),
        "decode": lambda: tokenizer.decode(ids * 4),
    }[work]()
    took_s = time.monotonic() - began
    ended.set()
    ticking.join()
    return max(pauses), took_s


@pytest.mark.parametrize("work", ["encode", "encode_pair", "decode"])
def test_other_threads_run_while_a_long_text_is_tokenized(tokenizer: Tokenizer, work: str) -> None:
    """A text of 5 MB once held up every other request for 13 seconds."""
    for _ in range(3):  # another program may take the CPU for a while
        pause_s, took_s = longest_pause_s(tokenizer, work)
        if pause_s < took_s / 2:
            return
    pytest.fail(f"for {pause_s:.2f} of {took_s:.2f} s no other thread ran")


@pytest.mark.parametrize("count", [1, 100, 6000])
def test_a_long_text_has_the_same_tokens(tokenizer: Tokenizer, count: int) -> None:
    text = TEXT[: len(TEXT) // 6000 * count] + "\ud800"
    parsed = byte_level_tokenizer()
    plain = text.replace("\ud800", "\ufffd")
    for special in (True, False):
        ids = parsed.encode(plain, add_special_tokens=special).ids
        assert tokenizer.encode(text, special) == ids
    assert tokenizer.decode(ids) == parsed.decode(ids, skip_special_tokens=False)
    both = parsed.encode(plain, plain)
    assert tokenizer.encode_pair(text, text) == (both.ids, both.type_ids)


def test_a_text_has_a_largest_size(tokenizer: Tokenizer) -> None:
    """30 MB once took 3.6 GB, and went on after the client had been told that it took too long."""
    tokenizer.check_size("a" * (1 << 20), 512)
    with pytest.raises(RequestError, match="prompt: expected at most 1048576 characters in one text, found 1048577"):
        tokenizer.check_size("a" * (1 << 20) + "a", 512)
    tokenizer.check_size("a" * (8 << 20), 1 << 20)
    with pytest.raises(RequestError, match="input: expected at most 8388608 characters"):
        tokenizer.check_size("a" * (9 << 20), 1 << 20, name="input")


MANY = """
import sys, threading
from pathlib import Path
from medusa_runtime.engine.serving.tokenizer import Tokenizer
from medusa_runtime.timeline import Timeline


def peak_kib():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


tokenizer = Tokenizer(Path(sys.argv[1]).read_bytes(), Timeline.create("test"))
text = "\N{GRINNING FACE}" * (1 << 17)
tokenizer.encode("a", True)
peaks = [peak_kib()]
for count in (1, 8):
    threads = [threading.Thread(target=tokenizer.encode, args=(text, True)) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    peaks.append(peak_kib())
print(*peaks)
"""


def test_many_long_texts_take_little_more_memory_than_one(tmp_path: Path) -> None:
    """Twelve of 4 MB at once, none of which was answered in time, once took 7 GB of the engine's memory."""
    (tmp_path / "tokenizer.json").write_text(byte_level_tokenizer().to_str())
    command = [sys.executable, "-c", MANY, str(tmp_path / "tokenizer.json")]
    before, one, many = map(int, subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.split())
    assert many - before < 3 * (one - before)


def test_a_long_text_that_waits_too_long_for_others_is_refused(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa_runtime.engine.serving.tokenizer._TURN_S", 0.0)
    with tokenizer._turn(len(TEXT)):
        assert tokenizer.encode(TEXT[:1000], True)
        with pytest.raises(OverloadedError, match="other long texts were tokenized"):
            tokenizer.encode(TEXT, True)
    assert tokenizer.encode(TEXT, True)


def test_a_request_for_text_has_a_largest_number_of_ids(tokenizer: Tokenizer) -> None:
    """Ten million ids once took 26 seconds, and 600 MB of the engine's memory."""
    info = EngineInfo("torch", "llama", 1000, 512, (), 0)
    most = 1 << 20
    assert len(tokenizer.detokenize([65] * most, info)) == most
    with pytest.raises(RequestError, match="token_ids: expected at most 1048576 in one request, found 1048577"):
        tokenizer.detokenize([65] * (most + 1), info)
    assert tokenizer.detokenize([65] * (most + 1), info._replace(max_model_len=most + 1))


def test_one_long_piece_does_not_let_prompts_be_as_long_as_it(tmp_path: Path) -> None:
    """Many vocabularies have a piece of 128 spaces; a prompt of so many characters for each token is none to serve."""
    saved = json.loads(byte_level_tokenizer().to_str())
    saved["model"]["vocab"]["Ġ" * 1000] = len(saved["model"]["vocab"])
    tokenizer = Tokenizer(json.dumps(saved).encode(), Timeline.create("test"))
    tokenizer.check_length(" " * (1 << 20), 100_000)
    with pytest.raises(RequestError, match="expected at most 1048576 characters"):
        tokenizer.check_length(" " * (2 << 20), 100_000)


def test_a_tokenizer_that_cannot_be_imported_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread once ended with a traceback, and the first text failed on an attribute of None."""

    class NoRoom:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "tokenizers":
                raise ImportError("tokenizers.abi3.so: failed to map segment from shared object")

    monkeypatch.delitem(sys.modules, "tokenizers", raising=False)
    monkeypatch.setattr(sys, "meta_path", [NoRoom(), *sys.meta_path])
    with pytest.raises(LimitError, match="there is no memory left"):
        Tokenizer(b"{}", Timeline.create("test")).wait(1)
