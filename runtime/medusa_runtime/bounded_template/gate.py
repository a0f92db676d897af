"""A trial of the limits with the Jinja that is installed: some depend on its compiler, which may change.

It takes 80 ms, and is left out for the version with which the tests have made it.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

_log = logging.getLogger(__name__)
_TRIED = "3.1.6"
_HONEST = (
    "{% set ns = namespace(t='') %}{% for a in given %}{% set ns.t = ns.t ~ a %}{{ (a, ns.t)[:1] }}{% endfor %}"
    "{% macro m() %}{{ ns.t == given }}{% endmacro %}{{ m() }}{{ given | map('upper') | join }}{{ '%s' % given }}"
)
_BIG = "{% set a = 'a' * 5000000 %}"
_HOSTILE = (  # each makes ten megabytes, if it is not refused
    "{{ 'a' * 10000000 }}",
    "{{ 'a'|center(10000000) }}",
    "{{ '%s%s%s' % (1, 2, 3) * 4000000 }}",
    _BIG + "{{ (a ~ a)|length }}",
    _BIG + "{{ a.replace('a', 'aa')|length }}",
    _BIG + "{% for i in range(10) %}{{ a }}{% endfor %}",
    "{% for i in range(400) %}" + "a" * 100_000 + "{% endfor %}",
    "{% set ns = namespace(x='" + "a" * 100_000 + "') %}{% for i in range(10) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% endfor %}{{ ns.x == ns.x }}",
    "{% set ns = namespace(x=namespace(y='" + "a" * 100_000 + "')) %}{{ ([ns] * 100)|string|length }}",
)


@cache
def template_environment() -> type[ImmutableSandboxedEnvironment]:
    """Return LimitedEnvironment; Jinja's own sandbox, with a line in the log, where the limits do not work."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    installed = getattr(jinja2, "__version__", "of an unknown version")
    try:
        from .environment import LimitedEnvironment

        found = "" if installed == _TRIED else _failed(LimitedEnvironment, ImmutableSandboxedEnvironment)
    except Exception as error:  # noqa: BLE001 (whatever a changed compiler does)
        found = str(error)
    if not found:
        return LimitedEnvironment
    _log.warning(
        "chat templates are rendered by Jinja's sandbox without limits on time and memory, because the limits do not "
        "work with jinja2 %s: %s. Install jinja2 %s",
        installed,
        found,
        _TRIED,
    )
    return ImmutableSandboxedEnvironment


def _failed(limited: Any, plain: Any) -> str:
    """Return what does not work; an empty string if all works."""
    from .budget import TemplateLimitError

    if limited().from_string(_HONEST).render(given="ab") != plain().from_string(_HONEST).render(given="ab"):
        return "a template is rendered in another way"
    for source in _HOSTILE:
        try:
            limited().from_string(source).render()
        except TemplateLimitError:
            continue
        return f"a template is not refused: {source[:60]}"
    return ""
