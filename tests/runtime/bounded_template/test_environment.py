"""Hostile chat templates end at a limit on time or memory, in whatever way they try to use it up."""

from __future__ import annotations

import resource
import subprocess
import sys
from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from medusa_runtime.bounded_template import budget
from medusa_runtime.bounded_template.budget import TemplateLimitError
from medusa_runtime.bounded_template.environment import MOST_SOURCE, LimitedEnvironment

MESSAGES = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "a" * 1000}]
_LOOP = "{% for i in range(60) %}"
DOUBLED = "{% set ns = namespace(x='ab') %}" + _LOOP + "{% set ns.x = OPERATION %}{% endfor %}{{ ns.x|length }}"
NESTED = (
    "{% set ns = namespace(x=['a'], y=['a']) %}" + _LOOP
    + "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}USE"
)  # fmt: skip
KEYED = NESTED.replace("[", "(").replace("]", ",)")
BIG = "{% set ns = namespace(x='ab', l=[]) %}{% for i in range(21) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
COLLIDING = (  # numbers with one hash, which the set of a filter compares each with each
    "{% set ns = namespace(l=[]) %}{% for a in range(0, 40000, 200) %}{% set part = namespace(l=[]) %}"
    "{% for b in range(a, a + 200) %}{% set part.l = part.l + [b * (2 ** 61 - 1)] %}{% endfor %}"
    "{% set ns.l = ns.l + part.l %}{% endfor %}USE"
)
FULL = "{% set many = range(100000)|list %}"

ENDLESS = [
    FULL + "{% for a in many %}{% for b in many %}{% endfor %}{% endfor %}",
    FULL + "{% for a in many %}{% for b in many if false %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% for a in [1, 2] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
    "{% block a %}{% if ns is not defined %}{% endif %}{% for i in [1, 2] %}{{ self.a() }}{% endfor %}{% endblock %}",
    FULL + "{% for a in many %}{% for b in many %}{% if a + b == 0 %}{% endif %}{% endfor %}{% endfor %}",
    BIG + "{% for a in range(100000) %}{% if (ns.x|upper) == ns.x %}{% endif %}{% endfor %}",
    BIG + "{{ ([ns.x] * 100)|map('upper')|map('lower')|map('title')|list|length }}",
    BIG + FULL + "{{ many|map('string')|select('in', ns.x)|list|length }}",
]

