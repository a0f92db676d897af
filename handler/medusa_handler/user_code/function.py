"""The user's function: loaded in the background, called for each request, closed at the end."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_runtime.errors import HandlerError, MedusaError, WeightsError

from ..caller import current_caller
from ..contract import Context, Request
from ..disconnection import current_disconnect_check
from .code import UserCode
from .loop import EventLoop
from .model import Model
from .user_traceback import log_cause, place_in_user_code, user_traceback
from .weights import Weights

if TYPE_CHECKING:
    from medusa_runtime.config import Settings
    from medusa_runtime.timeline import Timeline

    from ..model.served_model import ServedModel

logger = logging.getLogger(__name__)

_SLOW_S = 30.0  # a load that takes longer is reported once


class UserFunction:
    """The user's function, ``ready`` once ``load`` has returned.

    ``fail`` ends the instance; ``on_loaded`` is called once the function is ready.
    """

    def __init__(
        self,
        settings: Settings,
        model: ServedModel,
        timeline: Timeline,
        *,
        fail: Callable[[MedusaError], None],
        on_loaded: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._model = model
        self._timeline = timeline
        self._fail = fail
        self._on_loaded = on_loaded
        self._loaded = threading.Event()
        self._code = UserCode(EventLoop())

    @property
    def ready(self) -> bool:
        return self._loaded.is_set()

    @property
    def is_event_style(self) -> bool:
        """Whether the function is an OpenFaaS ``handle(event, context)``, whose result has a statusCode."""
        return self._code.is_event_style

    @property
    def folder(self) -> Path | None:
        """The folder of the user's code."""
        return self._code.folder

    def load(self) -> None:
        """Import the user's code and run its ``load``. An error ends the instance with one message."""
        slow = threading.Timer(_SLOW_S, self._report_slow, (threading.get_ident(),))
        slow.daemon = True
        with contextlib.suppress(RuntimeError):  # no further thread can be started
            slow.start()
        try:
            with self._timeline.stage("handler"):
                self._load_or_fail()
        except MedusaError as error:
            log_cause(error, self.folder)
            self._fail(error)
        else:
            self._loaded.set()
            self._on_loaded()
        finally:
            slow.cancel()

    def _report_slow(self, thread: int) -> None:
        place = place_in_user_code(thread, __file__)
        at = f"; it is at {place}" if place else ""
        logger.info("%s has been loading for %g s, and requests wait for it%s", self._settings.handler, _SLOW_S, at)

    def _load_or_fail(self) -> None:
        """Raise a MedusaError for anything that loading raises, or the function would never be ready, nor fail."""
        try:
            self._load()
        except MedusaError:
            raise
        except BaseException as error:  # such as a CancelledError, or the panic of a library in Rust
            raise HandlerError(f"{self._settings.handler}: loading raised {type(error).__name__}: {error}") from error

    def _load(self) -> None:
        settings, region = self._settings, self._model.region
        assert settings.handler is not None
        if settings.torch_import != "plain":
            from medusa_runtime.imports.lazy_torch import make_handlers_import_lean

            make_handlers_import_lean(settings.torch_import)
        model = Model(self._model) if self._model.engine is not None else None
        weights = Weights(region, settings, self._timeline, self._weights_failed)
        self._code.load(settings.handler, Context(model, settings, weights))

    def _weights_failed(self, error: BaseException) -> None:
        """End the instance, because the weights of a module that was built can never be loaded."""
        if not isinstance(error, MedusaError):
            error = WeightsError(f"a module's weights could not be loaded: {type(error).__name__}: {error}")
        self._fail(error)

    def call(self, request: Request, is_disconnected: Callable[[], bool], caller: str | None = None) -> Any:
        """Call the function, as ``UserCode.call`` does. When the client leaves, its calls of ``context.model`` end.

        These share what is computed of their prompts with other calls for the same ``caller``.
        """
        current_disconnect_check.set(is_disconnected)
        current_caller.set(caller)
        return self._code.call(request, is_disconnected)

    def close(self) -> None:
        """Run the user's ``close``; an error is logged, because no caller waits for it."""
        if not self.ready:
            return
        try:
            self._code.close()
        except (Exception, SystemExit) as error:  # noqa: BLE001
            logger.error("close() of the function failed\n%s", user_traceback(error, self.folder))  # noqa: TRY400
