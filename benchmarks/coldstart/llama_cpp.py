"""llama.cpp's server, with a GGUF file of the same checkpoint."""

from __future__ import annotations

import json
import shutil
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medusa_adapters.bench.coldstart.contestants import Question, Sample
from medusa_adapters.bench.openai_client import Completion
from medusa_adapters.bench.process import pss_bytes, rss_bytes
from medusa_adapters.bench.served_instance import ServedInstance
from medusa_runtime.errors import ConfigError, MissingPackageError

NAME = "llama.cpp"
OBJECT = "bucket/model.gguf"  # where an origin of the benchmark has the file

# Its fastest start. Eight sequences for --steady, with a KV cache of the usual size, which they share. By default the
# cache has the length that the model allows, and one for 131,072 tokens takes seconds.
_FLAGS = ("--no-warmup", "--parallel", "8", "--kv-unified", "--ctx-size", "4096", "--host", "127.0.0.1")
_AS_STORED = ("--no-repack",)  # weights in blocks are not put into the order that makes later products faster
_DOWNLOAD = 'curl --silent --show-error --fail --output "$1" "$2" && shift 2 && exec "$@"'
_SAME_ARITHMETIC = ("F32", "BF16", "F16")


class LlamaServer(ServedInstance):
    """`llama-server`, which accepts connections early, but refuses all requests until it has loaded the model."""

    def completion(self, body: Mapping[str, Any]) -> Completion:
        self.wait_ready("/health", every_s=0.002)
        return super().completion(body)


class LlamaCpp:
    """A contestant that runs `llama-server`, which maps the GGUF file.

    If the question's model is not on this machine, the file is fetched first, by curl and into a temporary folder.
    llama-server has no way to read it from there.
    """

    name = NAME

    def __init__(self, server: str, gguf: Path) -> None:
        self._server = server
        self._gguf = gguf
        self._downloads = tempfile.TemporaryDirectory(prefix="medusa-bench-llama-")

    def start(self, question: Question, *more_flags: str) -> LlamaServer:
        with socket.create_server(("127.0.0.1", 0)) as free:  # its log does not tell a port that it chose itself early
            port = int(free.getsockname()[1])
        flags = (*_FLAGS, *more_flags, "--port", str(port))
        if question.model == question.folder:
            return LlamaServer([self._server, "--model", self._gguf, *flags], port=port)
        if shutil.which("curl") is None:
            raise MissingPackageError("expected curl, which fetches the file from an origin first, found none")
        file = Path(self._downloads.name) / self._gguf.name
        file.unlink(missing_ok=True)  # a server that still maps it keeps its bytes
        download = ["sh", "-c", _DOWNLOAD, "sh", file, f"{question.env['AWS_ENDPOINT_URL']}/{OBJECT}"]
        return LlamaServer([*download, self._server, "--model", file, *flags], port=port)

    def sample(self, question: Question) -> Sample:
        with self.start(question, *_AS_STORED) as instance:
            answer = instance.completion(question.body)
            pids = instance.tree()
            # Quantized weights are other weights, so their text is not compared with that of others.
            same = json.loads(instance.exchange("GET", "/props").body)["model_ftype"].endswith(_SAME_ARITHMETIC)
            return Sample(
                ttft_s=(answer.first_token_ns - instance.started_ns) / 1e9,
                text=answer.text if same else "",
                pss_mb=pss_bytes(pids) / 1e6,
                rss_mb=rss_bytes(pids) / 1e6,
            )

    def close(self) -> None:
        self._downloads.cleanup()


def llama_cpp(server: str, gguf: Path | None) -> LlamaCpp:
    """Return the contestant `llama.cpp`. Raises ConfigError without a GGUF file, MissingPackageError without it."""
    if gguf is None or not gguf.is_file():
        found = f"no file {str(gguf)!r}" if gguf else "none"
        raise ConfigError(f"--gguf: {NAME} needs a GGUF file, found {found}; python -m benchmarks.make_gguf makes one")
    path = shutil.which(server)
    if path is None:
        raise MissingPackageError(f"--llama-server={server!r}: expected the path of llama.cpp's server, found none")
    return LlamaCpp(path, gguf.resolve())
