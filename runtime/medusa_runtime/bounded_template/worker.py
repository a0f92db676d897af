"""The process that renders chat templates. The kernel ends it when one takes too much time or memory.

Its standard input is a socket, through which a ``REQUEST`` comes and an ``ANSWER`` goes. Its standard output is a file
in memory, which has what they are about: a template and its values as JSON, and then a text.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import struct
import sys
from contextlib import suppress
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

from ..process import end_first, name_process
from ..process_limits import used_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from jinja2 import Template

REQUEST = struct.Struct("<QQdQQ")  # bytes of the template and of its values; limits: CPU seconds, memory, answer
ANSWER = struct.Struct("<?Q")  # whether the text is an error, and its bytes
OUT_OF_MEMORY, TOO_LONG, NO_ROOM = 77, 78, 79  # exit statuses
_MOST_CHARACTERS = 2000  # of an error


def serve(connection: int, memory: int) -> None:
    """Render what comes through a socket until its other end is closed. Call it in a process without threads."""
    gc.freeze()  # the collector would otherwise write to, and so copy, each page that is shared with a parent
    os.dup2(connection, 0)
    os.dup2(memory, 1)
    for number in map(int, os.listdir("/proc/self/fd")):  # limits on numbers may be in the billions, or lower than some
        if number > 2:
            with suppress(OSError):  # the listing's own
                os.close(number)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # they are for the parent
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    name_process("templates")
    end_first()
    while header := os.read(0, REQUEST.size):
        try:
            _answer(_compiler(), *REQUEST.unpack(header))
        except MemoryError:
            os._exit(OUT_OF_MEMORY)


def _limit_memory(by_bytes: int) -> None:
    """Let this process grow by so many bytes from now on."""
    limit = used_bytes(resource.RLIMIT_AS) + by_bytes
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _answer(
    compiled: Callable[[str], Template],
    template_bytes: int,
    values_bytes: int,
    cpu_s: float,
    memory_bytes: int,
    most_characters: int,
) -> None:
    signal.setitimer(signal.ITIMER_PROF, cpu_s)  # SIGPROF ends this process; RLIMIT_CPU counts whole seconds
    _limit_memory(memory_bytes)
    failed, text = _rendered(compiled, template_bytes, values_bytes)
    gc.collect()  # what a template leaves in cycles would add up, since each may use so much more
    if len(text) > most_characters:
        os._exit(TOO_LONG)
    data = text.encode("utf-8", "surrogatepass")
    if os.pwrite(1, data, 0) < len(data):
        os._exit(NO_ROOM)
    signal.setitimer(signal.ITIMER_PROF, 0)
    os.write(0, ANSWER.pack(failed, len(data)))


def _rendered(compiled: Callable[[str], Template], template_bytes: int, values_bytes: int) -> tuple[bool, str]:
    """Return whether the template failed, and its text or error."""
    try:
        source = os.pread(1, template_bytes, 0).decode("utf-8", "surrogatepass")
        return False, compiled(source).render(json.loads(os.pread(1, values_bytes, template_bytes)))
    except MemoryError:
        raise
    except RecursionError:
        return True, "nests values, macros or loops too deep"
    except Exception as error:  # noqa: BLE001 - templates raise anything
        return True, f"refuses these messages: {error}"[:_MOST_CHARACTERS]


@cache
def _compiler() -> Callable[[str], Template]:
    """Import Jinja, which takes 50 ms, and return a function that compiles a template.

    A template may use the same as in Hugging Face transformers: raise_exception, strftime_now, tojson, loop controls,
    the tag ``generation``.
    """
    from functools import lru_cache

    sys.modules.setdefault("_hashlib", None)  # type: ignore[arg-type]  # OpenSSL takes half a megabyte, for nothing here
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag that marks the assistant's part, for training. Here only its body matters."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    gc.freeze()  # nor has it to look at Jinja
    return lru_cache(8)(environment.from_string)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return a value as JSON. Jinja's own filter would escape HTML, and no model was trained on that."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


if __name__ == "__main__":
    serve(0, 1)