LARGE = [
    "{{ 'a' * 10**10 }}",
    "{{ 10**10 * 'a' }}",
    "{{ ('a' * 10**10)|length }}",
    "{{ [1] * 10**10 }}",
    "{{ (1,) * 10**9 }}",
    "{{ 10**(10**8) }}",
    "{{ 2.5|round(10**9) }}",
    "{{ 25|round(10**9, 'floor') }}",
    "{{ 'a'|round(10**9) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%.999999999f' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '%999999999d'|format(1) }}",
    "{{ '%999999999d' is divisibleby(1) }}",
    "{{ '%999999999d' is odd }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ '{:{}}'.format(1, 999999999) }}",
    "{{ '{a:999999999}'.format_map({'a': 1}) }}",
    "{{ ('%' ~ '9' * 9 ~ 'd') % 1 }}",
    "{{ 'a'|center(10**10) }}",
    "{{ 'a'.center(10**10) }}",
    "{{ 'a'.zfill(10**10) }}",
    "{{ 'a'['ljust'](10**10) }}",
    "{{ ('a'|attr('rjust'))(10**10) }}",
    "{{ '\\t'.expandtabs(10**10) }}",
    "{{ (1).to_bytes(10**10) }}",
    "{{ ('\\n' * 10**6)|indent(10**6) }}",
    "{{ ('\\n' * 10**6)|indent('a' * 10**6, true) }}",
    "{{ ('a' * 10**6)|replace('a', 'a' * 10**6) }}",
    "{{ ('a' * 10**6)|replace('', 'a' * 10**6) }}",
    "{{ ('a' * 10**6).replace('a', 'a' * 10**6) }}",
    "{{ range(100000)|join('a' * 10**6) }}",
    "{{ ('a' * 10**6).join('a' * 10**6) }}",
    "{{ ('a' * 10**6).join(range(100000)|map('string')) }}",
    "{{ ['a' * 10**6] * 10**6 }}",
    "{{ (['a' * 10**6] * 10**6)|string }}",
    "{{ (['a' * 10**6] * 10**6)|join }}",
    "{{ ([1] * 10**5)|tojson(indent=10**9) }}",
    "{{ [1]|batch(10**10, 0)|list }}",
    "{{ [1]|slice(10**10)|list }}",
    "{{ ([[1]] * 10**5)|sum(start=[]) }}",
    "{{ '0x'|int(base=16) + ('f' * 8000000)|int(base=16) }}",
    "{{ lipsum(n=10**6) }}",
    "{{ ('<' * 10**6)|striptags }}",
    "{{ ('a ' * 10**6)|urlize }}",
    "{{ ('a' * 10**6)|wordwrap(1) }}",
    "{{ (['a'] * 10**6)|pprint }}",
    "{{ ('a' * 10**6).rfind('a' * 10**5 ~ 'b') }}",
    "{{ ('a' * 4000000).strip('b' * 4000000 ~ 'a') }}",
    "{{ ('a' * 4000000)|trim('b' * 4000000 ~ 'a') }}",
    DOUBLED.replace("OPERATION", "ns.x + ns.x"),
    DOUBLED.replace("OPERATION", "ns.x ~ ns.x"),
    DOUBLED.replace("OPERATION", "ns.x * 2"),
    DOUBLED.replace("OPERATION", "[ns.x, ns.x]|join"),
    DOUBLED.replace("OPERATION", "'%s%s' % (ns.x, ns.x)"),
    DOUBLED.replace("OPERATION", "'{0}{0}'.format(ns.x)"),
    DOUBLED.replace("OPERATION", "ns.x|replace('a', 'aaa')"),
    DOUBLED.replace("OPERATION", "ns.x|e|string ~ ns.x"),
    DOUBLED.replace("'ab'", "[1]").replace("OPERATION", "ns.x + ns.x"),
    DOUBLED.replace("'ab'", "7").replace("OPERATION", "ns.x * ns.x"),
    DOUBLED.replace("{% set ns.x = OPERATION %}", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
    NESTED.replace("USE", "{{ ns.x }}"),
    NESTED.replace("USE", "{{ ns.x ~ 'a' }}"),
    NESTED.replace("USE", "{{ ns.x|string|length }}"),
    NESTED.replace("USE", "{{ ns.x|tojson|length }}"),
    NESTED.replace("USE", "{{ '%s' % ns.x }}"),
    NESTED.replace("USE", "{{ '{}'.format(ns.x) }}"),
    NESTED.replace("USE", "{{ ns.x|upper|length }}"),
    NESTED.replace("USE", "{{ [ns.x]|map('upper')|list|length }}"),
    NESTED.replace("USE", "{{ [[ns.x]]|map('list')|join|length }}"),
    NESTED.replace("USE", "{{ ns.x == ns.y }}"),
    NESTED.replace("USE", "{{ ns.x in [ns.y] }}"),
    NESTED.replace("USE", "{{ ns.x is eq(ns.y) }}"),
    NESTED.replace("USE", "{{ [ns.x]|select('==', ns.y)|list|length }}"),
    NESTED.replace("USE", "{{ [ns.x, ns.y]|sort|length }}"),
    NESTED.replace("USE", "{{ ([ns.x, ns.y]|map('list')|sort)|length }}"),
    NESTED.replace("USE", "{{ [ns.x].index(ns.y) }}"),
    NESTED.replace("USE", "{{ raise_exception(ns.x) }}"),
    NESTED.replace("USE", "{{ {'a': ns.x}.items() }}"),
    NESTED.replace("USE", "{{ namespace(a=ns.x) }}"),
    KEYED.replace("USE", "{{ {ns.x: 1}|length }}"),
    "{% set ns = namespace(x=namespace(a=1)) %}{% for i in range(60) %}"
    "{% set ns.x = namespace(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}",
    FULL + "{{ many|sort(attribute='" + "a," * 20000 + "a')|length }}",
    FULL + "{{ many|map('string')|map(attribute='" + "0." * 20000 + "0')|list|length }}",
    COLLIDING.replace("USE", "{{ ns.l|unique|list|length }}"),
    COLLIDING.replace("USE", "{{ dict(ns.l|batch(1))|length }}"),
    "{% for a in range(100000) %}" + "static text " * 1000 + "{% endfor %}",
    "{% for a in range(100000) %}{{ '" + "constant " * 1000 + "' }}{% endfor %}",
    "{% macro m() %}" + "static text " * 1000 + "{% endmacro %}{% for a in range(100000) %}{{ m() }}{% endfor %}",
    BIG + "{% for a in range(100000) %}{{ ns.x }}{% endfor %}",
    BIG + "{% for a in range(1000) %}{% set ns.l = ns.l + [ns.x[a:]] %}{% endfor %}",
    BIG + "{% for a in range(1000) %}{% set ns.l = ns.l + [range(a, 100000)|list] %}{% endfor %}",
    BIG + "{% for a in range(1000) %}{% set ns.l = ns.l + [ns.x.split('b')] %}{% endfor %}",
    BIG + "{% for a in range(100000) %}{% set ns.l = [ns.l, [" + "a," * 60_000 + "]] %}{% endfor %}",
    "a" * MOST_SOURCE + "a",
]  # fmt: skip


_RENDER = """
import sys
from medusa_runtime.bounded_template.environment import LimitedEnvironment
print(LimitedEnvironment().from_string(sys.argv[1]).render(), end="")
"""


@pytest.fixture
def two_gigabytes() -> Any:
    """The memory of this process may not grow by more, so that a missing limit fails a test and not the machine."""
    with open("/proc/self/statm") as statm:
        taken = int(statm.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + (2 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def render(source: str, **values: Any) -> str:
    environment = LimitedEnvironment()

    def refuse(message: Any) -> None:
        raise TemplateError(message)

    environment.globals["raise_exception"] = refuse
    return environment.from_string(source).render(messages=MESSAGES, **values)


@pytest.mark.parametrize("source", ENDLESS)
def test_a_template_without_an_end_stops(source: str, two_gigabytes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "CPU_S", 0.2)
    with pytest.raises((TemplateLimitError, RecursionError), match=r"the chat template|recursion"):
        render(source)


@pytest.mark.parametrize("source", LARGE)
def test_a_template_that_makes_too_much_stops(source: str, two_gigabytes: None) -> None:
    with pytest.raises(TemplateError, match=r"the chat template|is unsafe|is undefined"):
        render(source)


HONEST = """{% set ns = namespace(n=0, text='') %}{% set parts = [] %}
{%- for m in messages if m.role != 'tool' %}{% set ns.n = ns.n + 1 %}{% set ns.text = ns.text ~ m.role ~ 3 ~ none -%}
{{ loop.index }} {{ loop.last }} {{ loop.cycle('a', 'b') }} {{ m['content'][:3] }} {{ m.get('x', 'y') }}
{{- m.content.strip().split('l')[-1].rstrip('o') | trim | upper }}{{ (loop.index0 % 2 == 0) != (m.role == 'user') }}
{%- if loop.previtem is defined and loop.previtem.role == m.role %}same{% endif %}
{%- if m.role in ['user', 'system'] and 'ell' in m.content %}in{% endif %}{% endfor %}{{ ns.text }}{{ ns.n * 2 ** 3 }}
{%- macro show(x, y='z') %}<{{ x }}:{{ y }}{{ caller() if caller else '' }}>{% endmacro %}{{ show(1) }}
{%- call show('a', y=['b', {'c': 1.5}]) %}called{% endcall %}{% filter upper %}shout{% endfilter %}
{%- set block %}{{ 'x' * 3 }}{% endset %}{{ block }}{{ messages | map(attribute='role') | join(', ') }}
{{- messages | selectattr('role', 'equalto', 'user') | list | length }}{{ '%s is %5.1f' % ('it', 2) }}
{{- '{{"a": "{}", "y": 2024}}'.format('b') }}{{ 'in 2024, 100%% of %s' | format('x') }}{{ [1, 2] + [3] }}
{{- (1, 2) + (3,) }}{{ {'a': 1, 'b': [2]} | tojson(indent=2) }}{{ {'a': 1}.items() | list }}
{{- 'a-b' | replace('-', '+') }}{{ [3, 1] | sort }}
{{- 2.567 | round(1) }}{{ 'a\nb' | indent(2) }}{{ 7 // 2 }}{{ -7 % 3 }}{{ 'x' is string }}{{ 3 is odd }}
{{- nothing is defined }}{{ {('a', ns.n): 1} }} [1, 2, 3] | batch(2) | list }}{{ 'a b' | title | center(9) }}
{{- nothing | default('d') }}
{{- messages[-1].content[0] }}{{ dict(a=1, **{'b': 2}) }}{{ [1, 2] == [1, 2] < [3] }}
{{- 'Straße'.casefold() }}{{ 1 if ns.n else 2 }}
{%- for a, b in {'k': 'v'} | dictsort %}{{ a ~ b }}{% endfor %}{% for c in 'ab' recursive %}{{ c }}{% endfor %}"""


def test_other_templates_are_rendered_as_in_jinjas_own_sandbox() -> None:
    expected = ImmutableSandboxedEnvironment().from_string(HONEST).render(messages=MESSAGES)
    assert LimitedEnvironment().from_string(HONEST).render(messages=MESSAGES) == expected


def test_iterators_over_iterators_do_not_crash_the_process() -> None:
    source = "{% set ns = namespace(x=[1]) %}{% for i in range(99999) %}{% set ns.x = ns.x|batch(1) %}{% endfor %}ok"
    done = subprocess.run([sys.executable, "-c", _RENDER, source], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "TemplateLimitError: the chat template makes texts or lists of more" in done.stderr


_QUADRATIC = (
    "{% for m in messages %}{% set ns = namespace(n=0) %}"
    "{% for n in messages[:loop.index0] %}{% set ns.n = ns.n + 1 %}{% endfor %}{% endfor %}ok"
)


def test_a_template_that_looks_at_all_earlier_messages_may_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of Gemma 4 and Command R7B need more than three seconds for 2,000 messages, in Jinja's own sandbox, too."""
    monkeypatch.setattr(budget, "CPU_S", 0.0)
    messages = [{"role": "user", "content": "a" * 100}] * 600
    assert LimitedEnvironment().from_string(_QUADRATIC).render(messages=messages) == "ok"
    with pytest.raises(TemplateLimitError, match=r"more than 0.0\d+ s of CPU time"):
        LimitedEnvironment().from_string(_QUADRATIC.replace("messages %}", "range(99999) %}")).render(messages=[1] * 9)


def test_long_messages_may_become_long_prompts() -> None:
    text = "a" * 12_000_000
    source = "{% set ns = namespace(x='') %}{% for m in messages %}{% set ns.x = ns.x + m %}{% endfor %}{{ ns.x }}"
    assert LimitedEnvironment().from_string(source).render(messages=[text] * 2) == text * 2
