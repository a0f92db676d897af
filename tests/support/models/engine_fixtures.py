"""Tiny checkpoints with random weights and a real tokenizer, and engines that serve them from real regions."""

from __future__ import annotations

import itertools
import json
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from medusa_runtime.config import Settings
from medusa_runtime.engine.base import Delta, GenerateRequest, SamplingParams
from medusa_runtime.timeline import Timeline

if TYPE_CHECKING:
    from medusa_runtime.engine.torch.engine import TorchEngine

TEXT = (
    "Tokens flow from storage to memory, and from memory to layers. A layer runs when its bytes are there. "
    "Der schnelle braune Fuchs springt über den faulen Hund, çà et là, naïve café 😀🚀 日本語. "
)
SETTINGS = Settings(max_concurrency=8, max_waiting=64, kv_cache_mb=4, threads=1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 4 layers in fp32 with grouped-query attention and a byte-level tokenizer."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def make_checkpoint() -> Callable[..., Path]:
    """Write such a checkpoint with changes to its config."""
    return write_checkpoint


def write_checkpoint(folder: Path, **changes: Any) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_level_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = LlamaConfig(
        **{
            "vocab_size": tokenizer.get_vocab_size(),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "initializer_range": 0.3,  # so that what comes out depends on what went in
            **changes,
        }
    )
    torch.manual_seed(7)
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    return folder


def byte_level_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
    )
    return tokenizer


@dataclass
class Answer:
    """The deltas of one request, as they come."""

    id: str
    deltas: list[Delta] = field(default_factory=list)
    incoming: queue.SimpleQueue[Delta] = field(default_factory=queue.SimpleQueue)

    def next(self) -> Delta:
        delta = self.incoming.get(timeout=240)
        self.deltas.append(delta)
        return delta

    def wait(self) -> Answer:
        while not self.deltas or self.deltas[-1].finish_reason is None:
            self.next()
        return self

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.wait().deltas)

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.wait().deltas for token in delta.token_ids]

    @property
    def last(self) -> Delta:
        return self.wait().deltas[-1]


_engines = itertools.count()


def join_tokenizers() -> None:
    """Wait for threads that read a tokenizer, which write to their engine's timeline at the end."""
    for thread in threading.enumerate():
        if thread.name == "tokenizer":
            thread.join()


class Served:
    """A running engine."""

    def __init__(self, engine: TorchEngine, timeline: Timeline) -> None:
        self.engine = engine
        self.timeline = timeline
        self.stop = threading.Event()
        self.errors: list[BaseException] = []
        self.count = next(_engines) * 1000  # ids must differ between engines that exchange requests
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.engine.run(self.stop)
        except BaseException as error:  # noqa: BLE001 - a test looks at it
            self.errors.append(error)

    def close(self) -> None:
        self.stop.set()
        self.thread.join(120)
        self.engine.close()

    def ask(self, prompt: str | list[int], **params: Any) -> Answer:
        self.count += 1
        answer = Answer(f"r{self.count}")
        given = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **params})
        tokens = prompt if isinstance(prompt, str) else tuple(prompt)
        self.engine.add(GenerateRequest(answer.id, tokens, given), answer.incoming.put)
        return answer


def fill_region(checkpoint: Path) -> Any:
    from fetching import fetch_into
    from medusa_runtime.region.reader import Region

    region = Region.create()
    fetch_into(region, str(checkpoint))
    return region


@pytest.fixture
def serve_region() -> Iterator[Callable[..., Served]]:
    """Start engines on regions, with other settings than SETTINGS, and on a GPU, if given."""
    from medusa_runtime.engine.torch.engine import TorchEngine

    with ExitStack() as stack:

        def start(region: Any, gpu: Any = None, **settings: Any) -> Served:
            timeline = Timeline.create("engine")
            stack.callback(timeline.close)
            stack.callback(join_tokenizers)  # an engine that could not be made has left one
            served = Served(TorchEngine(region, replace(SETTINGS, **settings), timeline, gpu), timeline)
            stack.callback(served.close)
            return served

        yield start


@pytest.fixture
def serve(checkpoint: Path, serve_region: Callable[..., Served]) -> Iterator[Callable[..., Served]]:
    """Start engines on the tiny checkpoint, or another."""
    regions: list[Any] = []

    def start(folder: Path = checkpoint, **settings: Any) -> Served:
        regions.append(fill_region(folder))
        return serve_region(regions[-1], **settings)

    yield start
    for region in regions:
        region.close()
