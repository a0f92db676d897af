"""Flags of ``vllm serve`` as the engine reads them, by vLLM's own parser."""

from __future__ import annotations

from pathlib import Path

import pytest
from medusa_runtime.config import Settings
from medusa_runtime.errors import ConfigError
from medusa_vllm.flags import flag_words
from medusa_vllm.serving.arguments import engine_arguments

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def test_flags_of_the_engine_are_taken_and_those_of_the_front_end_left(tmp_path: Path) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text("max-model-len: 77\nchat-template: x\n")
    words = ["--config", str(file), "--seed=3", "--chat-template", "y", "--no-enable-prefix-caching"]
    words.append("--enable-log-requests")  # vLLM counts it among the engine's, whose constructor does not take it
    assert engine_arguments(words) == {"max_model_len": 77, "seed": 3, "enable_prefix_caching": False}


@pytest.mark.parametrize("flag", ["--max-model=9", "--max_model"])
def test_an_abbreviated_flag_is_refused_and_not_half_used(flag: str) -> None:
    """vLLM's parser of all flags would take it, and the engine would start without it."""
    with pytest.raises(ConfigError, match="expected --max-model-len in full, found --max-model"):
        engine_arguments([flag])


@pytest.mark.parametrize("flag", ["--disable-log-requests", "--foo=1", "--no-bar"])
def test_a_flag_that_vllm_does_not_have_ends_the_start(flag: str) -> None:
    """Otherwise the instance would become ready, and each request of vLLM's routes would fail."""
    with pytest.raises(ConfigError, match="expected a flag that this version has, found --"):
        engine_arguments(["--chat-template", "x", flag])


def test_no_flag_of_the_front_end_ends_the_start() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    engine = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())._option_string_actions
    commands = FlexibleArgumentParser(prog="vllm").add_subparsers(required=True, dest="subparser")
    every = ServeSubcommand().subparser_init(commands)._option_string_actions
    ours = engine.keys() | {"--config"}
    front = [flag for flag in every if flag.startswith("--") and flag not in ours and not _is_refused(flag)]
    assert {"--chat-template", "--no-enable-log-outputs", "--tool-call-parser"} <= set(front)
    for flag in front:
        assert engine_arguments([flag, flag.replace("-", "_").replace("__", "--")]) == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data-parallel-size: 2", "run one instance a replica"),
        ("model: /another", "use medusa's --model"),
        ("a: [", "cannot be read"),
        (None, "cannot be read: .*No such file"),
    ],
)
def test_a_file_of_flags_is_checked_like_flags(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "flags.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        engine_arguments(["--config", str(file)])


def test_what_is_refused_in_full_is_refused_in_short() -> None:
    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser  # from 0.33 on
    except ImportError:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    refused = []
    for action in make_arg_parser(FlexibleArgumentParser())._actions:
        verdicts = {flag: _is_refused(flag) for flag in action.option_strings}
        assert len(set(verdicts.values())) <= 1, verdicts
        refused += [flag for flag, is_refused in verdicts.items() if is_refused]
    assert {"-dp", "-dpl", "-n", "-r", "-tp", "--ssl-ciphers", "--master-port"} <= set(refused)


def _is_refused(flag: str) -> bool:
    try:
        flag_words(Settings(engine="vllm", vllm_args=f"{flag} 1"))
    except ConfigError:
        return True
    return False
