"""Unmodified vLLM, as its users start it themselves."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from medusa_adapters.bench.coldstart.contestants import Question, Sample
from medusa_adapters.bench.coldstart.rows import has_module, succeeds
from medusa_adapters.bench.process import Process, pss_bytes, rss_bytes
from medusa_adapters.bench.served_instance import ServedInstance

from benchmarks.coldstart.others import OFFLINE, SCRIPTS

# vLLM's default KV cache on a CPU is most of the machine's memory, and vLLM fills it with zeros: a start takes longer.
_ENV = {**OFFLINE, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
_IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ENABLE_STARTUP_PLAN": "1"}


@dataclass(frozen=True)
class Start:
    """A way to start vLLM.

    ``options`` are arguments of ``LLM``, and ``env`` is added to the environment. ``keeps_caches`` says whether vLLM's
    caches outlive the process. With ``streams``, vLLM loads weights with runai's streamer, if it is installed.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    keeps_caches: bool = True
    streams: bool = False


STARTS = {
    "vllm-default-baseline": Start(keeps_caches=False),
    "vllm-warm-cache-baseline": Start(),
    "vllm-best-baseline": Start(env=_IN_PROCESS, streams=True),
    "vllm-eager-baseline": Start(options={"enforce_eager": True}),
}


class VllmBaseline:
    """A contestant that runs `LLM(...)` in a fresh interpreter, without a server. So it does less than ours.

    Its caches are in a folder of its own. The first sample fills it, and the benchmark discards that sample. So are its
    temporary files: vLLM leaves a socket or a file of its process group behind at each start.
    """

    model = "m"

    def __init__(self, name: str, python: str) -> None:
        self.name = name
        self._python = python
        self._start = STARTS[name]
        self._streams = self._start.streams and has_module(python, "runai_model_streamer")
        self._caches = tempfile.TemporaryDirectory(prefix="medusa-bench-vllm-")

    def sample(self, question: Question) -> Sample:
        with self._process(question) as process:
            first = json.loads(process.line())
            ttft_s = process.since_start_s()
            whole = json.loads(process.line())
            pids = process.tree()
            return Sample(
                ttft_s=ttft_s,
                text=whole["text"],
                first=first["text"],
                pss_mb=pss_bytes(pids) / 1e6,
                rss_mb=rss_bytes(pids) / 1e6,
            )

    def start(self, question: Question) -> ServedInstance:
        """Start vLLM's own OpenAI server with the same settings. It serves the model under the name ``model``."""
        with socket.create_server(("127.0.0.1", 0)) as free:  # vLLM would not print a port that it chose itself
            port = int(free.getsockname()[1])
        command = [self._python, "-m", "vllm.entrypoints.openai.api_server", "--model", question.folder]
        command += ["--served-model-name", self.model, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--enforce-eager"] if self._start.options.get("enforce_eager") else []
        return ServedInstance(command, self._env(), port=port)

    def close(self) -> None:
        self._caches.cleanup()

    def _process(self, question: Question) -> Process:
        script = str(SCRIPTS / "vllm_generate.py")
        options = json.dumps({**self._start.options, **({"load_format": "runai_streamer"} if self._streams else {})})
        command = [self._python, script, question.folder, question.prompt, str(question.max_tokens), options]
        return Process(command, self._env())

    def _env(self) -> dict[str, str]:
        root = Path(self._caches.name)
        if not self._start.keeps_caches:
            root = Path(tempfile.mkdtemp(dir=root))
        temporary = root / "tmp"
        temporary.mkdir(exist_ok=True)
        # The compiler also has caches in temporary folders: Inductor's default is a folder in TMPDIR.
        caches = {
            "TMPDIR": str(temporary),
            "VLLM_CACHE_ROOT": str(root / "vllm"),
            "TORCHINDUCTOR_CACHE_DIR": str(root / "inductor"),
            "TRITON_CACHE_DIR": str(root / "triton"),
        }
        return {**_ENV, **self._start.env, **caches, **(self._named(root) if self._streams else {})}

    def _named(self, root: Path) -> dict[str, str]:
        """Return an environment with metadata of a package `vllm`, which vLLM's streamer needs on a CPU.

        It is empty if the metadata is already installed.
        """
        if succeeds(self._python, "import importlib.metadata; importlib.metadata.version('vllm')"):
            return {}
        metadata = root / "names" / "vllm-0.32.0+cpu.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True, exist_ok=True)
        metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
        return {"PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(root / "names")]))}
