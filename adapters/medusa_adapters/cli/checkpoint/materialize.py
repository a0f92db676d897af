"""`medusa materialize`: make once, and keep beside the weights, what every start needs."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_runtime.config import OPTIONS, Settings, from_env
from medusa_runtime.errors import ConfigError, MedusaError
from medusa_runtime.logs import for_terminal
from medusa_runtime.registry import is_remote
from medusa_runtime.state.bundle.writer import BundleWriter
from medusa_runtime.state.kinds import PROMPT_KV, PROMPTS, STAGE_TIMES
from medusa_runtime.state.materialize import ArtifactResult, Materialization, bundle_folder
from medusa_runtime.state.stage_times import StageTimes, summarize
from medusa_runtime.storage.base import redacted

from ...bench.coldstart.contestants import Medusa, Question
from ..flags import add_model, model_argument, request_body
from ..leftovers import Leftovers
from ..progress import note, size
from ..serve import warn_of_unread_flags, with_engine_flags
from .prompts import read_prompts, record

if TYPE_CHECKING:
    from medusa_runtime.region.reader import Region
    from medusa_runtime.state.bundle.manifest import Manifest

    from ..batch.lines import BatchRequest

_FLAGS = (
    "model", "engine", "handler", "device", "dtype", "max_model_len", "max_concurrency", "max_batched_tokens",
    "threads", "kv_cache_mb", "compile", "vllm_args",
)  # fmt: skip
_PROMPT, _TOKENS = "The quick brown fox jumps over the lazy dog", 9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Make the state bundle that lets starts skip work. With --engine vllm, flags of vllm serve follow behind --."
    )
    add_model(parser)
    for option in OPTIONS:
        if option.field in _FLAGS and option.field != "model":
            parser.add_argument(option.flag, metavar=option.form, help=option.help)
    parser.add_argument(
        "--request", metavar="BODY",
        help="with --engine none: a request whose answer shows in which order the handler's module uses its tensors, "
        "for starts to fetch them so; @FILE is a file's content",
    )  # fmt: skip
    parser.add_argument(
        "--prompts", metavar="FILE",
        help="requests in the form of medusa batch: the keys and values of their prompts are kept, so that no start "
        "computes them; for --engine torch on a CPU",
    )  # fmt: skip
    parser.add_argument(
        "--sign", type=Path, metavar="KEY",
        help="sign the bundle with this ed25519 private key (PEM); starts that name the public one (--trust-key) run "
        "the code in it",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the bundle there; default: .medusa in the model")
    parser.add_argument(
        "--convert", type=Path, metavar="FILE",
        help="write torch.save's or unaligned tensors as this safetensors file first; model.safetensors beside them is "
        "what starts then read",
    )  # fmt: skip
    parser.add_argument(
        "--starts", type=int, default=3, metavar="N", help="starts to measure; 0 leaves out their times"
    )


def run(arguments: argparse.Namespace) -> int:
    flags = {name: getattr(arguments, name) for name in _FLAGS} | {"model": model_argument(arguments)}
    settings = with_engine_flags(from_env(os.environ, **flags), arguments.engine_flags)
    warn_of_unread_flags(flags, settings.engine)
    if settings.model is None:
        raise ConfigError("expected a checkpoint: medusa materialize URL, or --model URL")
    if arguments.starts < 0:
        raise ConfigError(f"--starts={arguments.starts} cannot be used: expected a whole number, 0 or more")
    signer = None
    if arguments.sign is not None:
        from medusa_runtime.state.bundle.signing import Signer

        signer = Signer.read(arguments.sign)
    if arguments.convert is not None:
        settings = replace(settings, model=convert(settings, arguments.convert))
    if is_remote(settings.engine):
        raise ConfigError("--engine cluster: expected an engine that has its weights here, to materialize them")
    if settings.engine == "vllm":
        from medusa_vllm.version import installed_version

        installed_version()
    prompts = None if arguments.prompts is None else read_prompts(arguments.prompts, settings)
    began = time.monotonic()
    with Materialization(settings, arguments.out, _print_made, _ordered(settings, arguments.request), signer) as making:
        making.prepare()
        manifest = making.commit()
        if prompts is not None:
            manifest = _add_prompts(making, prompts, settings)
        if arguments.starts and settings.engine != "none" and making.continues_text:
            measuring = time.monotonic()
            try:
                times = measure(settings, making.folder, arguments.starts)
            except MedusaError as error:
                _print_made(ArtifactResult(STAGE_TIMES.name, left_out=str(error)))
            else:
                making.add(STAGE_TIMES, times.to_bytes(), measuring)
                manifest = making.commit()
    total = sum(artifact.size for artifact in manifest.artifacts)
    took_s = time.monotonic() - began
    count = len(manifest.artifacts)
    print(f"{making.folder}: {count} artifact{'s' * (count != 1)}, {size(total)}, in {took_s:.1f} s")
    if signer is not None:
        print(f"signed; to run the code in it, starts say --trust-key {signer.public}")
    return 0


def _add_prompts(making: Materialization, prompts: Sequence[BatchRequest], settings: Settings) -> Manifest:
    """Add the keys and values of prompts, and return the manifest. Raises ConfigError if they cannot be recorded."""
    if not making.continues_text:
        raise ConfigError("--prompts is for a model that continues text; leave it out")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="medusa-prompts-") as folder:
        data, file = record(prompts, settings, making.folder, Path(folder))
        if len(data) > PROMPTS.most_bytes:
            limit, found = size(PROMPTS.most_bytes), size(len(data))
            raise ConfigError(f"--prompts: expected prompts whose tokens take {limit}, found {found}; leave some out")
        making.add(PROMPTS, data, began)
        making.add(PROMPT_KV, file, began)
        return making.commit()


def leftovers(arguments: argparse.Namespace) -> list[Leftovers | _UncommittedBlobs]:
    found: list[Leftovers | _UncommittedBlobs] = []
    if (file := arguments.convert) is not None:
        found.append(Leftovers(file.parent, f".{file.name}.*"))
    model = from_env(os.environ, model=model_argument(arguments)).model
    with suppress(MedusaError):  # the command itself says what is wrong
        if model is not None:
            found.append(_UncommittedBlobs(arguments.out or bundle_folder(model)))
    return found


class _UncommittedBlobs:
    """Files that an interrupted command wrote into a bundle's folder, and that no manifest names."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rest = Leftovers(folder, "*.part")

    def remove(self) -> None:
        if self._folder.is_dir():
            with suppress(MedusaError), BundleWriter(self._folder) as writer:
                writer.discard()
        self._rest.remove()


