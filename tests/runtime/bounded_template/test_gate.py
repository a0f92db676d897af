"""Chat templates are rendered without limits, and the log says so, where Jinja does not call the limits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from jinja2.compiler import CodeGenerator
from jinja2.sandbox import ImmutableSandboxedEnvironment
from medusa_runtime.bounded_template.budget import LimitedContext
from medusa_runtime.bounded_template.code import LimitedCode
from medusa_runtime.bounded_template.environment import LimitedEnvironment
from medusa_runtime.bounded_template.gate import template_environment


@pytest.fixture(autouse=True)
def ask_again() -> Iterator[None]:
    template_environment.cache_clear()
    yield
    template_environment.cache_clear()


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
