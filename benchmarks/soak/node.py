"""A node agent whose functions come, go and are killed at any moment, while its store stops answering now and then."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from medusa_adapters.bench.process import Process, runs
from medusa_adapters.bench.served_instance import ServedInstance, medusa_command, serve_command
from medusa_runtime.errors import MedusaError
from medusa_runtime.node.client import NodeClient

from benchmarks.soak.footprint import MB, footprint
from benchmarks.waiting import until

_MODELS = 8
_USERS = (0, 12345, 12346)
_ROUND_S = 12.0
_QUIET_WITHIN_S = 40.0
_ANSWER_WITHIN_S = 60.0
_SPARED_S = 6.0  # the agent gives up a kind of engine of which three end within 10 s
_RATE_BYTES_PER_S = 8_000_000  # a model takes most of a second


class Soak:
    """One agent and its callers. ``samples``: callers so far, and the agent's footprint then. See soak.serve."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        folder.chmod(0o755)
        self._arguments, self._folder = arguments, folder
        self._random = random.Random(arguments.seed)
        self._lock = threading.Lock()
        self.asked: Counter[str] = Counter()
        self.killed: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.samples: list[tuple[float, dict[str, float]]] = []
        self._spared_until = 0.0
        self._files = folder / "store"
        for number in range(_MODELS):
            shutil.copytree(arguments.model, self._files / f"m{number}")
        self._size = sum(path.stat().st_size for path in arguments.model.iterdir())
        for name in ("tmp", "run"):
            (folder / name).mkdir()
            (folder / name).chmod(0o1777)

    def run(self) -> None:
        """Let callers come and go for as long as asked, and look at the agent whenever it has none."""
        end = time.monotonic() + self._arguments.seconds
        with self._origin() as (origin, url):
            self._url = url
            sockets = ("--socket", self._folder / "run" / "node.sock", "--socket", f"{self._tenant}={url}/m0,{url}/m1")
            quota = f"{url}/m2={2 * self._size}"
            rules = ("--allow", f"{url}/", "--per-caller", "engines=2,fetches=3,models=4", "--quota", quota)
            room = ("--memory-budget", f"{int(3.5 * self._size)}", "--prewarm", "torch=1", "--look-every-s", "3")
            self._command = [*medusa_command(), "node", *sockets, *rules, *room, "--log-level", "info"]
            agent = self._start_agent()
            try:
                while time.monotonic() < end and agent.alive():
                    self._round(agent, origin)
                    self._look(agent)
                    if self._arguments.faults:
                        agent = self._replace(agent)
                self._end(agent)
            finally:
                agent.close()

    def _start_agent(self) -> Process:
        agent = Process(self._command, log=open(self._folder / "node.log", "w+b"))  # noqa: SIM115 (closed with it)
        until(lambda: "node agent on" in agent.output() or not agent.alive(), 60, "a node agent")
        return agent

    def _replace(self, agent: Process) -> Process:
        """Kill the agent while callers are there, start another one, and look for what the first one has left."""
        ending = time.monotonic() + _ROUND_S / 2
        callers = self._callers(ending)
        time.sleep(self._random.uniform(0.5, 4))
        tree = agent.tree()
        agent.process.kill()
        agent.process.wait()
        self.killed["SIGKILL agent"] += 1
        self._check_log(agent)
        another = self._start_agent()
        for caller in callers:
            caller.join()
        time.sleep(2)
        if left := [pid for pid in tree if runs(pid)]:
            self.wrong.append(f"a killed agent, and then its callers, left processes: {left}")
        agent.close()
        return another

    def _end(self, agent: Process) -> None:
        if not agent.alive():
            self.wrong.append(str(agent.failure("ended")))
        tree = agent.tree()
        agent.process.terminate()
        agent.process.wait(30)
        time.sleep(1)
        if left := [pid for pid in tree if runs(pid)]:
            self.wrong.append(f"the agent left processes: {left}")
        kept = (".lock", ".regions")
        if files := [str(path) for path in (self._folder / "run").iterdir() if path.suffix not in kept]:
            self.wrong.append(f"the agent left files: {files}")
        self._check_log(agent)

    def _check_log(self, agent: Process) -> None:
        for line in agent.output().splitlines():
            if "Traceback" in line or "Error:" in line:
                self.wrong.append(f"the agent's log: {line}")

    @property
    def _tenant(self) -> Path:
        return self._folder / "run" / "tenant.sock"

    @contextlib.contextmanager
    def _origin(self) -> Iterator[tuple[subprocess.Popen[str], str]]:
        server = Path(__file__).parents[1] / "ranged_server.py"
        command = [sys.executable, server, self._files, "--rate", str(_RATE_BYTES_PER_S)]
        with subprocess.Popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as origin:
            assert origin.stdout
            try:
                yield origin, f"http://127.0.0.1:{int(origin.stdout.readline())}"
            finally:
                origin.kill()

    def _round(self, agent: Process, origin: subprocess.Popen[str]) -> None:
        ending = time.monotonic() + _ROUND_S
        callers = self._callers(ending)
        while time.monotonic() < ending:
            time.sleep(self._random.uniform(0.3, 3))
            fault = self._random.choice(("origin", "child", "child", "file"))
            self.killed[fault] += 1
            if fault == "origin":
                origin.send_signal(signal.SIGSTOP)
                time.sleep(self._random.uniform(0.1, 4))
                origin.send_signal(signal.SIGCONT)
            elif fault == "file":  # another version
                os.utime(self._files / f"m{self._random.randrange(_MODELS)}" / "model.safetensors")
            else:
                self._kill_a_child(agent)
        for caller in callers:
            caller.join()

    def _callers(self, ending: float) -> list[threading.Thread]:
        found = [threading.Thread(target=self._call, args=(ending, self._random.random()))
                 for _ in range(self._arguments.clients)]  # fmt: skip
        for caller in found:
            caller.start()
        return found

    def _kill_a_child(self, agent: Process) -> None:
        """Kill or stop one; of engines not more than the agent takes for an accident."""
        with suppress(IndexError, OSError):
            pid = self._random.choice(agent.tree()[1:])
            role = Path(f"/proc/{pid}/comm").read_text().strip()
            if role != "prefetcher":
                if time.monotonic() < self._spared_until:
                    return
                self._spared_until = time.monotonic() + _SPARED_S
            # A check of the store that is stopped keeps its region, until the agent gives it up after two minutes.
            number = self._random.choice((signal.SIGKILL, signal.SIGSTOP if role != "revalidate" else signal.SIGKILL))
            os.kill(pid, number)
            self.killed[f"{number.name} {role}"] += 1

    def _call(self, ending: float, seed: float) -> None:
        rng = random.Random(seed)
        acts = (self._function, self._function, self._lease, self._quit, self._fetch)
        while time.monotonic() < ending:
            act = rng.choice(acts)
            try:
                told = act(rng)
            except MedusaError as error:
                told = error.code
            except Exception as error:  # noqa: BLE001 what a caller sees is what is looked for
                told = "wrong"
                self.wrong.append(f"{act.__name__}: {error!r}")
            with self._lock:
                self.asked[f"{act.__name__.strip('_')} {told}"] += 1

    def _place(self, rng: random.Random) -> tuple[str, str]:
        if rng.random() < 0.3:
            return f"{self._url}/m{rng.randrange(2)}", str(self._tenant)
        return f"{self._url}/m{rng.randrange(_MODELS)}", str(self._folder / "run" / "node.sock")

    def _function(self, rng: random.Random) -> str:
        """Start a function, and kill one or all of its processes after a while, or let it answer."""
        url, socket = self._place(rng)
        user = rng.choice(_USERS)
        as_user = ["setpriv", "--reuid", str(user), "--regid", str(user), "--clear-groups"] if user else []
        start = rng.choice(("now", "request"))
        options = ("--kv-cache-mb", "8", "--engine-start", start, "--log-level", "warning")
        command = [*as_user, *serve_command("--model", url, "--node-socket", socket, *options)]
        env = {"TMPDIR": str(self._folder / "tmp"), "HOME": str(self._folder / "tmp")}
        with ServedInstance(command, env, tied=False, start_timeout_s=_ANSWER_WITHIN_S) as instance:
            if rng.random() < 0.6:
                time.sleep(rng.random() ** 2 * 4)
                tree = instance.tree()
                pid = rng.choice(tree)
                os.kill(pid, signal.SIGKILL)
                if pid == instance.pid:
                    time.sleep(1.5)
                    if left := [pid for pid in tree if runs(pid)]:
                        self.wrong.append(f"a killed function left processes: {left}")
                return "killed"
            body = '{"prompt": "This function returns", "max_tokens": 4}'
            answer = instance.exchange(
                "POST", "/v1/completions", body, {"content-type": "application/json"}, timeout_s=_ANSWER_WITHIN_S
            )
            return str(answer.status)

    def _lease(self, rng: random.Random) -> str:
        """Hold a region for a moment, read or not."""
        url, socket = self._place(rng)
        with closing(NodeClient(socket)) as client, closing(client.region(url, timeout_s=20)) as region:
            if rng.random() < 0.5:
                for name in region.wait_index(20).order:
                    region.wait_tensor(name, 20)
            time.sleep(rng.random())
        return "held"

    def _quit(self, rng: random.Random) -> str:
        """Leave in the middle of a conversation."""
        url, socket = self._place(rng)
        script = f"""
import os, signal, threading
from medusa_runtime.node.client import NodeClient
threading.Timer({rng.random() * 0.5}, os.kill, (os.getpid(), signal.SIGKILL)).start()
NodeClient({socket!r}).region({url!r})
signal.pause()
"""
        subprocess.run([sys.executable, "-c", script], check=False, stderr=subprocess.DEVNULL)
        return "left"

    def _fetch(self, rng: random.Random) -> str:
        url, socket = self._place(rng)
        words = ["fetch", url, "--node", "--node-socket", socket, *(["--fresh"] if rng.random() < 0.5 else [])]
        with Process([*medusa_command(), *words], tied=False) as process:
            if rng.random() < 0.5:
                time.sleep(rng.random() * 2)
                process.process.send_signal(rng.choice((signal.SIGINT, signal.SIGTERM, signal.SIGKILL)))
            try:
                return str(process.process.wait(_ANSWER_WITHIN_S))
            except subprocess.TimeoutExpired:
                raise MedusaError("`medusa fetch --node` hung") from None

    def _look(self, agent: Process) -> None:
        """Have the agent forget all models, and wait until it has only what it had at first."""
        status: dict[str, Any] = {}

        def is_quiet() -> bool:
            nonlocal status
            with suppress(MedusaError), closing(NodeClient(str(self._folder / "run" / "node.sock"))) as client:
                for number in range(_MODELS):
                    with suppress(MedusaError):
                        client.drop(f"{self._url}/m{number}")
                status = client.status()
                engines = status["engines"]["torch"]
                own = status["callers"] == {"user 0": {"connections": 1}}
                return bool(
                    not status["regions"]
                    and not status["used_bytes"]
                    and own
                    and engines["warm"] == 1
                    and not engines["serving"]
                )
            return False

        try:
            until(is_quiet, _QUIET_WITHIN_S, "an agent without callers")
        except MedusaError as error:
            self.wrong.append(f"{error}: {status}")
        held = footprint(agent.tree(), [self._folder / "tmp"])
        held["log MB"] = (self._folder / "node.log").stat().st_size / MB
        held["used bytes"] = float(status.get("used_bytes", -1))
        held["left bytes"] = float(status.get("left_bytes", -1))
        self.samples.append((float(sum(self.asked.values())), held))
