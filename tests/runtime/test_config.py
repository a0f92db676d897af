"""Settings: precedence, refusal of bad values, and the document that lists them."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest
from medusa_runtime.config import OPTIONS, Settings, from_env, to_env
from medusa_runtime.errors import ConfigError

ENVIRONMENT = Path(__file__).parents[2] / "docs" / "environment.md"


def test_flag_then_environment_then_default() -> None:
    environ = {"MEDUSA_MODEL": "/from/environment", "PORT": "9000"}
    assert from_env(environ, model="/from/flag").model == "/from/flag"
    assert from_env(environ, model=None).model == "/from/environment"
    assert from_env(environ).port == 9000
    assert from_env({}) == Settings()


def test_flags_may_be_text_or_values() -> None:
    assert from_env({}, port="0").port == 0
    assert from_env({}, port=0).port == 0
    assert from_env({}, drain_s="2.5s").drain_s == 2.5


def test_an_empty_variable_is_no_value() -> None:
    assert from_env({"MEDUSA_MODEL": "", "PORT": ""}) == Settings()


@pytest.mark.parametrize(
    ("variable", "value", "accepted"),
    [
        ("PORT", "http", "a number"),
        ("PORT", "65536", "between 0 and 65535"),
        ("MEDUSA_ENGINE", "onnx", "one of torch, "),
        ("MEDUSA_THREADS", "0", "above 0"),
        ("MEDUSA_THREADS", "1.5", "a number"),
        ("MEDUSA_HOLD", "-1", "seconds, 0 to 1e9"),
        ("MEDUSA_HOLD", "1e300", "seconds, 0 to 1e9"),
        ("MEDUSA_HOLD", "nan", "seconds, 0 to 1e9"),
        ("MEDUSA_LOG_LEVEL", "loud", "debug, info"),
        pytest.param("MEDUSA_LAYERS", "0:" + "9" * 5000, "START below STOP", id="more digits than int reads"),
        pytest.param("MEDUSA_THREADS", "9" * 5000, "a number", id="no number of threads"),
    ],
)
def test_a_bad_value_names_variable_value_and_form(variable: str, value: str, accepted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_env({variable: value})
    message = str(caught.value)
    assert f"{variable}={value!r}" in message
    assert accepted in message


def test_a_bad_flag_is_named_as_the_flag() -> None:
    with pytest.raises(ConfigError, match="--max-model-len='many'"):
        from_env({"MEDUSA_MAX_MODEL_LEN": "5"}, max_model_len="many")


def test_settings_come_back_from_their_variables() -> None:
    settings = Settings(
        model="s3://a/b", threads=3, heartbeat_s=0.25, hold_s=1234567.125, token="x", platform="sagemaker"
    )
    assert from_env(to_env(settings)) == settings
    assert to_env(Settings()) == {}


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        Settings().port = 1  # type: ignore[misc]


def test_every_field_has_exactly_one_option() -> None:
    assert sorted(option.field for option in OPTIONS) == sorted(field.name for field in fields(Settings))
    variables = [option.variable for option in OPTIONS]
    assert len(set(variables)) == len(variables)


def test_the_document_lists_every_setting_with_its_default() -> None:
    rows = re.findall(r"^\| `--([a-z-]+)` \| `([^`]+)` \| (.*?) \|", ENVIRONMENT.read_text(), flags=re.MULTILINE)
    documented = {flag: (variables, default.strip("`")) for flag, variables, default in rows}
    expected = {
        option.field.replace("_", "-"): (option.variable, _shown(getattr(Settings(), option.field)))
        for option in OPTIONS
    }
    assert documented == expected


def _shown(default: object) -> str:
    return "" if default is None else f"{default:g}" if isinstance(default, float) else str(default)
