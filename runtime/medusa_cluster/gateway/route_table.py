"""The gateway's routes, which follow the controller's, and its reports of load to the controller."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from medusa_runtime.errors import MedusaError

from .controller_api import ControllerApi
from .routes import Routes

logger = logging.getLogger(__name__)

_WAIT_S = 20.0
_REPORT_S = 0.1
_REPEAT_S = 0.5  # between two reports of the same load; the controller ignores a load older than 2 s
_LEAST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0

ModelLoads = Mapping[str, Mapping[str, float]]


class RouteTable:
    """The current routes. While the controller is away, the last ones stay. ``on_change`` is called with new ones."""

    def __init__(self, controller: ControllerApi, on_change: Callable[[Routes], None]) -> None:
        self._controller = controller
        self._on_change = on_change
        self._report_now = asyncio.Event()
        self._next_answer: asyncio.Future[None] | None = None  # to the next report; there if somebody waits for it
        self._away_since: float | None = time.monotonic()
        self._logged = False
        self.current = Routes()
        self.known = False  # whether the controller has ever sent routes

    @property
    def away_s(self) -> float:
        """The seconds for which the controller has not answered. 0 while it does."""
        return 0.0 if self._away_since is None else time.monotonic() - self._away_since

    def wake(self) -> None:
        """Report at once, because a request waits."""
        self._report_now.set()

    async def refresh(self) -> None:
        """Return when the controller has answered the next report with its routes, or has not: see ``away_s``.

        That takes up to a tenth of a second, so that a flood of such calls is none for the controller.
        """
        if self._next_answer is None:
            self._next_answer = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._next_answer)

    async def follow(self) -> None:
        """Keep a call under way that returns when the routes change, until cancelled."""
        pause_s = _LEAST_PAUSE_S
        while True:
            try:
                routes = await self._controller.routes(self.current.version if self.known else "", _WAIT_S)
            except MedusaError as error:
                self._note_away(error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            pause_s = _LEAST_PAUSE_S
            self._on_answer(routes)

    async def report(self, loads: Callable[[], ModelLoads]) -> None:
        """Report the load until cancelled.

        A load that has changed is reported up to ten times a second, as is any for ``refresh``. After ``wake``, it is
        reported at once. One that has not changed is repeated twice a second, so that the controller knows that this
        gateway lives.
        """
        pause_s = _REPORT_S
        reported: ModelLoads | None = None
        reported_at = 0.0
        while True:
            report_now, found = self._report_now.is_set(), loads()
            # Waits grow by themselves, so they are no change.
            compared = {name: {**load, "longest_wait_s": 0.0} for name, load in found.items()}
            self._report_now.clear()
            answer, self._next_answer = self._next_answer, None
            if report_now or answer or compared != reported or time.monotonic() - reported_at >= _REPEAT_S:
                try:
                    self._on_answer(await self._controller.report(found, self.current.version if self.known else ""))
                    pause_s, reported, reported_at = _REPORT_S, compared, time.monotonic()
                except MedusaError as error:
                    self._note_away(error)
                    pause_s, reported = min(2 * pause_s, _LONGEST_PAUSE_S), None
                finally:
                    if answer is not None:
                        answer.set_result(None)
            try:
                async with asyncio.timeout(pause_s):
                    await self._report_now.wait()
            except TimeoutError:
                continue
            if pause_s > _REPORT_S:
                await asyncio.sleep(_REPORT_S)  # so that waiting requests do not flood a controller that is away

    def _note_away(self, error: MedusaError) -> None:
        if self._away_since is None:
            self._away_since = time.monotonic()
        if not self._logged:
            self._logged = True
            logger.warning("the controller is away%s: %s", ", the last routes stay" if self.known else "", error)

    def _on_answer(self, routes: Routes | None) -> None:
        """Note that the controller has answered, and use these routes if they are new."""
        if self._away_since is not None:
            if self._logged:
                logger.info("the controller is there, after %.1f s", self.away_s)
            self._away_since, self._logged = None, False
        if routes is None or (self.known and routes == self.current):
            return
        self.known = True
        self.current = routes
        self._on_change(routes)
