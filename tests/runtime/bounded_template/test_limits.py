"""Chat templates are rendered as by Jinja's own sandbox. Those that take too much fail, and the next ones do not."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from medusa_runtime.bounded_template import renderer
from medusa_runtime.bounded_template.renderer import RenderingError, TemplateRenderer

MESSAGES = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "a" * 1000}]
_LOOP = "{% for i in range(60) %}"
DOUBLED = "{% set ns = namespace(x='ab') %}" + _LOOP + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x|length }}"
NESTED = "{% set ns = namespace(x=['a'], y=['a']) %}" + _LOOP + (
    "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
)  # fmt: skip
FULL = "{% set many = range(100000)|list %}"
TIME, MEMORY = r"took more than 0\.3\d+ s of CPU time; send less", "took more than 256 MB of memory; send less"

HOSTILE = [
    (FULL + "{% for a in many %}{% for b in many %}{% endfor %}{% endfor %}", TIME),
    ("{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}", TIME),
    ("{{ 10**(10**8) }}", TIME),
    (NESTED + "{{ ns.x == ns.y }}", TIME),
    (NESTED + "{{ raise_exception(ns.x) }}", TIME),
    ("{{ ('a' * 4000000).strip('b' * 4000000 ~ 'a') }}", TIME),
    ("{{ 'a' * 10**10 }}", MEMORY),
    ("{{ ([1] * 10**5)|tojson(indent=10**9) }}", MEMORY),
    ("{{ '%999999999d' % 1 }}", MEMORY),
    (DOUBLED, MEMORY),
    ("{% for a in range(100000) %}" + "static text " * 1000 + "{% endfor %}", MEMORY),
    ("{{ 'a' * 50000000 }}", r"makes a text of more than 335[0-9]* characters from these messages; send less"),
    (
        "{% set ns = namespace(x=[1]) %}{% for i in range(99999) %}{% set ns.x = ns.x|batch(1) %}{% endfor %}"
        "{{ ns.x|list }}",
        "too deep|ended the process that renders it",
    ),
    ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "nests values, macros or loops too deep"),
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses these messages: access to attribute '__class__'"),
    ("{{ raise_exception('a' * 100000) }}", "^refuses these messages: a{1976}$"),
]


@pytest.fixture(scope="module")
def templates() -> Iterator[TemplateRenderer]:
    renderer = TemplateRenderer()
    yield renderer
    renderer.close()


@pytest.mark.parametrize(("source", "reason"), HOSTILE)
def test_a_template_that_takes_too_much_fails_and_the_next_one_does_not(
    source: str, reason: str, templates: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == TIME:
        monkeypatch.setattr(renderer, "CPU_S", 0.3)
    with pytest.raises(RenderingError, match=reason):
        templates.render(source, {"messages": MESSAGES})
    assert templates.render("{{ messages[0].content }}", {"messages": MESSAGES}) == "Hello"


HONEST = """{% set ns = namespace(n=0, text='') %}{% set parts = [] %}
{%- for m in messages if m.role != 'tool' %}{% set ns.n = ns.n + 1 %}{% set ns.text = ns.text ~ m.role ~ 3 ~ none -%}
{{ loop.index }} {{ loop.last }} {{ loop.cycle('a', 'b') }} {{ m['content'][:3] }} {{ m.get('x', 'y') }}
{{- m.content.strip().split('l')[-1].rstrip('o') | trim | upper }}{{ (loop.index0 % 2 == 0) != (m.role == 'user') }}
{%- if m.role in ['user', 'system'] and 'ell' in m.content %}in{% endif %}{% endfor %}{{ ns.text }}{{ ns.n * 2 ** 3 }}
{%- macro show(x, y='z') %}<{{ x }}:{{ y }}{{ caller() if caller else '' }}>{% endmacro %}{{ show(1) }}
{%- call show('a', y=['b', {'c': 1.5}]) %}called{% endcall %}{% filter upper %}shout{% endfilter %}
{{- messages | selectattr('role', 'equalto', 'user') | list | length }}{{ '%s is %5.1f' % ('it', 2) }}
{{- '{{"a": "{}", "y": 2024}}'.format('b') }}{{ (1, 2) + (3,) }}{{ {'a': 1}.items() | list }}
{{- 2.567 | round(1) }}{{ 'a\nb' | indent(2) }}{{ nothing | default('d') }}{{ 'a b' | title | center(9) }}
{{- messages | map(attribute='role') | pprint | length > 9 }}{{ numbers }}{{ odd }}"""


def test_others_are_rendered_as_in_jinjas_own_sandbox(templates: TemplateRenderer) -> None:
    values = {
        "messages": MESSAGES,
        "numbers": [1, 2.5, None, True, 1e400, 10**30],
        "odd": {"ö\ud800\0": "\u2028\U0001f600"},
    }
    expected = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(HONEST).render(values)
    assert templates.render(HONEST, values) == expected


def test_a_template_that_looks_at_all_earlier_messages_may_take_longer(
    templates: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of Gemma 4 and Command R7B need more than three seconds for 2,000 messages, in Jinja's own sandbox, too."""
    monkeypatch.setattr(renderer, "CPU_S", 0.001)
    source = (
        "{% for m in messages %}{% set ns = namespace(n=0) %}"
        "{% for n in messages[:loop.index0] %}{% set ns.n = ns.n + 1 %}{% endfor %}{% endfor %}ok"
    )
    assert templates.render(source, {"messages": [{"role": "user", "content": "a" * 100}] * 600}) == "ok"
    with pytest.raises(RenderingError, match=r"more than 0.0\d+ s of CPU time"):
        templates.render(source.replace("messages %}", "range(99999) %}"), {"messages": [1] * 9})


@pytest.mark.parametrize(
    "end",
    [
        "{% set ns = namespace(x=x) %}{% set ns.self = ns %}ok",
        "{% macro m() %}{{ caller() }}{% endmacro %}{% call m() %}ok{% endcall %}",
    ],
)
def test_what_templates_leave_in_cycles_does_not_add_up(end: str, templates: TemplateRenderer) -> None:
    for _ in range(4):
        assert templates.render("{% set x = 'a' * (100000000 * n) %}" + end, {"n": 1}) == "ok"
    assert templates._process is not None
    resident = int(Path(f"/proc/{templates._process.pid}/statm").read_text().split()[1]) * resource.getpagesize()
    assert resident < 100_000_000


def test_long_messages_may_become_long_prompts(templates: TemplateRenderer) -> None:
    text = "ä" * 12_000_000
    source = "{% set ns = namespace(x='') %}{% for m in messages %}{% set ns.x = ns.x + m %}{% endfor %}{{ ns.x }}"
    assert templates.render(source, {"messages": [text] * 2}) == text * 2


@pytest.mark.parametrize("value", [object(), {1, 2}, [10**5000]])
def test_values_that_are_no_json_are_refused(value: object, templates: TemplateRenderer) -> None:
    with pytest.raises(RenderingError, match="takes only what can be written as JSON: "):
        templates.render("{{ a }}", {"a": value})
