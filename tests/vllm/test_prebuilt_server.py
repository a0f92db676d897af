"""What a process that waits makes of vLLM's server, when it is used, and what is not made twice at the mount."""

from __future__ import annotations

import copy
import gc
import importlib.metadata
import importlib.util
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.checkpoint.index import Shard, WeightIndex
from medusa_runtime.errors import EngineError
from medusa_runtime.region.reader import Region
from medusa_vllm.serving import mounting, prebuilt, replacement
from medusa_vllm.serving.arguments import server_arguments
from medusa_vllm.serving.replacement import patch_function
from medusa_vllm.structured import TokenizerFolder

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

EXAMPLE = str(Path(__file__).parents[2] / "examples/pydoc-lm")


def test_an_app_is_used_once_and_only_for_what_it_was_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = ("generate",)
    made = prebuilt.prebuild_app(tasks)
    arguments = prebuilt.arguments_for([], "a/model")
    assert vars(arguments).keys() == vars(server_arguments([], "a/model")).keys()
    assert arguments.model == "a/model"
    arguments.served_model_name = ["name"]
    assert prebuilt.take_app(arguments, tasks, None) is made
    assert made.state.args is arguments
    assert prebuilt.take_app(arguments, tasks, None) is not made

    for flags, names in ((["--api-key", "secret"], {}), ([], {"VLLM_API_KEY": "secret"})):
        made = prebuilt.prebuild_app(tasks)
        with monkeypatch.context() as changed:
            for name, value in names.items():
                changed.setenv(name, value)
            assert prebuilt.take_app(prebuilt.arguments_for(flags, "a/model"), tasks, None) is not made


_WARM_UP = """
import sys, threading
from medusa_runtime.config import Settings
from medusa_runtime.engine.warmup import warm_up
from medusa_runtime.zygote import load_engine_class
from medusa_vllm.serving import prebuilt, front_end, warmup
settings = Settings(engine="vllm", device="cpu")
engine_class = load_engine_class(settings)
app, opened, before = prebuilt._prebuilt.app, [], front_end.FrontEnd.open
front_end.FrontEnd.open = lambda self, served: opened.append(served) or before(self, served)
statuses, ask = [], warmup.send_warmup_requests
warmup.send_warmup_requests = lambda *known: statuses.extend(ask(*known))
warm_up(engine_class, settings)
print(len(opened) > 1, statuses, prebuilt._prebuilt.app is app, vars(app.state), [one.name for one in
threading.enumerate()])
"""


def test_a_warm_up_mounts_the_server_and_leaves_nothing_of_it() -> None:
    done = subprocess.run([sys.executable, "-c", _WARM_UP], capture_output=True, text=True, check=False)
    answered = str([200] * 10)
    assert done.stdout.splitlines()[-1:] == [f"True {answered} True {{'_state': {{}}}} ['MainThread']"], done.stderr
    assert "Traceback" not in done.stderr


def test_plugins_are_looked_up_in_what_was_read() -> None:
    prebuilt.prebuild_app(("generate",))
    found = importlib.metadata.entry_points(group="vllm.general_plugins")
    before = importlib.metadata.entry_points
    with replacement.cached_entry_points():
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
    with mounting.cache_method(config, "values"):
        config.values()["calls"] = 9
        assert config.values() == {"calls": 1}
    assert config.values() == {"calls": 2}


def test_what_the_first_request_would_make_is_made(caplog: pytest.LogCaptureFixture) -> None:
    from vllm.entrypoints.openai.responses.serving import ResponseOutputMessage

    with caplog.at_level(logging.DEBUG, prebuilt.__name__):
        prebuilt.fill_caches()
    assert not caplog.records  # each of the places is there in this version
    assert ResponseOutputMessage.__pydantic_complete__


