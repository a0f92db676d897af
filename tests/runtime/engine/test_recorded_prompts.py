"""Recorded prompts: what a recording engine writes, and what an engine does with it, whatever comes, and when."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_fixtures import SETTINGS, Served, fill_region, join_tokenizers
from fetching import fetch_into
from medusa_runtime.engine.torch.kv_size import free_bytes
from medusa_runtime.engine.torch.recording import RecordingEngine
from medusa_runtime.errors import ModelError
from medusa_runtime.fetch.prefetcher import RestoredCheckpoint
from medusa_runtime.region.reader import Region
from medusa_runtime.state.fingerprint import fingerprint
from medusa_runtime.state.kinds import PROMPT_KV, PROMPTS, file_name
from medusa_runtime.state.prompts import DIGEST_BYTES, RecordedPrompts, digest
from medusa_runtime.timeline import Timeline
from recurrent_models import write_recurrent
from safetensors.torch import load_file, save_file
from waiting import until

SYSTEM = "Tokens flow from storage to memory, and from memory to layers. " * 4
PROMPTS_ASKED = (SYSTEM, SYSTEM + "A layer runs when its bytes are there, and not before.", "Der Fuchs springt. " * 8)


class Bundle:
    """A state bundle that holds recorded prompts, and publishes the keys and values when the test says so."""

    def __init__(self, prompts: bytes, kv: bytes | None, size_bytes: int) -> None:
        self._files = {file_name(PROMPTS.name): prompts}
        self._late = {file_name(PROMPT_KV.name): size_bytes}
        self._kv = kv
        self.may_come = threading.Event()

    def begin(self, store: Any) -> None: ...

    def files(self) -> None:
        return None

    def archive(self, _name: str) -> None:
        return None

    def confirms(self, *_: Any) -> bool:
        return False

    def restore(self, checkpoint: Any) -> RestoredCheckpoint:
        return RestoredCheckpoint(checkpoint.index, None, self._files, self._late)

    def start(self, writer: Any) -> None:
        def publish() -> None:
            self.may_come.wait()
            (name,) = late.pending()
            if self._kv is None:
                late.withhold(name)
                return
            with late.pending()[name] as memory:
                memory[:] = self._kv
            late.publish(name)

        late = writer.late_files
        self._thread = threading.Thread(target=publish)
        self._thread.start()

    def finish(self) -> None:
        self._thread.join()

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def recorded(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    return record(checkpoint, tmp_path_factory.mktemp("recorded"))


def record(checkpoint: Path, folder: Path, **settings: Any) -> tuple[bytes, bytes]:
    """Return the two artifacts of PROMPTS_ASKED."""
    with closing(fill_region(checkpoint)) as region, closing(Timeline.create("engine")) as timeline:
        engine = RecordingEngine(region, replace(SETTINGS, **settings), timeline, folder)
        engine.wait_ready()
        served = Served(engine, timeline)
        for prompt in PROMPTS_ASKED:
            assert served.ask(prompt).last.completion_tokens == 1
        served.close()
    return (folder / PROMPTS.name).read_bytes(), (folder / PROMPT_KV.name).read_bytes()


@pytest.fixture
def serve_recorded(checkpoint: Path, serve_region: Callable[..., Served]) -> Iterator[Callable[..., Any]]:
    """Start an engine with recorded prompts. The keys and values come at once, unless ``late``."""
    with ExitStack() as stack:

        def start(
            prompts: bytes,
            kv: bytes | None,
            *,
            folder: Path = checkpoint,
            late: bool = False,
            size_bytes: int = 0,
            **settings: Any,
        ) -> Any:
            bundle = Bundle(prompts, kv, size_bytes or len(kv or b"") or 4096)
            region = stack.enter_context(closing(Region.create()))
            if not late:
                bundle.may_come.set()
            thread = threading.Thread(target=fetch_into, args=(region, str(folder)), kwargs={"bundle": bundle})
            thread.start()
            stack.callback(thread.join)
            stack.callback(bundle.may_come.set)
            served = serve_region(region, **settings)
            stack.callback(served.close)  # before the region
            return served, bundle

        yield start


def kept(prompt: str, served: Served) -> int:
    """How many tokens of a prompt are whole blocks in front of its last token."""
    return (len(served.engine.tokenize(prompt)) - 1) // 16 * 16


def test_what_is_recorded_is_a_tree_of_blocks(recorded: tuple[bytes, bytes], checkpoint: Path) -> None:
    prompts = RecordedPrompts.from_bytes(recorded[0])
    assert prompts.block_shape == (4, 2, 16, 2, 16)
    assert prompts.dtype == "float32"
    assert prompts.max_model_len == 512
    assert 0 < prompts.block_s < 60
    assert prompts.parents.count(-1) == 2
    first = prompts.parents.index(-1, 1)  # of the third prompt
    assert prompts.parents[:first] == tuple(range(-1, first - 1)), "the second goes on where the first ends"
    assert prompts.tokens[:16] == prompts.block(0)
    assert RecordedPrompts.from_bytes(prompts.to_bytes()) == prompts
    assert recorded[1][:DIGEST_BYTES] == digest(recorded[0])
    assert len(recorded[1]) == DIGEST_BYTES + len(prompts.parents) * 4 * 2 * 16 * 2 * 16 * 4
    with closing(fill_region(checkpoint)) as region:
        assert prompts.weights == fingerprint(region)


def test_recorded_prompts_are_not_computed(recorded: tuple[bytes, bytes], serve_recorded: Any, serve: Any) -> None:
    served, _ = serve_recorded(*recorded)
    alone = serve(prefix_cache_mb=0)
    for prompt in (*PROMPTS_ASKED, SYSTEM + "What flows?", "Was springt?", PROMPTS_ASKED[1] + " Why?"):
        answer, expected = served.ask(prompt, logprobs=2).wait(), alone.ask(prompt, logprobs=2).wait()
        assert answer.tokens == expected.tokens
        for one, other in zip(answer.deltas, expected.deltas, strict=True):
            assert one.logprobs[0].logprob == pytest.approx(other.logprobs[0].logprob, abs=1e-4)
        begins_alike = prompt != "Was springt?"
        assert (answer.last.cached_tokens > 50) == begins_alike
        if prompt in PROMPTS_ASKED:
            assert answer.last.cached_tokens == kept(prompt, served)
    (first,) = [stage for stage in served.timeline.stages() if stage.name == "first_forward"]
    assert first.detail["tokens"] <= 16
    assert served.engine.stats()["kv_tokens_used"] == 0


def test_a_prompt_waits_for_its_keys_and_values_and_others_do_not(
    recorded: tuple[bytes, bytes], serve_recorded: Any
) -> None:
    patient = replace(RecordedPrompts.from_bytes(recorded[0]), block_s=1000.0).to_bytes()
    served, bundle = serve_recorded(patient, digest(patient) + recorded[1][DIGEST_BYTES:], late=True)
    assert served.ask("Was springt?").last.finish_reason == "length"
    waiting = served.ask(SYSTEM)
    time.sleep(0.3)
    assert waiting.incoming.empty()
    bundle.may_come.set()
    assert waiting.last.cached_tokens == kept(SYSTEM, served)


def test_a_prompt_waits_no_longer_than_it_takes_to_compute_it(
    recorded: tuple[bytes, bytes], serve_recorded: Any, serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    served, bundle = serve_recorded(*recorded, late=True)
    answer = served.ask(SYSTEM).wait()
    assert not bundle.may_come.is_set()
    assert answer.last.cached_tokens == 0
    assert answer.tokens == serve().ask(SYSTEM).tokens
    assert caplog.text.count("faster than to wait longer") == 1


def test_a_bundle_cannot_make_a_prompt_wait_for_ever(
    recorded: tuple[bytes, bytes], serve_recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its keys and values never come, and it says that they took years to compute."""
    monkeypatch.setattr("medusa_runtime.engine.torch.recorded_blocks._LONGEST_S", 0.1)
    endless = replace(RecordedPrompts.from_bytes(recorded[0]), block_s=2.0**39).to_bytes()
    served, bundle = serve_recorded(endless, recorded[1], late=True)
    assert served.ask(SYSTEM).last.cached_tokens == 0
    assert not bundle.may_come.is_set()


