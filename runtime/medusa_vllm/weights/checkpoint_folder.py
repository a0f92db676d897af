"""Writes the checkpoint's small files to a folder, from which vLLM reads a model's configuration."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

from medusa_runtime.checkpoint.reader import SENTENCE_MODULES, SENTENCE_SETTINGS, module_config_names
from medusa_runtime.engine.checkpoint_files import weights_dtype
from medusa_runtime.errors import ConfigError, MismatchError, ModelError
from medusa_runtime.models.fields import read_json, read_object
from medusa_runtime.models.sizes import check_sizes
from medusa_runtime.region.reader import Region

from ..scratch import scratch_folder

_CONFIG = "config.json"
_FILES = (
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer_config.json",
)


class CheckpointFolder:
    """A private folder with the configuration and no weights; removed by ``close``, and when the process ends."""

    def __init__(self, region: Region) -> None:
        config = read_object(region.file, _CONFIG)
        if config is None:
            raise MismatchError("expected a config.json beside the weights, found none")
        check_sizes(config)
        self.config = _with_dtype(config, region)
        names = (*_FILES, *_sentence_files(region))
        self._scratch = ExitStack()
        try:
            self.path = self._scratch.enter_context(scratch_folder("medusa-vllm"))
            (self.path / _CONFIG).write_text(json.dumps(self.config))
            for name in names:
                if (data := region.file(name)) is not None:
                    (self.path / name).parent.mkdir(parents=True, exist_ok=True)
                    (self.path / name).write_bytes(data)
        except OSError as error:
            self._scratch.close()
            raise ConfigError(
                f"expected a writable folder for temporary files, found none ({error}); set TMPDIR"
            ) from None

    def close(self) -> None:
        self._scratch.close()


def _sentence_files(region: Region) -> list[str]:
    """Return the names of the files from which vLLM reads a sentence encoder's pooling and longest text.

    Raises ModelError for a module with weights of its own: vLLM would make vectors without them.
    """
    modules = region.file(SENTENCE_MODULES)
    if modules is None:
        return []
    listed = read_json(region.file, SENTENCE_MODULES)
    kinds = (
        [str(module.get("type")) for module in listed if isinstance(module, dict)] if isinstance(listed, list) else []
    )
    if any(kind.rpartition(".")[2] == "Dense" for kind in kinds):
        raise ModelError(f"{SENTENCE_MODULES}: expected no module with weights of its own, found Dense")
    return [SENTENCE_MODULES, SENTENCE_SETTINGS, *module_config_names(modules)]


def _with_dtype(config: dict[str, Any], region: Region) -> dict[str, Any]:
    """Return the config, with the weights' dtype if it names none, as in the torch engine."""
    if config.get("dtype") is None and config.get("torch_dtype") is None:
        return config | {"dtype": weights_dtype(region.wait_index())}
    return config
