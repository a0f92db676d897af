"""``context.weights``: the checkpoint behind the function, for a module of the user's own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from medusa_runtime.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from medusa_runtime.config import Settings
    from medusa_runtime.load.factory.applier import FactoryApplier
    from medusa_runtime.load.factory.options import BuildOptions
    from medusa_runtime.load.loader import Loader
    from medusa_runtime.region.reader import Progress, Region
    from medusa_runtime.timeline import Timeline
    from torch import nn

M = TypeVar("M", bound="nn.Module")


class Weights:
    """The weights named by ``--model``, fetched since the instance started. Thread-safe."""

    def __init__(
        self,
        region: Region | None,
        settings: Settings,
        timeline: Timeline,
        on_error: Callable[[BaseException], None] = lambda _: None,
    ) -> None:
        self._shared = region
        self._on_error = on_error
        self._settings = settings
        self._timeline = timeline
        self._lock = threading.Lock()
        self._own: Region | None = None
        self._loaders: list[Loader] = []

    def build(
        self,
        factory: Callable[[], M],
        prefix: str = "",
        *,
        rename: Callable[[str], str | None] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        memory_format: torch.memory_format | None = None,
        strict: bool = True,
        copy: bool = False,
        exact: bool = True,
        release: bool = False,
    ) -> M:
        """Return the module that ``factory`` constructs, without waiting for its weights. It may be called at once.

        The factory is any code that makes a ``torch.nn.Module``; while it runs, parameters take no memory and are not
        initialised. Each part of a forward pass waits for its own weights, and weights that it waits for are fetched
        first. Parameters need no gradient. ``medusa_runtime.load.factory.options.BuildOptions`` describes the options.

        Raises the factory's errors. Errors of the checkpoint or its fetch are raised by the forward pass and by
        ``wait``; if neither runs, such an error ends the instance.
        """
        region = self._region()
        self._import_torch()
        from medusa_runtime.load.factory.build import build
        from medusa_runtime.load.factory.options import BuildOptions

        options = BuildOptions(
            prefix=prefix,
            rename=rename,
            dtype=dtype,
            device=device,
            memory_format=memory_format,
            strict=strict,
            copy=copy,
            exact=exact,
            release=release,
        )
        module, loader = build(
            region,
            factory,
            options,
            timeline=self._timeline,
            on_error=self._on_error,
            make_applier=self._applier,
        )
        self._loaders.append(loader)
        return module

    def pretrained_model(
        self,
        class_name: str | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        strict: bool = True,
    ) -> Any:
        """Return transformers' model of the checkpoint, as its ``from_pretrained`` would, without waiting for weights.

        ``class_name`` is one of transformers' classes, such as ``"BertForTokenClassification"``; by default the one
        that config.json names. ``dtype`` is by default that of config.json, or else the weights'. With ``strict=False``
        parameters that the checkpoint lacks have initial values. Of transformers only what this class needs is
        imported.

        Raises MissingPackageError without transformers, MismatchError without a config.json, ModelError for a class
        that transformers does not have, and what ``build`` raises.
        """
        self._import_torch()
        from medusa_runtime.engine.checkpoint_files import read_config_json, weights_dtype
        from medusa_runtime.models.base import DTYPES, dtype_in
        from medusa_runtime.models.fields import Fields
        from medusa_runtime.models.transformers.pretrained import pretrained_factory

        raw = read_config_json(self.file)
        if dtype is None and self._settings.dtype != "auto":
            dtype = DTYPES[self._settings.dtype]
        if dtype is None and raw.get("dtype") is None and raw.get("torch_dtype") is None:
            dtype = DTYPES[weights_dtype(self._region().wait_index(self._settings.hold_s))]
        with self._timeline.stage("import", package="transformers"):
            factory = pretrained_factory(raw, self.file, class_name, dtype or dtype_in(Fields(raw)))
        return self.build(factory, device=device, strict=strict)

    def wait(self) -> None:
        """Wait until every module that was built has all its weights. Raises the error that prevented it."""
        for loader in list(self._loaders):
            loader.wait()

    def names(self) -> dict[int, str]:
        """Wait for all built modules, and return the checkpoint's names of their tensors, by ``id(tensor)``."""
        self.wait()
        return {key: name for loader in self._loaders for key, name in loader.names().items()}

    def file(self, name: str) -> bytes | None:
        """Return a small file of the checkpoint (config.json, tokenizer.json …); None when it has none of this name."""
        region = self._region()
        region.wait_index(self._settings.hold_s)
        return region.file(name)

    def progress(self) -> Progress:
        """Return how much of the checkpoint has been fetched."""
        return self._region().progress()

    def close(self) -> None:
        for loader in self._loaders:
            loader.close()
        if self._own is not None:
            self._own.close()

    def _applier(self, module: nn.Module, factory: Callable[[], nn.Module], options: BuildOptions) -> FactoryApplier:
        """Return what fills a module. Models of transformers have other names in a file than in the module."""
        from medusa_runtime.load.factory.applier import FactoryApplier

        bases = [(kind.__module__, kind.__name__) for kind in type(module).__mro__]
        if ("transformers.modeling_utils", "PreTrainedModel") not in bases or options.prefix or options.rename:
            return FactoryApplier(module, factory, options)
        from medusa_runtime.models.transformers.pretrained import pretrained_applier

        return pretrained_applier(self.file, module, factory, options)

    def _region(self) -> Region:
        if self._shared is None:
            raise ConfigError("context.weights has no checkpoint: expected --model beside --handler")
        with self._lock:
            if self._own is None:
                from medusa_runtime.region.reader import Region

                # Mapped for this process alone: a page of a parameter that user code writes to becomes its own copy.
                self._own = Region(os.dup(self._shared.fd), private=True)
            return self._own

    def _import_torch(self) -> None:
        with self._lock:
            if self._loaders:
                return
            with self._timeline.stage("import", package="torch"):
                import torch  # seconds on a cold disk; only a function that builds a module pays for it
            from medusa_runtime.container_limits import cpu_count

            torch.set_num_threads(self._settings.threads or cpu_count())
