"""The user's function: loaded in the background, called once a request, closed at the end."""

from __future__ import annotations

import inspect
import logging
import sys
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_runtime.errors import HandlerError, HandlerLoadError, MedusaError

from .binding import Binding
from .blame import user_traceback
from .contract import Context, Request
from .deadline import Deadline
from .loader import load_target
from .loop import AsyncItems, EventLoop
from .model import Model, client_gone
from .weights import Weights

if TYPE_CHECKING:
    from .service import Service

logger = logging.getLogger(__name__)


class UserFunction:
    """``ready`` when ``load`` has returned. One that cannot be loaded ends the instance."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._loaded = threading.Event()
        self._loop = EventLoop()
        self._instance: Any = None
        self._call: Callable[..., Any] = _not_loaded
        self._binding: Binding | None = None
        self.folder: Path | None = None

    @property
    def ready(self) -> bool:
        return self._loaded.is_set()

    @property
    def is_event_style(self) -> bool:
        """It is an OpenFaaS ``handle(event, context)``, whose result has a statusCode."""
        return self._binding is not None and self._binding.is_event_style

    def load(self) -> None:
        """Import the user's code and run its ``load``; what fails ends the instance with one message."""
        service = self._service
        spec = service.settings.handler
        assert spec is not None
        try:
            with service.timeline.stage("handler"):
                self._load(spec)
        except MedusaError as error:
            if error.__cause__ is not None:
                logger.error("%s\n%s", error.code, user_traceback(error.__cause__, self.folder))  # noqa: TRY400
            service.instance.fail(error)
        else:
            self._loaded.set()
            service.publish()
            service.admission.open()

    def _load(self, spec: str) -> None:
        if self._service.settings.torch_import == "lean":
            from medusa_runtime.lean_torch import import_torch

            with self._service.timeline.stage("import", package="torch"):
                import_torch()  # before anything of the user's does
        target = load_target(spec)
        source = getattr(sys.modules.get(getattr(target, "__module__", "")), "__file__", None)
        self.folder = Path(source).parent if source else None
        model = Model(self._service) if self._service.engine is not None else None
        weights = Weights(self._service.region, self._service.settings, self._service.timeline)
        context = Context(model, self._service.settings, weights)
        try:
            self._instance = target() if inspect.isclass(target) else target
            self._call = self._entry(target)
            self._binding = Binding(self._call, context)
            load = getattr(self._instance, "load", None)
            if callable(load):
                self._wait(load(context) if inspect.signature(load).parameters else load())
        except HandlerLoadError:
            raise
        except (Exception, SystemExit) as error:
            what = f"{spec}: loading raised {type(error).__name__}: {error}"
            raise HandlerError(what) from error

    def _entry(self, target: Any) -> Callable[..., Any]:
        predict = getattr(self._instance, "predict", None)
        if callable(predict):
            return predict  # type: ignore[no-any-return]
        if inspect.isclass(target) and "__call__" not in vars(target):
            methods = ", ".join(name for name in vars(target) if not name.startswith("_")) or "nothing"
            raise HandlerLoadError(f"class {target.__name__} has no method predict(request); it has {methods}")
        return self._instance  # type: ignore[no-any-return]

    def call(self, request: Request, gone: Callable[[], bool]) -> Any:
        """The function's result; an asynchronous iterator comes back as a plain one.

        Only after it was loaded. Raises what the function raises, ClientGoneError, and 504 when its time is over.
        """
        assert self._binding is not None
        client_gone.set(gone)
        positional, named = self._binding.arguments(request)
        call = partial(self._call, *positional, **named)
        result = self._wait(gone.run(call) if isinstance(gone, Deadline) else call(), gone)
        return AsyncItems(self._loop, result) if isinstance(result, AsyncIterator) else result

    def _wait(self, result: Any, gone: Callable[[], bool] = lambda: False) -> Any:
        return self._loop.run(result, gone) if inspect.iscoroutine(result) else result

    def close(self) -> None:
        """Run the user's ``close``; its error is logged, for nobody waits for it."""
        close = getattr(self._instance, "close", None)
        if self.ready and callable(close):
            try:
                self._wait(close())
            except Exception as error:  # noqa: BLE001
                logger.error("close() of the function failed\n%s", user_traceback(error, self.folder))  # noqa: TRY400


def _not_loaded(*_: object) -> Any:
    raise AssertionError("called before it was loaded")
