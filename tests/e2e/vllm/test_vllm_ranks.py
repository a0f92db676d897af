"""`--engine vllm --tensor-parallel 2`: ranks are forks of the engine, and each reads its slices of the one region."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import struct
import time
from collections.abc import Callable
from operator import or_
from pathlib import Path
from typing import Any

import pytest
from process_tree import alive, shared_memory_of
from slow_origin import serving_origin
from waiting import until

Start = Callable[..., Any]
PATIENCE_S = 300.0
PAGE = os.sysconf("SC_PAGE_SIZE")
HUGE_PAGE = 2 << 20  # at most so many bytes are mapped with one that is touched, where they are in memory
HIDDEN, HEAD, VOCAB = 64, 32, 2048
INNER = 128 << 10
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two CPUs"),
]
BY_ROWS = ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight")  # 16 MiB each


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory, example: Path) -> Path:
    """A Llama of 51 MB in one layer, with the tokenizer of another."""
    import torch
    from safetensors.torch import save_file

    folder, dice = tmp_path_factory.mktemp("wide"), torch.Generator().manual_seed(7)
    shapes = dict.fromkeys(BY_ROWS, (INNER, HIDDEN)) | {"model.layers.0.mlp.down_proj.weight": (HIDDEN, INNER)}
    shapes |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (VOCAB, HIDDEN))
    shapes |= {f"model.layers.0.self_attn.{part}_proj.weight": (HIDDEN, HIDDEN) for part in "qkvo"}
    tensors = {name: (torch.randn(shape, generator=dice) / 8).bfloat16() for name, shape in shapes.items()}
    norms = ("model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm")
    save_file(
        tensors | {f"{name}.weight": torch.ones(HIDDEN).bfloat16() for name in norms}, folder / "model.safetensors"
    )
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
    }
    config |= {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 1, "vocab_size": VOCAB}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": HEAD, "max_position_embeddings": 128}
    config |= {"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(example / name, folder)
    return folder


def tokens(serving: Any) -> Any:
    body = {"prompt": [3, 14, 15, 9, 26, 5], "max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    body |= {"return_token_ids": True}
    status, answer, _ = serving.request("POST", "/v1/completions", body, timeout_s=PATIENCE_S)
    assert status == 200, answer
    return answer["choices"][0]["logprobs"]["tokens"], answer["usage"]


def ranks_of(serving: Any) -> list[int]:
    return sorted(pid for pid, name in serving.children().items() if name.startswith("VLLM::Worker"))


def applied(serving: Any) -> list[int | None]:
    stages = serving.request("GET", "/timeline")[1]["stages"]
    return [stage["detail"].get("stored") for stage in stages if stage["name"] == "apply"]


def touched(pid: int, checkpoint: Path) -> dict[str, list[bool]]:
    """Of each large tensor of the file, whether this process has mapped its pages (proc(5), pagemap)."""
    with open(checkpoint, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    maps = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if str(checkpoint) in line]
    present: set[int] = set()
    with open(f"/proc/{pid}/pagemap", "rb") as pagemap:
        for span, _, offset, *_ in maps:
            start, stop = (int(edge, 16) // PAGE for edge in span.split("-"))
            pagemap.seek(start * 8)
            entries = struct.unpack(f"{stop - start}Q", pagemap.read((stop - start) * 8))
            present |= {int(offset, 16) // PAGE + number for number, entry in enumerate(entries) if entry >> 63}
    found = {}
    for name in BY_ROWS:
        start, stop = (edge + 8 + length for edge in header[name]["data_offsets"])
        found[name] = [page in present for page in range(-(-start // PAGE), stop // PAGE)]
    return found


def test_forked_ranks_read_their_slices_and_say_what_one_rank_says(start: Start, wide: Path) -> None:
    one = start("--model", wide, "--engine", "vllm", "--kv-cache-mb", "64")
    expected = tokens(one)
    (stored,) = applied(one)
    assert one.stop() == 0
    two = start("--model", wide, "--engine", "vllm", "--kv-cache-mb", "64", "--tensor-parallel", "2")
    assert tokens(two) == expected
    assert applied(two) == [stored, stored]  # multiplied by our kernels where one rank's are
    ranks = ranks_of(two)
    assert len(ranks) == 2
    images = {Path(f"/proc/{pid}/auxv").read_bytes() for pid in (two.child("engine"), *ranks)}
    assert len(images) == 1  # none of them is a new interpreter, which has its own random numbers there
    assert [len(os.sched_getaffinity(pid)) for pid in ranks] == [len(os.sched_getaffinity(0)) // 2] * 2
    first, second = (touched(pid, wide / "model.safetensors") for pid in ranks)
    for name in BY_ROWS:
        most = len(first[name]) // 2 + HUGE_PAGE // PAGE
        assert sum(first[name]) <= most
        assert sum(second[name]) <= most
        assert all(map(or_, first[name], second[name]))
    assert two.stop() == 0


SHARED = Path("/dev/shm")
SUMS_IN_SHARED_MEMORY = "avx512f" in Path("/proc/cpuinfo").read_text()  # vLLM's code for other CPUs sums by gloo


@pytest.mark.parametrize("mode", ["auto", "compatible"])
def test_nothing_is_left_in_shared_memory_if_all_processes_are_killed_at_once(
    start: Start, example: Path, mode: str
) -> None:
    """As when a container's memory runs out. Its /dev/shm is that of the pod, where the next container runs."""
    before = set(SHARED.iterdir())
    flags = ("--kv-cache-mb", "64", "--tensor-parallel", "2", "--vllm-mode", mode)
    serving = start("--model", example, "--engine", "vllm", *flags)
    status, answer, _ = serving.request("POST", "/v1/completions", {"prompt": "x"}, timeout_s=PATIENCE_S)
    assert status == 200, answer
    pids = [serving.process.pid, *serving.children()]
    mapped = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    semaphores = {path.stat().st_ino: path for path in SHARED.glob("sem.mp-*")}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(lambda: not any(alive(pid) for pid in pids))
    expected = {"psm_", "vllm_dist_"} if SUMS_IN_SHARED_MEMORY else {"psm_"}
    assert expected <= set(re.findall(r"/dev/shm/(psm_|vllm_dist_)", mapped))
    assert [path for path in set(SHARED.iterdir()) - before if path.name in mapped] == []
    for inode, semaphore in semaphores.items():  # whoever would remove these was killed, too; each has 32 bytes
        if re.search(rf" {inode} +/dev/shm/sem\.", mapped):
            semaphore.unlink(missing_ok=True)


