"""The LoRA adapters of a served model, by name: which are in memory, and which one makes room for another."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from medusa_runtime.config import lora_modules
from medusa_runtime.engine.frames import close_all
from medusa_runtime.errors import MedusaError, ObjectNotFoundError, json_excerpt
from medusa_runtime.process_limits import as_limit_error

from ..disconnection import POLL_S
from ..faults import ApiError, not_ready

if TYPE_CHECKING:
    from medusa_runtime.config import Settings
    from medusa_runtime.engine.client import EngineClient
    from medusa_runtime.instance.adapter_region import AdapterRegion
    from medusa_runtime.timeline import Timeline

logger = logging.getLogger(__name__)

_MOST_NAMES = 1000


@dataclass(eq=False)
class AdapterEntry:
    """An adapter. It takes one of ``max_loras`` places while it is ``opening`` or has its ``adapter``."""

    name: str
    url: str
    adapter: AdapterRegion | None = None
    opening: bool = False
    attempts: int = 0
    error: MedusaError | None = None
    users: int = 0
    used_at: float = 0.0

    @property
    def occupies_slot(self) -> bool:
        return self.opening or self.adapter is not None


class AdapterLease:
    """A request's use of an adapter, which keeps it in memory until ``close``. ``close`` may be called twice."""

    def __init__(self, adapters: Adapters, entry: AdapterEntry) -> None:
        self._adapters = adapters
        self._entry: AdapterEntry | None = entry

    def close(self) -> None:
        entry, self._entry = self._entry, None
        if entry is not None:
            self._adapters.release(entry)


