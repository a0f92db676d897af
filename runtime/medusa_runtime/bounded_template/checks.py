"""The checks before operations, methods and filters of a template run."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from itertools import chain
from string import Formatter
from typing import Any

from jinja2 import pass_context, pass_environment, pass_eval_context

from .budget import ITEM, LOOK_SIZE, MOST_BITS, LimitedContext, TemplateLimitError

_MOST_DIGITS = 300
_MOST_PRODUCT = 1 << 30  # of two texts' lengths, where an operation compares each character with each
_WIDE_FIELD = re.compile(r"[%)][-#0 +]*(?:\d{4,}|[*]|\d*[.](?:\d{4,}|[*]))")  # as in "%1000d", "%(name).1000f", "%*d"
_WIDE_SPEC = re.compile(r"\d{4,}|{")
_SLOW_METHODS = frozenset({"rfind", "rindex", "rsplit", "rpartition", "strip", "lstrip", "rstrip"})
_LAZY_FILTERS = frozenset({"map", "reject", "rejectattr", "select", "selectattr"})
_ATTRIBUTE_AT = {"groupby": 0, "join": 1, "max": 1, "min": 1, "rejectattr": 0, "selectattr": 0, "sort": 2, "sum": 0,
                 "unique": 1}  # fmt: skip
# Where a template can choose keys that have the same hash, each of which is compared with all others.
_MOST_KEYS = 10_000


def check_operation(context: LimitedContext, symbol: str, left: Any, right: Any) -> None:
    if symbol == "%" and isinstance(left, str):
        _check_format(context, left, "%", (right,))
    elif symbol == "+" and isinstance(left, tuple):
        context.check(context.size(left) + context.size(right))
    elif symbol == "*":
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
        for value, count in ((left, right), (right, left)):
            if isinstance(count, int) and not isinstance(value, int | float):
                context.check(context.size(value) * count)
    elif symbol == "**" and isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * abs(right))


def _check_bits(bits: int) -> None:
    if bits > MOST_BITS:
        raise TemplateLimitError(f"computes with a number of more than {MOST_BITS} bits")


def _check_format(context: LimitedContext, text: str, sign: str, values: Iterable[Any]) -> None:
    """Check a format string, each of whose fields may show the longest value, with at most 999 characters of width."""
    if sign == "%":
        is_wide = _WIDE_FIELD.search(text) is not None
    else:
        is_wide = any(_WIDE_SPEC.search(spec or "") for _, _, spec, _ in Formatter().parse(text))
    if is_wide:
        raise TemplateLimitError("formats a value with a width of more than 999, or one that is computed")
    context.check(len(text) + text.count(sign) * (1000 + sum(map(context.size, values))))


def _check_replaced(context: LimitedContext, text: str, old: Any, new: Any = "", *_: Any) -> None:
    if len(text) * len(str(new)) > LOOK_SIZE:
        context.check(len(text) + text.count(str(old)) * len(str(new)))


def _check_compared(context: LimitedContext, text: str, characters: int) -> None:
    if len(text) * characters > _MOST_PRODUCT:
        context.refuse_size()


def checked_arguments(
    context: LimitedContext, called: Any, given: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return the arguments of a call, with lists in place of iterators that would be read to their end."""
    owner = getattr(called, "__self__", None)
    name = getattr(called, "__name__", "")
    if isinstance(owner, dict):
        return given
    if given and (called is dict or (isinstance(owner, str) and name == "join")):
        given = (_listed(given[0]), *given[1:])
    if called is dict and given and not isinstance(given[0], dict):
        _check_keys([item[0] if isinstance(item, list | tuple) and item else item for item in given[0]])
    others = [value for key, value in named.items() if key not in ("_loop_vars", "_block_vars", "caller")]
    size = 0
    for value in chain(given, others):
        size += len(value) if type(value) is str else context.size(value)
    if isinstance(called, FormatMethod):
        _check_format(context, called.text, "{", (*given, *others))
    elif isinstance(owner, str):
        if name == "replace":
            _check_replaced(context, owner, *given, *others)
        elif name == "join" and given:
            context.check(size + len(owner) * _length(given[0]))
        elif name in _SLOW_METHODS:
            _check_compared(context, owner, size)
    elif isinstance(owner, list | tuple):
        context.size(owner)
    return given


def _check_keys(keys: list[Any]) -> None:
    """Refuse many keys whose hashes a template can choose. Those of texts are random."""
    if len(keys) > _MOST_KEYS and not all(isinstance(key, str) for key in keys):
        raise TemplateLimitError(f"uses more than {_MOST_KEYS} values that are no texts as keys")


class FormatMethod:
    """The method ``format`` of a text. ``LimitedEnvironment.call`` checks the text before it calls this."""

    def __init__(self, text: str, function: Callable[..., str]) -> None:
        self.text = text
        self._function = function

    def __call__(self, *given: Any, **named: Any) -> str:
        return self._function(*given, **named)


