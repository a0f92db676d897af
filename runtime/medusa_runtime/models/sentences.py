"""Settings of a sentence encoder, which turns a text into one vector.

They are in the files that sentence-transformers puts beside the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from medusa_runtime.checkpoint.reader import SENTENCE_MODULES, SENTENCE_SETTINGS, module_config_name
from medusa_runtime.errors import CorruptError, ModelError
from medusa_runtime.models.architectures import as_decoder, is_encoder
from medusa_runtime.models.fields import Fields, ReadFile, read_json, read_object

_POOLINGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "lasttoken": "last",
}
_KINDS = ("Transformer", "Pooling", "Dense", "Normalize")  # in this order, and only Dense more than once
_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid")  # of torch


class DenseSettings(NamedTuple):
    """A linear layer behind the pooling, whose tensors are in the folder ``path`` of the checkpoint.

    ``activation`` is the name of a class of torch.nn.
    """

    path: str
    in_features: int
    out_features: int
    bias: bool
    activation: str


@dataclass(frozen=True)
class SentenceEncoderSettings:
    """The settings of a sentence encoder. The defaults are for a checkpoint without such files.

    ``pooling`` is a name in POOLINGS, ``normalize`` says whether vectors are scaled to length 1, and ``max_tokens`` is
    the length of text that the encoder was trained for. ``dense`` are the layers between the two.
    """

    pooling: str = "mean"
    normalize: bool = True
    max_tokens: int | None = None
    dense: tuple[DenseSettings, ...] = ()

    @classmethod
    def read(cls, file: ReadFile) -> Self:
        """Read modules.json and the files that it names.

        Raises ModelError for a setting that is not supported, and CorruptError for a file that is not JSON.
        """
        modules = _modules(file)
        if modules is None:
            return cls()
        kinds = [kind for kind, _ in modules]
        places = [_KINDS.index(kind) if kind in _KINDS else -1 for kind in kinds]
        once = [kind for kind in kinds if kind != "Dense"]
        if -1 in places or places != sorted(places) or len(once) != len(set(once)):
            raise ModelError(
                f"{SENTENCE_MODULES}: expected {', '.join(_KINDS)} in this order; found {', '.join(kinds)}"
            )
        pooling = "mean"
        if "Pooling" in kinds:
            name = module_config_name(dict(modules)["Pooling"])
            pooling = _pooling(name, read_json(file, name))
        limit = (read_object(file, SENTENCE_SETTINGS) or {}).get("max_seq_length")
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            raise CorruptError(f"{SENTENCE_SETTINGS}: expected max_seq_length to be 1 or more, found {limit!r}")
        dense = tuple(_dense(path, file) for kind, path in modules if kind == "Dense")
        return cls(pooling, "Normalize" in kinds, limit, dense)


def embedding_decoder(raw: Mapping[str, Any], file: ReadFile) -> dict[str, Any] | None:
    """Return the config.json of the decoder whose hidden states a sentence encoder pools, such as Qwen3-Embedding.

    ``raw`` is the checkpoint's. Returns None for another checkpoint, also for a decoder that transformers runs.
    Raises CorruptError.
    """
    decoder = None if is_encoder(raw) else as_decoder(raw)
    return decoder if decoder is not None and "Pooling" in dict(_modules(file) or ()) else None


def _modules(file: ReadFile) -> list[tuple[str, str]] | None:
    """Return the kind and the folder of each module of modules.json; None if there is no such file."""
    modules = read_json(file, SENTENCE_MODULES)
    if modules is None:
        return None
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise CorruptError(f"{SENTENCE_MODULES}: expected a list of modules, found {str(modules)[:80]}")
    return [(str(module.get("type")).rpartition(".")[2], str(module.get("path", ""))) for module in modules]


def _dense(path: str, file: ReadFile) -> DenseSettings:
    name = module_config_name(path)
    raw = read_object(file, name)
    if raw is None:
        raise CorruptError(f"{name}: expected the layer's JSON object, found none")
    fields = Fields(raw, name)
    activation = str(raw.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise ModelError(f"{name}: expected activation_function to be {', '.join(_ACTIVATIONS)}; found {activation}")
    sizes = fields.count("in_features"), fields.count("out_features")
    return DenseSettings(path, *sizes, fields.flag("bias", default=True), activation)


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