@pytest.fixture(scope="module")
def core_configuration() -> Any:
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(
        model=EXAMPLE, skip_tokenizer_init=True, generation_config="vllm", max_model_len=64, enforce_eager=True
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = 7
    return config


def test_a_front_ends_configuration_is_the_one_that_vllm_would_make(core_configuration: Any) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    before = copy.deepcopy(core_configuration.model_config)
    made = mounting.front_configuration(
        core_configuration, EXAMPLE, name=["one", "two"], generation_config="auto", max_model_len=64
    )
    theirs = AsyncEngineArgs(
        model=EXAMPLE, served_model_name=["one", "two"], generation_config="auto", max_model_len=64,
        enforce_eager=True,
    ).create_engine_config()  # fmt: skip
    ours, expected = vars(made.model_config), vars(theirs.model_config)
    assert {name for name in expected if str(ours[name]) != str(expected[name])} == set()
    assert made.compute_hash() == theirs.compute_hash()
    assert made.structured_outputs_config.backend == "guidance"
    assert made.cache_config.num_gpu_blocks is None  # to which the front end adds what the core tells it
    assert core_configuration.cache_config.num_gpu_blocks == 7
    assert str(core_configuration.model_config) == str(before)


def test_a_mount_reads_no_configuration_and_copies_a_tokenizer_once(core_configuration: Any) -> None:
    from vllm.renderers import hf, renderer_from_config
    from vllm.tokenizers import registry
    from vllm.transformers_utils import config

    made = mounting.front_configuration(
        core_configuration, EXAMPLE, name="m", generation_config="auto", max_model_len=64
    )
    places = registry.get_config, config.get_config, hf.maybe_make_thread_pool
    own = {"trust_remote_code": False, "config_format": made.model_config.config_format}
    expected = made.model_config.try_get_generation_config()
    with mounting.reuse_configuration(made), mounting.single_tokenizer_copy():
        assert registry.get_config(EXAMPLE, config_format="hf") is made.model_config.hf_config
        assert config.get_config(EXAMPLE, **own) is made.model_config.hf_config
        assert made.model_config.try_get_generation_config() == expected
        made.model_config.hf_overrides = {"vocab_size": 7}  # with which the core read it, and these readers do not
        assert config.get_config(EXAMPLE, **own) is not made.model_config.hf_config
        made.model_config.hf_overrides = {}
        renderer = renderer_from_config(made)
    assert (registry.get_config, config.get_config, hf.maybe_make_thread_pool) == places
    assert renderer.tokenizer.encode("Return the") == renderer.tokenizer("Return the")["input_ids"]
    renderer.shutdown()


def test_a_tokenizer_is_taken_as_it_was_read() -> None:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer, tokenization_utils_tokenizers

    read = Tokenizer.from_file(f"{EXAMPLE}/tokenizer.json")
    plain = AutoTokenizer.from_pretrained(EXAMPLE)
    with mounting.share_read_tokenizer():
        assert tokenization_utils_tokenizers.copy.deepcopy(read) is read
        others = [read]
        assert tokenization_utils_tokenizers.copy.deepcopy(others) is not others
        kept = AutoTokenizer.from_pretrained(EXAMPLE)
    assert tokenization_utils_tokenizers.copy is copy
    assert kept.encode("Return the") == plain.encode("Return the")
    assert kept.get_vocab() == plain.get_vocab()


def test_the_core_is_told_of_each_socket_of_its_client(tmp_path: Path) -> None:
    import zmq
    from vllm.v1.engine import core_client

    told: list[bool] = []
    before, context = core_client.make_zmq_socket, zmq.Context()
    with mounting.notify_on_socket(lambda: told.append((tmp_path / "in").exists())):
        made = core_client.make_zmq_socket(context, f"ipc://{tmp_path}/in", zmq.ROUTER, bind=True)
    assert told == [True]
    assert core_client.make_zmq_socket is before
    made.close(linger=0)
    context.term()


def test_a_hash_describes_a_configuration_once(core_configuration: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, described = type(core_configuration.model_config.hf_config), list[Any]()
    theirs = kind.to_json_string
    monkeypatch.setattr(kind, "to_json_string", lambda self, **given: described.append(self) or theirs(self, **given))
    plain = core_configuration.compute_hash()
    twice = len(described)
    with mounting.cache_config_description():
        assert core_configuration.compute_hash() == plain
    assert (twice, len(described)) == (2, 3)


def test_the_heap_is_frozen_without_a_collection() -> None:
    from vllm.entrypoints.launchers.utils import server_utils

    collections, before = list[str](), gc.get_freeze_count()

    def note(phase: str, info: dict[str, int]) -> None:
        collections.append(phase)

    with mounting.freeze_without_collection():
        gc.callbacks.append(note)
        try:
            server_utils.freeze_gc_heap()
        finally:
            gc.callbacks.remove(note)
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    assert frozen > before
    assert not collections


def test_what_another_version_does_not_have_is_not_replaced() -> None:
    for place, name in (("vllm.not_there", "name"), ("vllm.renderers.hf", "not_there")):
        with patch_function(place, name, lambda before: None):
            assert importlib.util.find_spec("vllm.not_there") is None
    from vllm.renderers import hf

    assert not hasattr(hf, "not_there")


def test_logging_is_muted_while_flags_are_made_and_no_longer() -> None:
    from vllm.engine import arg_utils

    mute = arg_utils.suppress_logging
    server_arguments([], "a/model")
    assert logging.root.manager.disable == logging.NOTSET
    assert arg_utils.suppress_logging is mute


def test_an_engine_has_one_folder_and_a_late_mount_gets_none() -> None:
    region = Region.create()
    try:
        shard = Shard("model.safetensors", 64, 64, "warm-up", None, 0)
        small = {"config.json": b'{"dtype": "float32"}', "tokenizer.json": b"{}"}
        region.writer().lay_out(WeightIndex([shard], {}), small)
        files = TokenizerFolder(region)
        folder = files.folder.path
        assert {each.name for each in folder.iterdir()} == {"config.json"}
        assert files.path() == folder
        assert {each.name for each in folder.iterdir()} == set(small)
        files.close()
        files.close()
        assert not folder.exists()
        with pytest.raises(EngineError, match="is stopping"):
            files.path()
    finally:
        region.close()


_TEMPLATES = """
import resource
from medusa_vllm.templates import limit_templates
limit_templates()
from transformers.utils.chat_template_utils import render_jinja_template
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
large = "{{ messages[0].content * 10 ** 10 }}{% generation %}{{ 'a' }}{% endgeneration %}"
print(AnthropicServingMessages._detect_merge_inline_system("{{ 'a' * 10 ** 10 }}"))
print(render_jinja_template([[{"content": "b"}]], chat_template=large.replace("** 10", "** 0"))[0])
try:
    render_jinja_template([[{"content": "b"}]], chat_template=large)
except Exception as error:
    print(error)
from vllm.renderers.hf import _resolve_chat_template_kwargs
tags = "{% autoescape X %}{{ X }}{% endautoescape %}{% if X %}{{ b }}{% endif %}{% block c %}{{ X }}{% endblock %}"
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for large in ("'a' * 1000000000", "'a'|center(1000000000)"):
    print(sorted(_resolve_chat_template_kwargs(tags.replace("X", large))))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 100_000)
"""


def test_vllms_server_renders_chat_templates_within_limits() -> None:
    done = subprocess.run([sys.executable, "-c", _TEMPLATES], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert lines[-6:-4] == ["True", "['ba']"], done.stderr
    assert lines[-3:] == ["['b']", "['b']", "True"]
    assert lines[-4].startswith("the chat template took more than 256 MB of memory; ")
