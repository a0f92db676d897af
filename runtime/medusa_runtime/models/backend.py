"""The decision which engine runs a checkpoint. `serve`, `doctor`, `materialize` and `inspect` share it.

It needs only the checkpoint's small files and no torch. ``verify`` also reads the model's configuration, which imports
torch.
"""

from __future__ import annotations

from typing import NamedTuple

from ..checkpoint.adapter import ADAPTER_CONFIG, AdapterConfig
from ..checkpoint.text_part import has_text_part, text_config
from ..config import Settings, require_handler
from ..errors import MismatchError, ModelError
from .architectures import architecture_of, classifying_decoder, has_family, is_encoder
from .fields import Fields, ReadFile, read_object
from .registry import model_config
from .sentences import embedding_decoder

TEXT_ONLY = "; text only (for pictures or sound use --engine vllm)"


class Backend(NamedTuple):
    """What runs a checkpoint.

    ``kind`` is "decoder", "encoder" or "classifier" for the torch engine, "vllm" for the vLLM engine, or "handler" when
    the user's code runs the model itself. ``architecture`` is the name in config.json (an encoder's ``model_type``).
    ``foreign`` is true when the torch engine runs transformers' code for the model. ``quantization`` says how the
    weights are quantized, and is empty when they are not. ``text_only`` is true for the text part of a model that also
    takes pictures or sound.
    """

    kind: str
    architecture: str = ""
    foreign: bool = False
    quantization: str = ""
    text_only: bool = False

    def __str__(self) -> str:
        if self.kind == "handler":
            return "the handler's own module (--engine none)"
        if self.kind == "vllm":
            return f"the vllm engine, if it knows {self.architecture[:100]}"
        weights = f", from weights in {self.quantization}" if self.quantization else ""
        weights += TEXT_ONLY if self.text_only else ""
        if self.foreign:
            what = "" if self.kind == "decoder" else f" as {'an' if self.kind == 'encoder' else 'a'} {self.kind}"
            return f"the torch engine, by transformers' {self.architecture}{what}{weights}"
        return f"the torch engine, as {'an encoder' if self.kind == 'encoder' else self.architecture}{weights}"


def backend(read: ReadFile, settings: Settings) -> Backend:
    """Return what runs a checkpoint.

    ``read`` returns a small file of the checkpoint by its name, or None if there is no such file.

    Raises MismatchError without a config.json, CorruptError for one that is not JSON, ModelError for a model that the
    chosen engine does not run, and ConfigError for ``--engine none`` without a handler.
    """
    if settings.engine == "none":
        require_handler(settings)
        return Backend("handler")
    config = read_object(read, "config.json")
    if config is None:
        if (adapter := read(ADAPTER_CONFIG)) is not None:
            base = AdapterConfig.read(adapter).base or "MODEL"
            raise ModelError(
                f"this is a LoRA adapter, which needs its base model; expected --model {base} --lora-modules NAME=URL"
            )
        raise no_config()
    if settings.engine == "vllm":
        return Backend("vllm", architecture_of(config))
    if is_encoder(config):
        return Backend("encoder", str(config.get("model_type")), quantization=str(Fields(config).quantization() or ""))
    if (decoder := embedding_decoder(config, read)) is not None:
        return Backend("encoder", architecture_of(decoder), quantization=str(Fields(config).quantization() or ""))
    text_only, config = has_text_part(config), text_config(config)
    architecture = architecture_of(config)
    stored = str(Fields(config).quantization() or "")
    if classifying_decoder(config) is not None:
        return Backend("classifier", architecture, quantization=stored)
    if has_family(config):
        return Backend("decoder", architecture, quantization=stored, text_only=text_only)
    from .transformers.catalog import find_class  # most models do not need it

    found = find_class(config)
    return Backend(found.kind, found.name, True, stored, text_only)


def verify(read: ReadFile, settings: Settings) -> Backend:
    """Return what ``backend`` returns, and also check the keys of config.json as the engine would. Imports torch."""
    found = backend(read, settings)
    config = read_object(read, "config.json") or {}
    if found.text_only:
        config = text_config(config)
    if found.foreign:
        from .transformers.config import verify as verify_foreign

        verify_foreign(config)
    elif found.kind == "decoder":
        model_config(config).check_generates()
    elif (decoder := embedding_decoder(config, read) or classifying_decoder(config)) is not None:
        model_config(decoder)
    elif found.kind == "encoder":
        from .bert import BertConfig

        BertConfig.from_hf(config)
    return found


def no_config() -> MismatchError:
    return MismatchError(
        "expected a config.json beside the weights, found none; for a handler that builds its module itself say "
        "--engine none"
    )


__all__ = ["Backend", "backend", "no_config", "verify"]
