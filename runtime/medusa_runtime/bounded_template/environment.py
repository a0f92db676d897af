"""Jinja's sandbox with limits on time and memory, for chat templates, which come with a checkpoint.

Jinja keeps a template from running code. It does not keep one from ``'a' * 10**10``, or from loops that never end. Here

- loops, macros and filters look at the CPU time that the rendering took,
- an operation whose result may be much larger than what it is given (a product, a power, a format, a replacement) is
  refused before it takes the memory,
- an operation that follows references (a comparison, text of a list) counts first how much there is to follow: forty
  lists, each with the previous one twice, are a terabyte as text,
- whatever is made is counted, and from time to time the memory of the process is looked at.

Importing this imports Jinja, 50 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from jinja2 import Template, pass_context
from jinja2.runtime import BlockReference, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .budget import LimitedContext, TemplateLimitError
from .checks import FormatMethod, LimitedFunction, check_operation, checked_arguments
from .code import LimitedCode

MOST_SOURCE = 200_000  # characters; the longest templates in use have 20,000

_METHODS: dict[type, frozenset[str]] = {
    str: frozenset({
        "capitalize", "casefold", "count", "endswith", "find", "format", "format_map", "index", "isalnum", "isalpha",
        "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace",
        "istitle", "isupper", "join", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace",
        "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip",
        "swapcase", "title", "upper",
    }),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    int: frozenset({"bit_length", "is_integer"}),
    float: frozenset({"is_integer"}),
    bytes: frozenset(),
}  # fmt: skip
_REFUSED_FILTERS = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
# These look at no item, or only when they are asked for the next one.
_FREE_FILTERS = frozenset({"attr", "count", "d", "default", "first", "items", "last", "length"})
_FOLLOWING_TESTS = frozenset({
    "!=", "<", "<=", "==", ">", ">=", "divisibleby", "eq", "equalto", "even", "ge", "greaterthan", "gt", "in", "le",
    "lessthan", "lower", "lt", "ne", "odd", "upper",
})  # fmt: skip


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, whose templates raise TemplateLimitError at the limits of this module."""

    code_generator_class = LimitedCode
    context_class = LimitedContext
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.optimized = False  # computes constants while it compiles
        self.finalize = _write
        self.globals.pop("lipsum", None)
        self.filters.update({name: _refused(name) for name in _REFUSED_FILTERS})

    def from_string(self, source: Any, *arguments: Any, **options: Any) -> Template:
        if isinstance(source, str) and len(source) > MOST_SOURCE:
            raise TemplateLimitError(f"has {len(source)} characters, more than {MOST_SOURCE}")
        _limit(self.filters, self.filters.keys() - _FREE_FILTERS)
        _limit(self.tests, self.tests.keys() & _FOLLOWING_TESTS)
        return super().from_string(source, *arguments, **options)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind in type(obj).__mro__:
            if kind in _METHODS:
                return attr in _METHODS[kind]
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        function = super().wrap_str_format(value)
        return None if function is None else FormatMethod(value.__self__, function)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if type(left) is not str or operator != "+":
            check_operation(context, operator, left, right)
        return context.made(self.binop_table[operator](left, right))

    def call(self, context: Any, called: Any, /, *arguments: Any, **named: Any) -> Any:
        if not isinstance(called, Macro | LoopContext | BlockReference):
            arguments = checked_arguments(context, called, arguments, named)
        return context.made(super().call(context, called, *arguments, **named))


def _limit(functions: dict[str, Any], names: Iterable[str]) -> None:
    for name in names:
        if not isinstance(functions[name], LimitedFunction):
            functions[name] = pass_context(LimitedFunction(name, functions[name]))


@pass_context
def _write(context: LimitedContext, value: Any) -> Any:
    return context.write(value)


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise TemplateLimitError(f"uses the filter {name}, whose time cannot be limited")

    return refuse
