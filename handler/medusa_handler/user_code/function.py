"""The user's function: loaded in the background, called once a request, closed at the end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_runtime.errors import MedusaError, WeightsError

from .code import UserCode
from .contract import Context, Request
from .loop import EventLoop
from .model import Model, client_gone
from .user_traceback import log_cause, user_traceback
from .weights import Weights

if TYPE_CHECKING:
    from ..service import Service

logger = logging.getLogger(__name__)


class UserFunction:
    """``ready`` when ``load`` has returned. One that cannot be loaded ends the instance."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._loaded = threading.Event()
        self._code = UserCode(EventLoop())

    @property
    def ready(self) -> bool:
        return self._loaded.is_set()

    @property
    def is_event_style(self) -> bool:
        """It is an OpenFaaS ``handle(event, context)``, whose result has a statusCode."""
        return self._code.is_event_style

    @property
    def folder(self) -> Path | None:
        """Where the user's code lies."""
        return self._code.folder

    def load(self) -> None:
        """Import the user's code and run its ``load``; what fails ends the instance with one message."""
        service = self._service
        try:
            with service.timeline.stage("handler"):
                self._load()
        except MedusaError as error:
            log_cause(error, self.folder)
            service.instance.fail(error)
        else:
            self._loaded.set()
            service.publish()
            service.admission.open()

    def _load(self) -> None:
        service = self._service
        assert service.settings.handler is not None
        if service.settings.torch_import != "plain":
            from medusa_runtime.imports.lazy_torch import make_handlers_import_lean

            make_handlers_import_lean(service.settings.torch_import)
        model = Model(service) if service.engine is not None else None
        weights = Weights(service.region, service.settings, service.timeline, self._unloadable)
        self._code.load(service.settings.handler, Context(model, service.settings, weights))

    def _unloadable(self, error: BaseException) -> None:
        """A module was built whose weights cannot be loaded, now or ever."""
        if not isinstance(error, MedusaError):
            error = WeightsError(f"a module's weights could not be loaded: {type(error).__name__}: {error}")
        self._service.instance.fail(error)

    def call(self, request: Request, gone: Callable[[], bool]) -> Any:
        """As ``UserCode.call``; what it asks of ``context.model`` is cancelled when the client leaves."""
        client_gone.set(gone)
        return self._code.call(request, gone)

    def close(self) -> None:
        """Run the user's ``close``; its error is logged, for nobody waits for it."""
        if not self.ready:
            return
        try:
            self._code.close()
        except Exception as error:  # noqa: BLE001
            logger.error("close() of the function failed\n%s", user_traceback(error, self.folder))  # noqa: TRY400