def test_keys_and_values_that_come_later_are_used(recorded: tuple[bytes, bytes], serve_recorded: Any) -> None:
    """A prompt that was computed, to wait no longer, does not end the wait of others."""
    served, bundle = serve_recorded(*recorded, late=True, kv_cache_mb=1)
    assert served.ask(SYSTEM).last.cached_tokens == 0
    bundle.may_come.set()
    bundle.finish()
    until(lambda: served.engine._recorded is not None and served.engine._recorded.present)
    answer = served.ask(PROMPTS_ASKED[2])
    assert answer.last.cached_tokens == kept(PROMPTS_ASKED[2], served)


@pytest.mark.parametrize("case", ["withheld", "another digest", "too short"])
def test_a_prompt_is_computed_if_its_keys_and_values_do_not_come(
    recorded: tuple[bytes, bytes], serve_recorded: Any, serve: Any, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    kv = {"withheld": None, "another digest": b"0" * 64 + recorded[1][64:], "too short": recorded[1][:-1]}[case]
    served, _ = serve_recorded(recorded[0], kv)
    assert served.ask(SYSTEM).tokens == serve().ask(SYSTEM).tokens
    assert served.ask(SYSTEM).last.cached_tokens == kept(SYSTEM, served)  # computed by the first request
    assert "of recorded prompts are not used: " in caplog.text


@pytest.mark.parametrize("change", ["dtype", "max_model_len", "no prompts", "larger"])
def test_prompts_for_another_start_are_left_out(
    recorded: tuple[bytes, bytes], serve_recorded: Any, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    data, kv = recorded
    prompts = RecordedPrompts.from_bytes(data)
    if change == "larger":
        data = replace(prompts, block_shape=(5, *prompts.block_shape[1:])).to_bytes()
    elif change == "no prompts":
        data = b"what is this?"
    settings = {"dtype": {"dtype": "bfloat16"}, "max_model_len": {"max_model_len": 256}}.get(change, {})
    served, _ = serve_recorded(data, kv, **settings)
    assert served.ask(SYSTEM).last.cached_tokens == 0
    expected = {
        "no prompts": "expected recorded prompts",
        "larger": "for float32, blocks of 5x2x16x2x16 and up to 512 tokens; expected float32, blocks of 4x2x16x2x16",
    }
    assert expected.get(change, "the recorded prompts are for") in caplog.text


def test_prompts_of_other_weights_are_computed_again(
    recorded: tuple[bytes, bytes],
    checkpoint: Path,
    tmp_path: Path,
    serve_recorded: Any,
    serve: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One row of one matrix differs. The wrong answer of the first step is not delivered."""
    folder = tmp_path / "tuned"
    shutil.copytree(checkpoint, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.v_proj.weight"] *= -1.5
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    served, _ = serve_recorded(*recorded, folder=folder)
    others = served.ask("Was springt?", max_tokens=30)
    first = served.ask(SYSTEM)
    expected = serve(folder)
    assert first.tokens == expected.ask(SYSTEM).tokens
    assert first.last.cached_tokens == 0
    assert others.tokens == expected.ask("Was springt?", max_tokens=30).tokens
    assert served.ask(SYSTEM).last.cached_tokens == kept(SYSTEM, served), "now it is this model's own"
    assert caplog.text.count("computed by other weights") == 1
    assert served.engine.stats()["cached_tokens_total"] == kept(SYSTEM, served)


def test_recorded_blocks_come_again_when_they_were_given_up(
    recorded: tuple[bytes, bytes], serve_recorded: Any, serve: Any
) -> None:
    served, _ = serve_recorded(*recorded, kv_cache_mb=1)
    alone = serve(prefix_cache_mb=0)
    for number in range(12):
        served.ask(f"{number} {PROMPTS_ASKED[0]}", max_tokens=4).wait()
        answer = served.ask(SYSTEM + str(number))
        assert answer.last.cached_tokens >= kept(SYSTEM, served) - 16
        assert answer.tokens == alone.ask(SYSTEM + str(number)).tokens
    assert served.engine.stats()["kv_tokens_used"] == 0


def test_nothing_waits_for_prompts_when_the_engine_is_closed(
    recorded: tuple[bytes, bytes], serve_recorded: Any
) -> None:
    patient = replace(RecordedPrompts.from_bytes(recorded[0]), block_s=1000.0).to_bytes()
    served, bundle = serve_recorded(patient, recorded[1], late=True)
    served.ask(SYSTEM)
    served.close()
    assert not bundle.may_come.is_set()
    assert "recorded-blocks" not in {thread.name for thread in threading.enumerate()}


def test_a_memory_limit_counts_keys_and_values_before_and_after_they_come(serve_recorded: Any, serve: Any) -> None:
    size_bytes = 64 << 20
    served, bundle = serve_recorded(b"", bytes(size_bytes), late=True)

    def free(served: Served) -> int:
        region = served.engine._region
        limited = replace(SETTINGS, memory_limit_mb=100)
        return free_bytes(region, region.wait_index(), limited, torch.float32, served.engine._applier())

    assert free(served) == free(serve()) - size_bytes
    bundle.may_come.set()
    bundle.finish()
    assert free(served) == free(serve()) - size_bytes


@pytest.mark.parametrize("settings", [{"prefix_cache_mb": 0}, {"layers": "0:4"}, {"state": "none"}])
def test_who_cannot_use_recorded_prompts_computes_them(
    recorded: tuple[bytes, bytes], serve_recorded: Any, settings: dict[str, Any]
) -> None:
    served, _ = serve_recorded(*recorded, **settings)
    assert served.ask(SYSTEM).last.cached_tokens == 0


def test_what_the_bundle_has_is_recorded_anew(recorded: tuple[bytes, bytes], checkpoint: Path, tmp_path: Path) -> None:
    """Copies would say nothing of the time that blocks take."""
    bundle = Bundle(*recorded, len(recorded[1]))
    bundle.may_come.set()
    with closing(Region.create()) as region, closing(Timeline.create("engine")) as timeline:
        fetch_into(region, str(checkpoint), bundle=bundle)
        served = Served(RecordingEngine(region, SETTINGS, timeline, tmp_path), timeline)
        assert served.ask(SYSTEM).last.cached_tokens == 0
        served.close()
    assert (tmp_path / PROMPT_KV.name).stat().st_size > DIGEST_BYTES


def test_a_folder_that_cannot_be_written_to_is_named(checkpoint: Path, tmp_path: Path) -> None:
    with closing(fill_region(checkpoint)) as region, closing(Timeline.create("engine")) as timeline:
        served = Served(RecordingEngine(region, SETTINGS, timeline, tmp_path / "gone" / "folder"), timeline)
        error = served.ask(SYSTEM).last.error
        served.close()
    assert error is not None
    assert f"keys and values cannot be written to {tmp_path}/gone (No such file" in error[1]
    assert str(served.errors[0]) == error[1]


def test_a_model_whose_layers_keep_states_has_none(tmp_path: Path) -> None:
    folder = write_recurrent(tmp_path, "Lfm2ForCausalLM")
    with closing(fill_region(folder)) as region, closing(Timeline.create("engine")) as timeline:
        with pytest.raises(ModelError, match="--prompts cannot be used with Lfm2ForCausalLM: its layers keep states"):
            RecordingEngine(region, SETTINGS, timeline, tmp_path)
        join_tokenizers()


def test_a_fingerprint_is_that_of_the_values(checkpoint: Path, tmp_path: Path) -> None:
    def found(**changed: Any) -> str:
        tensors = load_file(checkpoint / "model.safetensors") | changed
        shutil.copytree(checkpoint, tmp_path / "copy", dirs_exist_ok=True)
        save_file(tensors, tmp_path / "copy" / "model.safetensors", {"format": "pt", "order": "may differ"})
        with closing(fill_region(tmp_path / "copy")) as region:
            return fingerprint(region)

    tensors = load_file(checkpoint / "model.safetensors")
    assert found() == found()
    for name in ("model.norm.weight", "model.layers.3.mlp.down_proj.weight", "model.embed_tokens.weight"):
        assert found(**{name: tensors[name] + 1e-6}) != found()
