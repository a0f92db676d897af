"""Chat templates are rendered without limits, and the log says so, where Jinja does not call the limits."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from jinja2.compiler import CodeGenerator
from jinja2.sandbox import ImmutableSandboxedEnvironment
from medusa_runtime.bounded_template import gate
from medusa_runtime.bounded_template.budget import LimitedContext
from medusa_runtime.bounded_template.code import LimitedCode
from medusa_runtime.bounded_template.environment import LimitedEnvironment
from medusa_runtime.bounded_template.gate import template_environment

TRIED = gate._TRIED


@pytest.fixture(autouse=True)
def try_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the limits tried, as with a version of Jinja that these tests do not know."""
    monkeypatch.setattr(gate, "_TRIED", "another")
    template_environment.cache_clear()
    yield
    template_environment.cache_clear()


def test_the_version_that_is_not_tried_again_is_the_one_of_these_tests() -> None:
    constraint = f"Jinja2<={TRIED}\n"
    assert constraint in (Path(__file__).parents[3] / "constraints.txt").read_text()
    assert version("jinja2") == TRIED


def test_the_limits_work_with_the_jinja_that_is_installed(caplog: pytest.LogCaptureFixture) -> None:
    assert template_environment() is LimitedEnvironment
    assert not caplog.records


@pytest.mark.parametrize("name", ["visit_Concat", "visit_Compare", "blockvisit"])
def test_a_compiler_that_calls_no_limits_is_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(LimitedCode, name, getattr(CodeGenerator, name))
    assert template_environment() is template_environment() is ImmutableSandboxedEnvironment
    (line,) = caplog.messages
    assert "without limits on time and memory, because the limits do not work with jinja2 3" in line


def test_code_that_does_not_fit_the_compiler_is_noticed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(LimitedContext, "joined")
    assert template_environment() is ImmutableSandboxedEnvironment
    assert "no attribute 'joined'" in caplog.text
