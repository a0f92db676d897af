"""Compare `context.weights.pretrained_model` with transformers' `from_pretrained`, from a cold process.

``python -m benchmarks.engine.pretrained`` makes two random models: one of the size of BERT base that finds entities in
a text, and one of the size of T5 small that translates. Each round starts a process that imports transformers, loads
the model and computes one result, and `medusa serve` with a handler that does the same for its first request, in turn.
It prints medians of the time from the exec to the result, and of the CPU time of all processes until they have ended.
The first way serves nothing, and its process ends at once.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.ports import free_port

SHAPES: dict[str, dict[str, dict[str, Any]]] = {
    "entities": {"BertForTokenClassification": {"num_labels": 9}},
    "translation": {"T5ForConditionalGeneration": {"decoder_start_token_id": 0}},
}
TINY = {
    "entities": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
    "translation": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 2},
}
_MAKE = """
import json, sys
import transformers
kind = getattr(transformers, sys.argv[2])
kind(kind.config_class(**json.loads(sys.argv[3]))).save_pretrained(sys.argv[1])
"""
_COMPUTE = """
import torch

def compute(model):
    ids = torch.arange(3, 19)[None]
    with torch.inference_mode():
        if hasattr(model.config, "decoder_start_token_id") and model.can_generate():
            return model.generate(ids, max_new_tokens=8, do_sample=False).tolist()
        return model(ids).logits.argmax(-1).tolist()
"""
_THEIRS = """
import json, sys
import transformers

model = getattr(transformers, sys.argv[2]).from_pretrained(sys.argv[1])
print(json.dumps(compute(model)), flush=True)
"""
_OURS = """
class Handler:
    def load(self, context):
        self.model = context.weights.pretrained_model()

    def predict(self, request):
        return compute(self.model)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tasks", default=",".join(SHAPES), help="some of them, separated by commas")
    parser.add_argument("--json", type=Path, help="write the numbers there, too")
    arguments = parser.parse_args()
    result: dict[str, Any] = {}
    for task in arguments.tasks.split(","):
        with tempfile.TemporaryDirectory() as folder:
            result[task] = measure(task, Path(folder), arguments.runs)
        theirs, ours = result[task]["theirs"], result[task]["ours"]
        print(f"{task}: {result[task]['megabytes']:.0f} MB, medians of {arguments.runs}")
        for what, unit in (("result", "until the result"), ("cpu", "of CPU time")):
            ratio = statistics.median(theirs[what]) / statistics.median(ours[what])
            print(
                f"  {unit}: from_pretrained {statistics.median(theirs[what]):.2f} s, "
                f"pretrained_model {statistics.median(ours[what]):.2f} s, {ratio:.1f} times"
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


def measure(task: str, folder: Path, runs: int, **sizes: Any) -> dict[str, Any]:
    """Return the seconds of each run, ``{"theirs"|"ours": {"result"|"cpu": [...]}}``, and the size of the model.

    Raises RuntimeError if a process fails or the results differ.
    """
    ((name, values),) = SHAPES[task].items()
    made = folder / "model"
    subprocess.run(
        [sys.executable, "-c", _MAKE, made, name, json.dumps(values | sizes)], check=True, capture_output=True
    )
    (folder / "handler.py").write_text(_COMPUTE + _OURS)
    found: dict[str, Any] = {"theirs": {"result": [], "cpu": []}, "ours": {"result": [], "cpu": []}}
    for run in range(runs + 1):  # the first reads the files into the page cache
        theirs, *their_times = _theirs(made, name)
        ours, *our_times = _ours(made, folder)
        if theirs != ours:
            raise RuntimeError(f"expected the result of transformers, {theirs}, found {ours}")
        for way, times in (("theirs", their_times), ("ours", our_times)) if run or runs == 0 else ():
            for what, seconds in zip(("result", "cpu"), times, strict=True):
                found[way][what].append(seconds)
    found["megabytes"] = (made / "model.safetensors").stat().st_size / 1e6
    return found


def _theirs(made: Path, name: str) -> tuple[Any, float, float]:
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", _COMPUTE + _THEIRS, made, name], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    took = time.perf_counter() - began
    cpu = _ended(process)
    if process.returncode:
        raise RuntimeError(f"expected a result of transformers, its process ended with {process.returncode}")
    return json.loads(line), took, cpu


def _ours(made: Path, folder: Path) -> tuple[Any, float, float]:
    port = free_port()
    command = [sys.executable, "-m", "medusa_adapters", "serve", "--engine", "none", "--model", str(made)]
    began = time.perf_counter()
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            [*command, "--handler", str(folder / "handler.py"), "--host", "127.0.0.1", "--port", str(port)],
            stdout=log,
            stderr=log,
        )
    try:
        answer = json.loads(_first_answer(port, process))
        took = time.perf_counter() - began
    finally:
        process.send_signal(signal.SIGTERM)
        cpu = _ended(process)
    return answer, took, cpu


def _first_answer(port: int, process: subprocess.Popen[bytes]) -> bytes:
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", data=b"{}", timeout=120) as response:
                return bytes(response.read())
        except ConnectionRefusedError:
            pass
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionRefusedError):
                raise
        if process.poll() is not None:
            raise RuntimeError("expected an answer of medusa serve, it has ended")
        time.sleep(0.005)


def _ended(process: subprocess.Popen[bytes]) -> float:
    """Wait for a process, and return the CPU time of it and all that it has waited for."""
    if process.stdout is not None:
        process.stdout.close()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
