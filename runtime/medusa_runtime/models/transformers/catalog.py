"""A look-up of what the installed transformers can run.

It reads transformers' files, which takes milliseconds; importing them would take seconds. transformers keeps a model's
classes in ``models/<name>/modeling_<name>.py``.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import MissingPackageError, ModelError
from ..architectures import CLASSIFIER, architecture_of, unsupported
from ..fields import Fields

_RECURRENT = frozenset({"linear_attention", "mamba", "conv", "recurrent", "hybrid", "moe", "mamba2", "attention_mamba"})
_INDEXER = re.compile(r"^class \w*Indexer\(", re.MULTILINE)  # DeepSeek's sparse attention, and others like it
STATES = ".get_conv_state("  # how layers of transformers ask for the state that they keep of each sequence
INSTALL = 'pip install "medusa-runtime[transformers]"'


class TransformersClass(NamedTuple):
    """A class of transformers: its module, its name, and its kind: "decoder", "encoder" or "classifier"."""

    module: str
    name: str
    kind: str


def find_class(raw: Mapping[str, Any]) -> TransformersClass:
    """Return the class of transformers that runs the model of a parsed config.json.

    Raises ModelError for an architecture that transformers does not have or that the torch engine cannot run, and
    MissingPackageError when transformers is not installed.
    """
    architecture = architecture_of(raw)
    folder = installed()
    if folder is None:
        _kind(architecture, raw)  # raises for what transformers would not help with
        raise MissingPackageError(
            f"{architecture} is none of the models that the torch engine has itself; most others need transformers, "
            f"which is not installed: {INSTALL}, or use --engine vllm"
        )
    found = file_of(architecture, str(raw.get("model_type", "")), folder)
    if found is None:
        if raw.get("auto_map"):
            raise unsupported(architecture, "it brings its own code, which is not run")
        raise unsupported(architecture)
    kind = _kind(architecture, raw)
    source = found.read_text()
    is_recurrent = "_is_stateful = True" in source or _RECURRENT & {*(Fields(raw).names("layer_types") or ())}
    if is_recurrent and STATES not in source:
        raise _refused(architecture, "keeps a recurrent state, for which the torch engine has no cache")
    if _INDEXER.search(source):
        raise _refused(architecture, "attends to keys that an index chooses, for which the torch engine has no cache")
    return TransformersClass(f"transformers.models.{found.parent.name}.{found.stem}", architecture, kind)


_OTHERS = "expected another model, --engine vllm, or a handler that runs it (docs/transformers.md)"


def _kind(architecture: str, raw: Mapping[str, Any]) -> str:
    """Return the kind of a model. Raises ModelError, with the reason, for one that the torch engine cannot run."""
    if any(raw.get(name) is not None for name in ("vision_config", "audio_config", "text_config")):
        raise _refused(architecture, "takes pictures or sound")
    if raw.get("is_encoder_decoder") or architecture.endswith("ForConditionalGeneration"):
        raise _refused(architecture, "is an encoder and a decoder, and the torch engine runs models with one of them")
    if architecture.endswith(("ForCausalLM", "LMHeadModel")):
        return "decoder"
    if architecture.endswith(CLASSIFIER):
        return "classifier"
    if architecture.endswith(("Model", "ForMaskedLM")):
        return "encoder"
    raise _refused(architecture, "neither continues, embeds nor classifies text")


def _refused(architecture: str, reason: str) -> ModelError:
    return ModelError(f"{architecture} {reason}; {_OTHERS}")


def installed() -> Path | None:
    """Return the folder of the installed transformers without importing it, or None if it is not installed."""
    spec = importlib.util.find_spec("transformers")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


@functools.cache
def file_of(architecture: str, model_type: str, folder: Path) -> Path | None:
    """Return the file that defines the class with this name, or None. Look first in the folder for ``model_type``."""
    if not re.fullmatch(r"\w+", architecture):
        return None
    usual = model_type.replace("-", "_").replace(".", "_").removesuffix("_text")
    files = [folder / "models" / usual / f"modeling_{usual}.py"] if re.fullmatch(r"\w{1,100}", usual) else []
    for file in (*files, *sorted((folder / "models").glob("*/modeling_*.py"))):
        if file.is_file() and f"\nclass {architecture}(" in file.read_text():
            return file
    return None


__all__ = ["INSTALL", "STATES", "TransformersClass", "file_of", "find_class", "installed"]
