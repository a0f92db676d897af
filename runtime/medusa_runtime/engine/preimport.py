"""The imports that a process makes before it forks torch engines. Importing this file itself does not import torch."""

from __future__ import annotations

import logging
import os

from ..config import Settings
from ..errors import MedusaError
from ..region.reader import Region

logger = logging.getLogger(__name__)

# How many of oneDNN's compiled products are kept, by oneDNN itself and by torch. Each number of rows has its own, which
# in 16 bits takes 0.7 MB and 0.7 ms: of the 1024 that are kept by default, prompts of many lengths make 700 MB.
_PRODUCTS = 128
COMPILED_PRODUCTS_BYTES = _PRODUCTS * 700_000
_PRODUCT_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")

_PATIENCE_S = 1.0  # how long to wait for config.json, which is fetched while torch is imported


def preimport(settings: Settings, region: Region | None = None) -> None:
    """Import torch and every model family. ``registry.EngineKind`` says when this is called.

    torch is imported leanly where that was tested, and where the settings do not say ``plain``.
    """
    limit_compiled_products()
    if settings.torch_import != "plain":
        from ..imports.lazy_torch import import_torch

        # numpy: nothing in the engine process uses it.
        import_torch(numpy=False, gpu=settings.device == "cuda" and settings.torch_import == "auto")
    from ..models.registry import import_families

    import_families()
    if region is not None:
        _import_transformers_module(region)


def limit_compiled_products() -> None:
    """Limit how many of oneDNN's compiled products this process keeps, unless the user's environment says how many.

    The first product reads it from the environment.
    """
    for variable in _PRODUCT_CACHES:
        os.environ.setdefault(variable, str(_PRODUCTS))


def _import_transformers_module(region: Region) -> None:
    """Import the model's module of transformers, if the model needs one and its config.json has arrived.

    Errors in the model are not reported here; the engine reports them.
    """
    from ..checkpoint.text_part import text_config
    from ..models.architectures import has_family, is_encoder
    from ..models.fields import read_object

    try:
        config = read_object(lambda name: region.file(name, _PATIENCE_S), "config.json")
        if config is None or is_encoder(config) or has_family(config := text_config(config)):
            return
        from ..models.transformers.catalog import find_class
        from ..models.transformers.config import own_class

        own_class(find_class(config))
    except (MedusaError, TimeoutError):
        logger.debug("the model is not known yet; its module is imported by the engine")
