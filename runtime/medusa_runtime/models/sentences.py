"""Settings of a sentence encoder, which turns a text into one vector.

They are in the files that sentence-transformers puts beside the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from medusa_runtime.checkpoint.reader import SENTENCE_MODULES, SENTENCE_SETTINGS, module_config_name
from medusa_runtime.errors import CorruptError, ModelError
from medusa_runtime.models.architectures import as_decoder, is_encoder
from medusa_runtime.models.fields import ReadFile, read_json, read_object

_POOLINGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "lasttoken": "last",
}
_KINDS = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True)
class SentenceEncoderSettings:
    """The settings of a sentence encoder. The defaults are for a checkpoint without such files.

    ``pooling`` is a name in POOLINGS, ``normalize`` says whether vectors are scaled to length 1, and ``max_tokens`` is
    the length of text that the encoder was trained for.
    """

    pooling: str = "mean"
    normalize: bool = True
    max_tokens: int | None = None

    @classmethod
    def read(cls, file: ReadFile) -> Self:
        """Read modules.json and the files that it names.

        Raises ModelError for a setting that is not supported, and CorruptError for a file that is not JSON.
        """
        kinds = _kinds(file)
        if kinds is None:
            return cls()
        unknown = [kind for kind in kinds if kind not in _KINDS]
        if unknown:
            raise ModelError(f"{SENTENCE_MODULES}: expected {', '.join(_KINDS)}; found also {', '.join(unknown)}")
        pooling = "mean"
        if "Pooling" in kinds:
            name = module_config_name(str(kinds["Pooling"].get("path", "")))
            pooling = _pooling(name, read_json(file, name))
        limit = (read_object(file, SENTENCE_SETTINGS) or {}).get("max_seq_length")
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            raise CorruptError(f"{SENTENCE_SETTINGS}: expected max_seq_length to be 1 or more, found {limit!r}")
        return cls(pooling, "Normalize" in kinds, limit)


def embedding_decoder(raw: Mapping[str, Any], file: ReadFile) -> dict[str, Any] | None:
    """Return the config.json of the decoder whose hidden states a sentence encoder pools, such as Qwen3-Embedding.

    ``raw`` is the checkpoint's. Returns None for another checkpoint, also for a decoder that transformers runs.
    Raises CorruptError.
    """
    decoder = None if is_encoder(raw) else as_decoder(raw)
    return decoder if decoder is not None and "Pooling" in (_kinds(file) or ()) else None


def _kinds(file: ReadFile) -> dict[str, dict[str, Any]] | None:
    """Return the modules of modules.json by their kinds; None if there is no such file."""
    modules = read_json(file, SENTENCE_MODULES)
    if modules is None:
        return None
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise CorruptError(f"{SENTENCE_MODULES}: expected a list of modules, found {str(modules)[:80]}")
    return {str(module.get("type")).rpartition(".")[2]: module for module in modules}


def _pooling(name: str, config: Any) -> str:
    if not isinstance(config, dict):
        raise CorruptError(f"{name}: expected the pooling's JSON object, found {config!r}")
    mode = config.get("pooling_mode")
    found = [mode] if isinstance(mode, str) else [key for key, on in config.items() if on is True and "_mode_" in key]
    known = [_POOLINGS.get(one, one) for one in found]
    if len(known) != 1 or known[0] not in _POOLINGS.values():
        raise ModelError(
            f"{name}: expected one pooling, mean, cls or lasttoken; found {', '.join(map(str, known)) or 'none'}"
        )
    return str(known[0])
