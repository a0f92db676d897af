"""Checks of checkpoints for a vLLM that is installed: they read its files, and do not import it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from plain_environ import plain_environ

pytestmark = pytest.mark.vllm
EXAMPLE = Path(__file__).parents[2] / "examples" / "pydoc-lm"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"architectures": ["NoSuchLM"]}, "does not know the architecture NoSuchLM"),
        ({"quantization_config": {"quant_method": "nothing"}}, "does not know the quant_method 'nothing'"),
        ({"quantization_config": {"quant_method": "modelopt"}}, None),
        ({"architectures": ["NoSuchLM"], "auto_map": {"AutoModel": "code.NoSuchLM"}}, None),
        ({"architectures": ["Qwen3ForCausalLM"]}, None),
    ],
)
def test_what_vllm_does_not_name_is_refused(config: dict[str, Any], said: str | None, tmp_path: Path) -> None:
    model = shutil.copytree(EXAMPLE, tmp_path / "model", ignore=shutil.ignore_patterns(".medusa"))
    whole = json.loads((model / "config.json").read_text()) | config
    (model / "config.json").write_text(json.dumps(whole))
    code = "import sys; from medusa_adapters.cli.main import main; status = main(sys.argv[1:])\n"
    code += "sys.exit(status or ('vllm' in sys.modules and 9))"
    command = [sys.executable, "-c", code, "inspect", "--engine", "vllm", str(model)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout
    (runs,) = [line for line in shown.splitlines() if line.startswith("  runs")]
    assert said in runs if said else f"the vllm engine, if it knows {whole['architectures'][0]}" in runs


@pytest.mark.parametrize(
    ("named", "said"),
    [
        (None, "; a plugin may, which is only called where VLLM_PLUGINS names it (installed: mine)"),
        ("medusa", "(installed: mine)"),
        ("other,mine", "the vllm engine, if it knows NoSuchLM"),
    ],
)
def test_what_a_plugin_may_know_is_refused_only_where_it_is_not_called(
    named: str | None, said: str, tmp_path: Path
) -> None:
    metadata = tmp_path / "site" / "mine-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\nmine = mine:register\n")
    model = shutil.copytree(EXAMPLE, tmp_path / "model", ignore=shutil.ignore_patterns(".medusa"))
    whole = json.loads((model / "config.json").read_text()) | {"architectures": ["NoSuchLM"]}
    (model / "config.json").write_text(json.dumps(whole))
    environ = plain_environ() | {"PYTHONPATH": str(metadata.parent)}
    if named is not None:
        environ["VLLM_PLUGINS"] = named
    command = [sys.executable, "-m", "medusa_adapters", "inspect", "--engine", "vllm", str(model)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True, env=environ).stdout
    (runs,) = [line for line in shown.splitlines() if line.startswith("  runs")]
    assert said in runs
