"""Commands that make files, killed at any moment: nothing half-written passes for whole, and they run again."""

from __future__ import annotations

import argparse
import filecmp
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from medusa_adapters.bench.process import Process, runs
from medusa_adapters.bench.served_instance import medusa_command

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
_WHOLE_WITHIN_S = 240.0
_ENDS_WITHIN_S = 20.0
_FIRST_GUESS_S = 3.0  # how long a command takes, until it has been seen
_WHOLE_SHARE, _FRESH_SHARE = 0.15, 0.3  # of the commands: those that are left alone; those that find no earlier result
_RATE_BYTES_PER_S = 4_000_000  # a fetch takes a second


class _Command(NamedTuple):
    """A command's words, the file or folder that it makes, and what says what is wrong with that, or ""."""

    words: Sequence[str | Path]
    result: Path
    check: Callable[[], str]


class Soak:
    """The commands, one after another. ``samples``: commands so far, and the files that are there then."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._arguments, self._folder = arguments, folder
        self._random = random.Random(arguments.seed)
        self.asked: Counter[str] = Counter()
        self.killed: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.samples: list[tuple[float, dict[str, float]]] = []
        shutil.copytree(arguments.model, folder / "model")
        (folder / "tmp").mkdir()

    def _commands(self, url: str) -> dict[str, _Command]:
        folder, fleet = self._folder, self._arguments.fleet

        def reports(name: str) -> tuple[str | Path, ...]:
            return "--json", folder / f"{name}.json", "--report", folder / f"{name}.html"

        model = folder / "model"
        bench = ("bench", "coldstart", model, "--rows", "torch", "--runs", "1", *reports("bench"))
        found = {
            "fetch": _Command(("fetch", url, "--to", folder / "fetched"), folder / "fetched", self._fetched),
            "materialize": _Command(("materialize", model, "--starts", "1"), model / ".medusa", self._bundle),
            "bench": _Command(bench, folder / "bench.json", lambda: _reports(folder / "bench.json")),
            "simulate": _Command(
                ("simulate", fleet, *reports("fleet")), folder / "fleet.json", lambda: _reports(folder / "fleet.json")
            ),
        }
        return {name: each for name, each in found.items() if name in (self._arguments.only or name).split(",")}

    def run(self) -> None:
        """Run commands for as long as asked, and each of them once to its end then."""
        end = time.monotonic() + self._arguments.seconds
        server = Path(__file__).parents[1] / "ranged_server.py"
        command = [sys.executable, str(server), str(self._arguments.model), "--rate", str(_RATE_BYTES_PER_S)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as origin:
            assert origin.stdout
            commands = self._commands(f"http://127.0.0.1:{int(origin.stdout.readline())}")
            lengths = dict.fromkeys(commands, _FIRST_GUESS_S)
            while time.monotonic() < end:
                name = self._random.choice(list(commands))
                whole = self._random.random() < _WHOLE_SHARE
                lengths[name] = self._once(name, commands[name], None if whole else lengths[name]) or lengths[name]
                self._sample()
            for name, each in commands.items():
                self._once(name, each, None)
            origin.kill()

    def _once(self, name: str, command: _Command, length_s: float | None) -> float | None:
        """Run a command, and kill it at some moment of ``length_s``, if given. Returns how long a whole one took."""
        number = self._random.choice(_SIGNALS)
        how = "whole" if length_s is None else number.name
        if length_s is not None and self._random.random() < _FRESH_SHARE:
            shutil.rmtree(command.result, ignore_errors=True)
        began = time.monotonic()
        words = [*medusa_command(), *command.words]
        with Process(words, {"TMPDIR": str(self._folder / "tmp")}, tied=False) as process:
            tree: list[int] = []
            if length_s is not None:
                time.sleep(self._random.random() * length_s)
                tree = process.tree()
                process.process.send_signal(number)
            try:
                status = process.process.wait(_WHOLE_WITHIN_S if length_s is None else _ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                self.wrong.append(str(process.failure(f"did not end ({how})")))
                return None
            took_s, output = time.monotonic() - began, process.output()
            time.sleep(1.0 if tree else 0.0)
            if left := [pid for pid in tree if runs(pid)]:
                self.wrong.append(f"{name} left processes after {how}: {left}")
        self.asked[f"{name} {how} {status}"] += 1
        before_ours = how == "SIGINT" and "/medusa_" not in output  # in what pip has written, and in what that imports
        if ("Traceback" in output and not before_ours) or (length_s is None and status):
            self.wrong.append(f"{name} ({how}) ended with {status}: {output[-1500:]}")
        if told := command.check():
            self.wrong.append(f"{name} after {how}: {told}")
        if length_s is None and not command.result.exists():
            self.wrong.append(f"{name} made no {command.result.name}")
        return took_s if length_s is None else None

    def _sample(self) -> None:
        files = {path.relative_to(self._folder) for path in self._folder.rglob("*") if path.is_file()}
        temporary = len(list((self._folder / "tmp").iterdir()))
        beside = sum(path.parts[0] != "tmp" for path in files)
        self.samples.append((float(sum(self.asked.values())), {"files temporary": temporary, "files beside": beside}))

    def _fetched(self) -> str:
        for source in self._arguments.model.iterdir():
            target = self._folder / "fetched" / source.name
            if target.exists() and not filecmp.cmp(source, target, shallow=False):
                return f"{target.name} is not whole: {target.stat().st_size} of {source.stat().st_size} bytes"
        return ""

    def _bundle(self) -> str:
        manifest = self._folder / "model" / ".medusa" / "manifest.json"
        if not manifest.exists():
            return ""
        try:
            found = json.loads(manifest.read_text())
        except ValueError as error:
            return f"the manifest is not whole: {error}"
        missing = [each for each in found["artifacts"] if not (manifest.parent / "blobs" / each["sha256"]).exists()]
        return f"blobs are missing: {missing}" if missing else ""


def _reports(path: Path) -> str:
    try:
        json.loads(path.read_text()) if path.exists() else None
    except ValueError as error:
        return f"{path.name} is not whole: {error}"
    page = path.with_suffix(".html")
    if page.exists() and not page.read_text().rstrip().endswith("</html>"):
        return f"{page.name} is not whole"
    return ""
