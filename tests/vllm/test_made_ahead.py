"""What a process that waits makes of vLLM's server, and when it is used."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import pytest
from medusa_vllm.serving import ahead
from medusa_vllm.serving.arguments import server_arguments

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; see `make test-vllm`"),
]


def test_an_app_is_used_once_and_only_for_what_it_was_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = ("generate",)
    made = ahead.make_ahead(tasks)
    arguments = ahead.arguments_for([], "a/model")
    assert vars(arguments).keys() == vars(server_arguments([], "a/model")).keys()
    assert arguments.model == "a/model"
    arguments.served_model_name = ["name"]
    assert ahead.app_for(arguments, tasks, None) is made
    assert made.state.args is arguments
    assert ahead.app_for(arguments, tasks, None) is not made

    for flags, names in ((["--api-key", "secret"], {}), ([], {"VLLM_API_KEY": "secret"})):
        made = ahead.make_ahead(tasks)
        with monkeypatch.context() as changed:
            for name, value in names.items():
                changed.setenv(name, value)
            assert ahead.app_for(ahead.arguments_for(flags, "a/model"), tasks, None) is not made


def test_plugins_are_looked_up_in_what_was_read() -> None:
    ahead.make_ahead(("generate",))
    found = importlib.metadata.entry_points(group="vllm.general_plugins")
    before = importlib.metadata.entry_points
    with ahead.known_plugins():
        assert importlib.metadata.entry_points(group="vllm.general_plugins") == found
        assert importlib.metadata.entry_points is not before
    assert importlib.metadata.entry_points is before


def test_a_method_is_computed_once_in_the_context() -> None:
    class Config:
        calls = 0

        def values(self) -> dict[str, int]:
            self.calls += 1
            return {"calls": self.calls}

    config = Config()
    with ahead.computed_once(config, "values"):
        config.values()["calls"] = 9
        assert config.values() == {"calls": 1}
    assert config.values() == {"calls": 2}
