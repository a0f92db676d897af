"""The description of a model before it is fetched: its bytes by layer and token, and recorded stage times."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from medusa_runtime.checkpoint.reader import open_checkpoint
from medusa_runtime.config import Settings
from medusa_runtime.errors import ConfigError, MedusaError
from medusa_runtime.models.backend import backend
from medusa_runtime.models.fields import ReadFile
from medusa_runtime.state.bundle.locate import FOLDER
from medusa_runtime.state.bundle.reader import Bundle
from medusa_runtime.state.kinds import STAGE_TIMES
from medusa_runtime.state.stage_times import StageTimes
from medusa_runtime.storage.base import Store

from ..group.ranges import ModelBytes

logger = logging.getLogger(__name__)


def describe(url: str) -> dict[str, Any]:
    """Describe a model by its checkpoint's index and state bundle. Blocks. Raises the store's errors.

    Returns ``total_bytes``; the bytes of ``entry``, of each of ``layers``, and of ``exit`` (see ``ModelBytes``);
    ``kv_bytes_per_token``, of keys and values in 16 bits; ``generates``, False for an encoder or a classifier of the
    torch engine, which writes no text; and ``times``, the stage times as JSON. ``layers`` is empty
    if the model cannot be split, ``kv_bytes_per_token`` 0 if config.json does not say it, and ``times`` None if none
    were recorded.
    """
    checkpoint = open_checkpoint(url)
    try:
        try:
            parts = ModelBytes.of(checkpoint.index)
        except ConfigError:
            parts = ModelBytes(checkpoint.index.total_bytes, (), 0)
        times = _times(checkpoint.store)
        return {
            "total_bytes": checkpoint.index.total_bytes,
            "entry": parts.entry,
            "layers": list(parts.layers),
            "exit": parts.exit,
            "kv_bytes_per_token": kv_bytes_per_token(checkpoint.files.get("config.json", b"")),
            "generates": _generates(checkpoint.files.get),
            "times": None if times is None else times.to_bytes().decode(),
        }
    finally:
        checkpoint.store.close()


def _generates(read: ReadFile) -> bool:
    try:
        return backend(read, Settings()).kind not in ("encoder", "classifier")
    except MedusaError:  # its instances will say why they do not run it
        return True


def kv_bytes_per_token(config: bytes) -> int:
    """Return the bytes of one token's keys and values in 16 bits, by a config.json; 0 if it does not say them."""
    try:
        raw = json.loads(config)
        found: Mapping[str, Any] = raw.get("text_config", raw)
        heads = int(found["num_attention_heads"])
        kv_heads = int(found.get("num_key_value_heads") or _falcon_kv_heads(found) or heads)
        head_dim = int(found.get("head_dim") or int(found["hidden_size"]) // heads)
        return max(int(found["num_hidden_layers"]) * 2 * kv_heads * head_dim * 2, 0)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return 0


def _falcon_kv_heads(found: Mapping[str, Any]) -> int:
    if found.get("model_type") not in ("falcon", "RefinedWeb", "RefinedWebModel"):
        return 0
    if found.get("new_decoder_architecture"):
        return int(found.get("num_kv_heads") or found.get("n_head_kv") or 0)
    return int(found.get("multi_query", True))


def _times(store: Store) -> StageTimes | None:
    """Return the stage times that ``medusa materialize`` has recorded, perhaps on another machine."""
    try:
        with closing(Bundle(store, f"{FOLDER}/")) as bundle:
            manifest = bundle.manifest()
            for artifact in () if manifest is None else manifest.artifacts:
                if artifact.kind == STAGE_TIMES.name:
                    return StageTimes.from_bytes(bundle.read(artifact))
    except MedusaError as error:
        logger.debug("recorded stage times cannot be used: %s", error)
    return None


__all__ = ["describe"]