def _listed(value: Any) -> Any:
    """Return a list of an iterator's items, and anything else as it is."""
    return list(value) if isinstance(value, Iterator) else value


def _length(value: Any) -> int:
    return len(value) if isinstance(value, Sized) else 1


def _check_center(context: LimitedContext, value: Any, width: int = 80) -> None:
    context.check(width)


def _check_indent(context: LimitedContext, value: Any, width: int | str = 4, *_: Any, **__: Any) -> None:
    lines = len(value.splitlines()) if isinstance(value, str) else 1
    context.check(lines * (width if isinstance(width, int) else _length(width)))


def _check_round(context: LimitedContext, value: Any, precision: int = 0, *_: Any, **__: Any) -> None:
    if not isinstance(value, int | float) or abs(precision) > _MOST_DIGITS:
        raise TemplateLimitError(f"rounds what is no number, or to more than {_MOST_DIGITS} digits")


def _check_even(context: LimitedContext, value: Any, divisor: Any = 2) -> None:
    if not isinstance(value, int | float):
        raise TemplateLimitError("divides what is no number")


def _check_count(context: LimitedContext, value: Any, count: int, *_: Any, **__: Any) -> None:
    context.check(count * ITEM)


def _check_join(context: LimitedContext, value: Any, separator: Any = "", *_: Any, **__: Any) -> None:
    context.check(_length(value) * len(str(separator)))


def _check_unique(context: LimitedContext, value: Any, case_sensitive: bool = False, attribute: Any = None) -> None:
    _check_keys(list(value) if attribute is None else [None] * _length(value))


def _check_sum(context: LimitedContext, value: Any, attribute: Any = None, start: Any = 0) -> None:
    if not isinstance(start, int | float):
        raise TemplateLimitError("sums what are no numbers")


def _check_filter_format(context: LimitedContext, value: Any, *given: Any, **named: Any) -> None:
    _check_format(context, str(value), "%", (*given, *named.values()))


def _check_replace(context: LimitedContext, value: Any, old: Any, new: Any, *_: Any, **__: Any) -> None:
    _check_replaced(context, str(value), old, new)


def _check_trim(context: LimitedContext, value: Any, chars: str | None = None) -> None:
    if chars is not None:
        _check_compared(context, str(value), len(chars))


def _check_json(context: LimitedContext, value: Any, *_: Any, **options: Any) -> None:
    """Each item may have a line of its own, indented for each list or object that it is in."""
    if separators := options.get("separators"):
        context.check(context.size(value) // ITEM * sum(map(_length, separators)))
    if (indent := options.get("indent")) is not None:
        width = indent if isinstance(indent, int) else _length(indent)
        context.check(context.size(value) // ITEM * width * _depth(value))


def _depth(value: Any) -> int:
    """Return how deep lists and objects are in one another. The caller has checked the size."""
    if isinstance(value, dict):
        return 1 + max(map(_depth, value.values()), default=0)
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list | tuple) else 1


_CHECKS: dict[str, Callable[..., None]] = {
    "batch": _check_count,
    "center": _check_center,
    "divisibleby": _check_even,
    "even": _check_even,
    "format": _check_filter_format,
    "indent": _check_indent,
    "join": _check_join,
    "odd": _check_even,
    "replace": _check_replace,
    "round": _check_round,
    "slice": _check_count,
    "sum": _check_sum,
    "tojson": _check_json,
    "trim": _check_trim,
    "unique": _check_unique,
}


_CONTEXT, _EVAL_CONTEXT, _ENVIRONMENT = (
    mark(lambda: None).jinja_pass_arg  # type: ignore[attr-defined]
    for mark in (pass_context, pass_eval_context, pass_environment)
)


class LimitedFunction:
    """A filter or test that checks what it is given."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name = name
        self._function = function
        self._passed = getattr(function, "jinja_pass_arg", None)
        self._check = _CHECKS.get(name)
        self._follows = name != "list" and name not in _LAZY_FILTERS
        self._at = _ATTRIBUTE_AT.get(name, sys.maxsize)

    def __call__(self, context: LimitedContext, value: Any, /, *given: Any, **named: Any) -> Any:
        value = _listed(value)  # iterators over iterators, a hundred thousand deep, would crash the process
        context.step()
        if isinstance(attribute := named.get("attribute", given[self._at] if len(given) > self._at else None), str):
            context.check(ITEM * _length(value) * (1 + attribute.count(".") + attribute.count(",")))
        if self._follows:
            context.followed(value)
            for part in chain(given, named.values()):
                context.followed(part)
        if self._check is not None:
            self._check(context, value, *given, **named)
        if self._passed is not None:
            passed = {_CONTEXT: context, _EVAL_CONTEXT: context.eval_ctx, _ENVIRONMENT: context.environment}
            given = (passed[self._passed], value, *given)
        else:
            given = (value, *given)
        return context.made(self._function(*given, **named))