def _ordered(settings: Settings, request: str | None) -> Callable[[Region], Sequence[str]] | None:
    """Return a function that records the order in which a handler's module uses its tensors; None for an engine's."""
    if settings.engine != "none" or settings.handler is None:
        if request is not None:
            raise ConfigError("--request is for a handler that builds its own module: expected --engine none --handler")
        return None
    if request is None:
        _print_made(
            ArtifactResult(
                "order", left_out="expected --request BODY, which the handler answers by a forward of its module"
            )
        )
        return None
    body = request_body(request)

    def find_order(region: Region) -> Sequence[str]:
        from medusa_handler.user_code.recording import execution_order

        began = time.monotonic()
        order = execution_order(region, settings, body)
        note(f"the order of {len(order)} tensors, from one request, in {time.monotonic() - began:.1f} s")
        return order

    return find_order


def convert(settings: Settings, file: Path) -> str:
    """Write torch.save's tensors, or unaligned or sharded ones, as one safetensors file. Return what to serve then.

    Raises ConfigError if there is nothing to convert, or the file cannot be there.
    """
    from medusa_runtime.checkpoint.gguf.blocks import GGUF_SUFFIX
    from medusa_runtime.checkpoint.reader import SAFETENSORS_FILE
    from medusa_runtime.fetch.prefetcher import prefetch
    from medusa_runtime.load.conversion import is_converted, write_safetensors
    from medusa_runtime.region.reader import Region
    from medusa_runtime.timeline import Timeline

    assert settings.model is not None
    if file.exists() or file.suffix != ".safetensors" or not file.parent.is_dir():
        raise ConfigError(
            f"--convert={str(file)!r}: expected a .safetensors file that does not exist, in a folder that does"
        )
    began, region = time.monotonic(), Region.create()
    try:
        prefetch(region, settings.model, settings=settings, timeline=Timeline.create("convert"))
        if is_converted(region.wait_index()):
            raise ConfigError(
                f"--convert: {redacted(settings.model)} is safetensors already, aligned and in one file; "
                "leave --convert out"
            )
        if region.wait_index().shards[0].name.endswith(GGUF_SUFFIX):
            raise ConfigError(f"--convert: {redacted(settings.model)} is GGUF, which has no other form; leave it out")
        write_safetensors(region, file)
    finally:
        region.close()
    print(f"  {file.name:14} {size(file.stat().st_size):>10}  {time.monotonic() - began:6.2f} s", flush=True)
    return str(file.parent if file.name == SAFETENSORS_FILE else file)


def measure(settings: Settings, folder: Path, starts: int) -> StageTimes:
    """Start the model ``starts`` times with the bundle made so far, and ask each instance for a few tokens."""
    assert settings.model is not None
    given = {
        option.flag: getattr(settings, option.field)
        for option in OPTIONS
        if option.field in _FLAGS and option.field not in ("model", "engine", "handler")
    }
    flags = [f"{flag}={value}" for flag, value in given.items() if value is not None]  # a value may begin with --
    question = Question(
        settings.model, settings.model, _PROMPT, _TOKENS, flags=("--state", str(folder.resolve()), *flags)
    )
    engine, timelines, decode_s = Medusa(settings.engine), [], []
    for number in range(starts):
        with engine.start(question) as instance:
            answer = instance.completion(question.body)
            instance.wait_ready()
            timelines.append(instance.stages())
        decode_s.append((answer.end_ns - answer.first_token_ns) / 1e9 / (_TOKENS - 1))
        note(f"start {number + 1}: first token after {(answer.first_token_ns - instance.started_ns) / 1e6:.0f} ms")
    return summarize(timelines, decode_s)


def _print_made(made: ArtifactResult) -> None:
    if made.left_out is None:
        print(f"  {made.kind:14} {size(made.size_bytes):>10}  {made.took_s:6.2f} s")
    else:
        print(f"  {made.kind:14} left out: {for_terminal(made.left_out)}")
    sys.stdout.flush()


__all__ = ["convert", "measure"]
