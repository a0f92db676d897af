"""What a user is shown of an error in their own code."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import medusa_runtime
import pytest
from medusa_handler.user_code.loader import load_target
from medusa_handler.user_code.model import Model
from medusa_handler.user_code.user_traceback import MODEL_METHODS, user_traceback
from medusa_runtime.errors import HandlerLoadError

_CODE = """
def user(our):
    return our(inner)

def inner():
    raise ValueError("the user's")
"""


def _error(call: Any, *arguments: Any) -> BaseException:
    try:
        call(*arguments)
    except Exception as error:  # noqa: BLE001
        return error
    raise AssertionError


def test_our_frames_are_left_out_wherever_they_are(tmp_path: Path) -> None:
    path = tmp_path / "code_of_the_user.py"
    path.write_text(_CODE)
    spec = importlib.util.spec_from_file_location("code_of_the_user", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names: dict[str, Any] = {}
    exec(compile("def our(call): return call()", f"{medusa_runtime.__path__[0]}/some.py", "exec"), names)
    for folder in (tmp_path, None):
        text = user_traceback(_error(module.user, names["our"]), folder)
        assert "in user\n" in text
        assert "in inner\n" in text
        assert text.endswith("ValueError: the user's")
        assert "some.py" not in text


def test_a_handler_without_its_model_is_told_of_the_flag() -> None:
    assert all(callable(getattr(Model, name)) for name in MODEL_METHODS)
    model: Any = None
    assert user_traceback(_error(lambda: model.generate("x"))).endswith("without a model: expected --model URL")
    for other in (lambda: model.upper(), lambda: "text".generate()):  # type: ignore[attr-defined]
        assert user_traceback(_error(other)).splitlines()[-1].startswith("AttributeError: ")


def test_a_path_that_begins_with_the_name_of_one_of_ours_is_the_users(tmp_path: Path) -> None:
    for place in (f"{medusa_runtime.__path__[0]}_extra/some.py", f"{tmp_path}2/some.py"):
        names: dict[str, Any] = {}
        exec(compile("def beside(call): return call()", place, "exec"), names)
        exec(compile("def user(): raise ValueError", f"{tmp_path}/handler.py", "exec"), names)
        text = user_traceback(_error(names["beside"], names["user"]), tmp_path)
        assert "in user" in text
        assert "in beside" not in text  # it called the user's code, from another folder
        assert "in beside" in user_traceback(_error(names["beside"], names["user"]))


def test_a_file_that_is_no_python_is_shown_without_our_import(tmp_path: Path) -> None:
    (tmp_path / "handler.py").write_text("def handle(request:\n    pass\n")
    with pytest.raises(HandlerLoadError) as caught:
        load_target(f"{tmp_path}/handler.py")
    cause = caught.value.__cause__
    assert cause is not None
    text = user_traceback(cause)
    assert "def handle(request:" in text
    assert "medusa_handler" not in text
    assert "importlib" not in text


def test_a_web_application_is_not_taken_for_a_function(tmp_path: Path) -> None:
    """It can be called, but with other arguments."""
    (tmp_path / "service.py").write_text("import flask\n\napp = flask.Flask('service')\n")
    with pytest.raises(HandlerLoadError, match=r"service.py: 'app' is a web application \(Flask\); .*docs/migrate.md"):
        load_target(f"{tmp_path}/service.py:app")
