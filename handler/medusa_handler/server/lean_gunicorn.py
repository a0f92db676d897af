"""The lean import of gunicorn: without the modules for TLS, error pages, help texts and files of log settings.

These modules of the standard library take half of the time of ``import gunicorn``. While gunicorn is imported, it finds
placeholders in their place, and keeps them. All other code gets the real modules.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from medusa_runtime.imports.lock import TESTED_PYTHONS

from .http_date import http_date


class _Placeholder(ModuleType):
    """A module with a few names. Any other name is looked up in the real module, which is then imported."""

    def __init__(self, name: str, **names: Any) -> None:
        super().__init__(name)
        vars(self).update(names)
        self._real = sys.modules.get(name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.leave()
        return getattr(importlib.import_module(self.__name__), name)

    def leave(self) -> None:
        """Let imports find the real module."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
            if self._real is not None:
                sys.modules[self.__name__] = self._real


class _NoTlsError(Exception):
    """A placeholder for ssl.SSLError, which never occurs: this server's connections have no TLS."""


def _formatdate(timestamp: float, localtime: bool = False, usegmt: bool = False) -> str:
    return http_date(int(timestamp))  # gunicorn calls it for the Date field only


def _from_log_files(name: str) -> Callable[..., Any]:
    return lambda *args, **options: getattr(importlib.import_module("logging.config"), name)(*args, **options)


def import_leanly() -> None:
    """Import the parts of gunicorn that this package uses, unless gunicorn is imported already."""
    if "gunicorn" in sys.modules or sys.version_info[:2] not in TESTED_PYTHONS:
        return
    dates = _Placeholder("email.utils", formatdate=_formatdate)
    help_texts = _Placeholder("textwrap", dedent=lambda text: text)
    placeholders = (
        dates, _Placeholder("email", __path__=[], utils=dates), help_texts, _Placeholder("html"),
        _Placeholder("importlib.metadata"), _Placeholder("platform", system=lambda: os.uname().sysname),
        _Placeholder("logging.config", **{name: _from_log_files(name) for name in ("dictConfig", "fileConfig")}),
        _Placeholder("shutil"),  # tempfile's
        _Placeholder("ssl", PROTOCOL_TLS=2, PROTOCOL_SSLv23=2, CERT_NONE=0, SSLError=_NoTlsError),
    )  # fmt: skip
    sys.modules.update({each.__name__: each for each in placeholders})
    try:
        import gunicorn.app.base
        import gunicorn.glogging
        import gunicorn.workers.gthread  # noqa: F401
    finally:
        for each in placeholders:
            each.leave()
    del help_texts.dedent  # from now on it would be called for the text of answers, which needs the real one


__all__ = ["import_leanly"]
