"""A check of a checkpoint before any start, from its headers and small files alone, with the code that a start runs."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..checkpoint.index import WeightIndex
from ..config import Settings
from ..errors import ConfigError
from ..imports.lazy_torch import import_torch
from ..models.backend import backend
from ..models.fields import ReadFile
from ..process_limits import used_bytes

if TYPE_CHECKING:
    from ..load.applier import Applier

_MOST_BYTES = 4 << 30  # for the skeleton of a stranger's model, whose buffers, such as masks, config.json sizes


def check(read: ReadFile, index: WeightIndex, settings: Settings) -> None:
    """Build the model as a skeleton, find a place for each tensor, and parse the tokenizer.

    Imports torch, which takes half a second of CPU time. Raises what the start of an engine would raise: ModelError,
    ConfigError, CorruptError and MismatchError; ImportError without torch.
    """
    kind = backend(read, settings).kind
    if settings.torch_import != "plain":
        import_torch()
    with _bounded_memory():
        for applier in _decoder(read, index, settings) if kind == "decoder" else _encoder(read, index, settings):
            applier.plan(applier.index(index))
    check_tokenizer(read)


@contextmanager
def _bounded_memory() -> Iterator[None]:
    """Raise ConfigError if the code in this context needs more than _MOST_BYTES of memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = used_bytes(resource.RLIMIT_DATA) + _MOST_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most if soft == resource.RLIM_INFINITY else min(most, soft), hard))
    try:
        yield
    except MemoryError:
        expected = f"sizes of a model whose masks and tables take at most {_MOST_BYTES >> 30} GiB"
        raise ConfigError(f"config.json: expected {expected}, found larger ones") from None
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def check_tokenizer(read: ReadFile) -> None:
    """Parse the tokenizer.json, if there is one. Raises CorruptError."""
    tokenizer = read("tokenizer.json")
    if tokenizer is not None:
        from .serving.tokenizer import parse

        parse(tokenizer)


def _decoder(read: ReadFile, index: WeightIndex, settings: Settings) -> list[Applier]:
    from .checkpoint_files import check_for_gpu, read_config, read_eos_token_ids

    config = read_config(read, index, settings.dtype, settings.max_model_len)
    if settings.device == "cuda":
        check_for_gpu(config)
    read_eos_token_ids(read, config)
    return [config.model().applier(config.dtype)]


def _encoder(read: ReadFile, index: WeightIndex, settings: Settings) -> list[Applier]:
    from ..models.base import DTYPES
    from ..models.sentences import SentenceEncoderSettings
    from .encoder.text_encoder import build_encoder

    dtype = None if settings.dtype == "auto" else DTYPES[settings.dtype]
    return build_encoder(read, index, SentenceEncoderSettings.read(read), dtype)[2]


__all__ = ["check", "check_tokenizer"]
