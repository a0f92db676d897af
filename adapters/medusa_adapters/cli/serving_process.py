"""The process of `medusa serve` when it has imported everything: saved as a snapshot, and continued from it.

``resume`` runs before anything else in a start, so this module imports next to nothing.
"""

from __future__ import annotations

import os
import sys

from medusa_snapshot.resuming import command_line, default_folder, start_anew
from medusa_snapshot.resuming import resume as resume_snapshot

TYPE_CHECKING = False  # typing takes several milliseconds to import
if TYPE_CHECKING:
    from medusa_runtime.config import Settings

NAME = "serve"
_FLAG, _VARIABLE = "--snapshots", "MEDUSA_SNAPSHOTS"
is_resumed = False
why_not: str | None = None  # why the snapshot that is there is not used


def resume(given: list[str]) -> None:
    """Become a process that has imported everything, and runs this command line, if there is a snapshot of one."""
    global why_not
    chosen = _chosen(given)
    if chosen != "none":
        is_default = chosen in ("", "auto")
        why_not = resume_snapshot(default_folder() if is_default else chosen, NAME, given)
        if why_not is None and not is_default:
            why_not = f"there is none in {chosen}"


def _chosen(given: list[str]) -> str:
    """Return the setting ``snapshots``. The command line has not been parsed yet."""
    for index, word in enumerate(given):
        if word == "--":
            break
        if word == _FLAG and index + 1 < len(given):
            return given[index + 1]
        if word.startswith(_FLAG + "="):
            return word.removeprefix(_FLAG + "=")
    return os.environ.get(_VARIABLE, "")


def check(settings: Settings) -> None:
    """Start anew without the snapshot, if this process continues from it and something here needs another one.

    It has imported torch leanly, which vLLM does not support.
    """
    if not is_resumed:
        return
    if settings.engine not in ("torch", "none") or settings.torch_import == "plain" or settings.snapshots == "none":
        os.execve(sys.executable, command_line(), {**os.environ, _VARIABLE: "none"})
    if settings.handler is not None and (name := _shadowed(settings.handler)) is not None:
        start_anew(f"it has another module {name} than the one beside the handler")


def _shadowed(handler: str) -> str | None:
    """Return a module of this process that is not the one that the handler would import, or None.

    A handler finds modules in its own folder first, such as packages that were installed there.
    """
    place = handler.partition(":")[0]
    folder = os.path.dirname(os.path.abspath(place)) if place.endswith(".py") else os.getcwd()
    try:
        names = os.listdir(folder)
    except OSError:
        return None
    for name in names:
        path = os.path.join(folder, name if name.endswith(".py") else os.path.join(name, "__init__.py"))
        module = sys.modules.get(name.removesuffix(".py"))
        if module is not None and os.path.exists(path):
            spec = object.__getattribute__(module, "__dict__").get("__spec__")  # a lookup executes a lazy module
            if spec is not None and spec.origin != path:
                return name.removesuffix(".py")
    return None


def save(folder: str) -> None:
    """Import what the processes of an instance import, and save this process. Raises SnapshotError."""
    from medusa_runtime.compiled_library import LIBRARY
    from medusa_runtime.process import share_cores
    from medusa_snapshot.saving import SnapshotError
    from medusa_snapshot.saving import save as save_snapshot

    environ = dict(os.environ)
    share_cores()  # as in an instance: libgomp reads this when it is loaded
    if (why := _import_everything()) is not None:
        raise SnapshotError(why)

    def resumed(arguments: list[str]) -> int:
        global is_resumed
        is_resumed = True
        if os.environ.get("HOME") != environ.get("HOME"):
            for name in [name for name in sys.modules if name.partition(".")[0] == "botocore"]:
                del sys.modules[name]  # it has noted where its folders are
        from .command_line import run

        return run(arguments)

    save_snapshot(folder, NAME, LIBRARY, environ, resumed)


def _import_everything() -> str | None:
    """Import all that an instance imports. Returns a reason why that cannot be kept, or None."""
    import importlib
    from contextlib import suppress

    from medusa_handler.server.function_process import preimport as import_function
    from medusa_runtime.imports import lazy_torch
    from medusa_runtime.instance.roles import preimport as import_roles

    from ..platforms.base import ADAPTERS, load

    # gunicorn and Flask come first: their lean imports leave out modules that nothing has imported yet.
    import_function()
    if (why := lazy_torch.why_not_lean_in_handlers()) is not None:
        return f"torch would be imported as a whole: {why}"
    lazy_torch.import_torch()
    import_roles()
    for name in ADAPTERS:
        load(name)
    importlib.import_module("medusa_adapters.report.gantt")
    importlib.import_module("medusa_adapters.cli.serve")
    with suppress(ImportError):
        importlib.import_module("botocore.session")
    return None


def main() -> int:
    """Save this process in the folder that the command line names; returns the exit status."""
    from medusa_snapshot.saving import SnapshotError

    try:
        save(sys.argv[1])
    except (SnapshotError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0