class Adapters:
    """The adapters that requests may name. Each is fetched at its first use, or after the base model's first token."""

    def __init__(self, settings: Settings, engine: EngineClient | None, timeline: Timeline) -> None:
        self._settings = settings
        self._engine = engine
        self._timeline = timeline
        self._changed = threading.Condition()
        self._entries = {name: AdapterEntry(name, url) for name, url in lora_modules(settings.lora_modules).items()}

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def urls(self) -> dict[str, str]:
        """Return each adapter's URL, by its name."""
        with self._changed:
            return {name: entry.url for name, entry in self._entries.items()}

    def acquire(self, name: str, wait_check: Callable[[], None], entry: AdapterEntry | None = None) -> AdapterLease:
        """Wait until the engine has this adapter, which then stays at least until the lease is closed.

        ``entry`` is what ``add`` has returned, if another request's adapter of the same name will not do.
        Meanwhile ``wait_check`` is called a few times a second, and an error that it raises ends the wait. Raises the
        store's errors, and ApiError: 404 for an unknown name and for an adapter that is not in its store, 503 if all
        places are in use for longer than ``hold_s``.
        """
        with self._changed:
            entry = entry or self._entries.get(name)
            if entry is None:
                raise _does_not_exist(name)
            entry.users += 1
            entry.used_at = time.monotonic()
        try:
            self._open(entry, wait_check)
        except BaseException:
            self.release(entry)
            raise
        return AdapterLease(self, entry)

    def release(self, entry: AdapterEntry) -> None:
        """End a use."""
        with self._changed:
            entry.users -= 1
            entry.used_at = time.monotonic()
            if self._entries.get(entry.name) is not entry and not entry.users:
                self._close(entry)
            self._changed.notify_all()

    def add(self, name: str, url: str, *, replace: bool = False) -> tuple[AdapterEntry, str | None]:
        """Add an adapter's name. Return its entry, and the URL of the adapter that it replaces.

        Raises ApiError 400 if the name is taken, unless ``replace``, or if there are too many.
        """
        with self._changed:
            if name in self._entries and not replace:
                raise ApiError(
                    400,
                    f"the adapter {json_excerpt(name)} is loaded already; send load_inplace to replace it",
                    param="lora_name",
                    code="invalid_value",
                )
            if name not in self._entries and len(self._entries) >= _MOST_NAMES:
                raise ApiError(400, f"expected at most {_MOST_NAMES} adapters", param="lora_name")
            previous = self._entries[name].url if name in self._entries else None
            self._forget(name)
            entry = self._entries[name] = AdapterEntry(name, url)
            return entry, previous

    def undo_add(self, entry: AdapterEntry, previous: str | None) -> None:
        """Undo an ``add``, unless another request has removed or replaced the adapter since."""
        with self._changed:
            if self._entries.get(entry.name) is entry:
                self._forget(entry.name)
                if previous is not None:
                    self._entries[entry.name] = AdapterEntry(entry.name, previous)
                self._changed.notify_all()

    def remove(self, name: str) -> None:
        """Remove an adapter's name. Requests that use the adapter continue. Raises ApiError 404 for an unknown name."""
        with self._changed:
            if name not in self._entries:
                raise ApiError(
                    404, f"the adapter {json_excerpt(name)} does not exist", param="lora_name", code="not_found"
                )
            self._forget(name)
            self._changed.notify_all()

    def warm(self) -> None:
        """Fetch unused adapters, as far as there are places. Call once the engine is ready."""
        for name in list(self.urls())[: self._settings.max_loras]:
            with self._changed:
                full = sum(entry.occupies_slot for entry in self._entries.values()) >= self._settings.max_loras
            if full:
                return
            try:
                self.acquire(name, lambda: None).close()
            except Exception as error:  # noqa: BLE001  a request that names it gets the error
                logger.warning("the adapter %s could not be fetched: %s", name, error)

    def _open(self, entry: AdapterEntry, wait_check: Callable[[], None]) -> None:
        deadline = time.monotonic() + self._settings.hold_s
        with self._changed:
            failed_before = entry.attempts - entry.opening
            while True:
                if entry.adapter is not None and entry.adapter.failed:
                    self._close(entry)
                if entry.adapter is not None:
                    return
                if entry.error is not None and entry.attempts > failed_before:
                    if isinstance(entry.error, ObjectNotFoundError):  # unlike a store that is away, this will not pass
                        raise _does_not_exist(entry.name, f": {entry.error}") from entry.error
                    raise entry.error
                if not entry.opening and self._make_room():
                    thread = threading.Thread(target=self._fetch, args=(entry,), name="adapter", daemon=True)
                    try:
                        thread.start()  # it waits until this one has let go of the lock
                    except RuntimeError as error:
                        raise as_limit_error(error) or error from error
                    entry.opening, entry.error = True, None
                    entry.attempts += 1
                self._changed.wait(POLL_S)
                wait_check()
                if time.monotonic() > deadline:
                    raise not_ready(
                        f"no place for the adapter {entry.name} became free within {self._settings.hold_s:g} s; "
                        "expected fewer adapters at a time, or a larger --max-loras"
                    )

    def _make_room(self) -> bool:
        """Return whether an adapter has a place. If all are taken, drop the idle one used least recently."""
        taken = [entry for entry in self._entries.values() if entry.occupies_slot]
        if len(taken) < self._settings.max_loras:
            return True
        idle = [entry for entry in taken if entry.adapter is not None and not entry.users]
        if not idle:
            return False
        oldest = min(idle, key=lambda entry: entry.used_at)
        self._drop_from_engine(oldest)
        self._close(oldest)
        return True

    def _fetch(self, entry: AdapterEntry) -> None:
        from medusa_runtime.instance.adapter_region import open_adapter
        from medusa_runtime.region.fd_passing import descriptors_to_pass

        opened: AdapterRegion | None = None
        error: MedusaError | None = None
        descriptors: list[int] = []
        try:
            opened = open_adapter(entry.url, self._settings, self._timeline)
            descriptors = descriptors_to_pass(opened.region)
        except MedusaError as found:
            error = found
        except Exception as found:
            logger.exception("the adapter %s could not be opened", entry.name)
            error = MedusaError(f"the adapter {entry.name} could not be opened: {found}")
        with self._changed:
            entry.opening = False
            if error is None and self._entries.get(entry.name) is entry and self._engine is not None:
                assert opened is not None
                entry.adapter = opened
                self._engine.add_adapter(entry.name, descriptors)
            else:
                entry.error = error or MedusaError(f"the adapter {entry.name} was removed")
                close_all(descriptors)
                if opened is not None:
                    opened.close()
            self._changed.notify_all()

    def _forget(self, name: str) -> None:
        entry = self._entries.pop(name, None)
        if entry is not None:
            self._drop_from_engine(entry)
            if not entry.users:
                self._close(entry)

    def _drop_from_engine(self, entry: AdapterEntry) -> None:
        if entry.adapter is not None and self._engine is not None:
            self._engine.drop_adapter(entry.name)

    def _close(self, entry: AdapterEntry) -> None:
        if entry.adapter is not None:
            with suppress(OSError):
                entry.adapter.close()
            entry.adapter = None


def _does_not_exist(name: str, why: str = "") -> ApiError:
    return ApiError(404, f"the model {json_excerpt(name)} does not exist{why}", param="model", code="model_not_found")


__all__ = ["AdapterEntry", "AdapterLease", "Adapters"]