@pytest.mark.parametrize("mode", ["auto", "compatible"])
def test_nothing_is_left_in_shared_memory_of_an_instance_that_is_killed_while_its_ranks_load(
    start: Start, example: Path, mode: str
) -> None:
    flags = ("--kv-cache-mb", "64", "--tensor-parallel", "2", "--vllm-mode", mode)
    with serving_origin(example, 20e3) as origin:
        serving = start("--model", origin.url, "--engine", "vllm", *flags)
        if SUMS_IN_SHARED_MEMORY:
            until(lambda: any("vllm_dist_" in name for name in mapped_names(serving)))
            until(lambda: not any("vllm_dist_" in name and (SHARED / name).exists() for name in mapped_names(serving)))
        else:
            until(lambda: mapped_names(serving))
        names, descendants = mapped_names(serving), serving.children()
        serving.process.kill()
        assert serving.wait_gone(descendants) == -signal.SIGKILL
    assert any(name.startswith("psm_") for name in names)
    until(lambda: not any((SHARED / name).exists() for name in names))


def mapped_names(serving: Any) -> set[str]:
    """The names of shared memory that the instance's processes have opened, removed ones too."""
    return {name for name in shared_memory_of(serving.children()) if name.startswith(("psm_", "vllm_dist_"))}


def test_ranks_end_with_an_engine_that_is_killed(start: Start, example: Path) -> None:
    serving = start("--model", example, "--engine", "vllm", "--kv-cache-mb", "64", "--tensor-parallel", "2")
    status, answer, _ = serving.request("POST", "/v1/completions", {"prompt": "x"}, timeout_s=PATIENCE_S)
    assert status == 200, answer
    ranks = ranks_of(serving)
    os.kill(serving.child("engine"), signal.SIGKILL)
    status, answer, _ = serving.request("POST", "/v1/completions", {"prompt": "x"}, timeout_s=PATIENCE_S)
    assert status == 200, answer  # by new ranks
    deadline = time.monotonic() + PATIENCE_S
    while any(alive(pid) for pid in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in ranks)
    assert serving.stop() == 0
