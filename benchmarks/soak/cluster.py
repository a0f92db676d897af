"""A cluster whose load comes and goes, with ``--faults`` while its processes, nodes and links fail. Needs root."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from medusa_cluster.lab.cluster import LabCluster
from medusa_cluster.lab.laboratory import ORIGIN, SWITCH, Laboratory
from medusa_runtime.errors import MedusaError

from benchmarks.soak.footprint import MB, footprint
from benchmarks.waiting import until

_NODES = 3
_MODELS = ("a", "b", "c")
_HELPED = "b"  # the model whose second instance helps the first one while it loads
_PORTS = (8080, 8081)
_HOLD_S = 60.0
_PATIENCE_S = 180.0  # of a client, longer than the gateway holds a request and runs it again
_BURST_S = 12.0
_WITHIN_S = 150.0
_QUIET_SHARE = 0.4  # of the bursts with faults: those after which all instances end before the next one
_ROLES = (
    "ray::NodeActor",
    "ray::Controller",
    "gcs_server",
    "raylet",
    "medusa_adapters serve",
    "medusa_adapters node",
    "prefetcher",
    "engine",
    "cluster start",
)


class Soak:
    """One cluster and its clients. ``samples``: requests so far, and the footprint then. See soak.serve."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._arguments, self._folder = arguments, folder
        self._random = random.Random(arguments.seed)
        self._lock = threading.Lock()
        self._number = 0
        self.asked: Counter[str] = Counter()
        self.killed: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.samples: list[tuple[float, dict[str, float]]] = []
        for name in _MODELS:
            shutil.copytree(arguments.model, folder / name)
        folder.chmod(0o755)

    def run(self) -> None:
        """Let load come and go for as long as asked, and look at the cluster whenever it has none."""
        end = time.monotonic() + self._arguments.seconds
        with Laboratory(_NODES, "200mbit", origin={name: self._folder / name for name in _MODELS}) as lab:
            cluster = LabCluster(lab, ["--prewarm", "torch=1", "--memory-budget", "64MB"])
            self._lab, self._cluster = lab, cluster
            cluster.start()
            self._urls = []
            for port in _PORTS:
                self._start_gateway(port)
                self._urls.append(lab.forward(0, SWITCH, port))
            for name in _MODELS:
                settings = {"threads": "1", "kv_cache_mb": "8"}
                cluster.deploy(name, min=0, max=2, live_scaling=name == _HELPED, settings=settings)
            while time.monotonic() < end:
                self._burst()
                if self._settle(wait=self._random.random() < _QUIET_SHARE or not self._arguments.faults):
                    self._sample()
            self._settle(wait=True)
            processes = {pid: line for node in (*lab.nodes, SWITCH) for pid, line in lab.processes(node).items()}
            cluster.stop()
            time.sleep(1)
            left = {
                pid: line for pid, line in processes.items() if Path(f"/proc/{pid}").exists() and "holder" not in line
            }
            if left:
                self.wrong.append(f"processes were left after SIGTERM: {left}")
            if self.wrong:
                self._keep_logs()

    def _keep_logs(self) -> None:
        kept = Path("out/soak-cluster")
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir(parents=True)
        for path in self._lab.folder.rglob("*.log"):
            shutil.copy(path, kept / "-".join(path.relative_to(self._lab.folder).parts))

    def _start_gateway(self, port: int) -> None:
        self._cluster.start_gateway(port, "--hold-s", f"{_HOLD_S:g}", "--access-log", "json")

    def _burst(self) -> None:
        """Requests for some of the models, and one for a deployment of a new name, which is removed again."""
        ending = time.monotonic() + _BURST_S
        names = self._random.sample(_MODELS, self._random.randrange(1, len(_MODELS) + 1))
        clients = [
            threading.Thread(target=self._ask_until, args=(names, ending)) for _ in range(self._arguments.clients)
        ]
        clients.append(threading.Thread(target=self._new_deployment))
        for client in clients:
            client.start()
        while self._arguments.faults and time.monotonic() < ending:
            time.sleep(self._random.uniform(0.5, 6))
            try:
                self._fault()
            except (MedusaError, OSError) as error:
                self.wrong.append(f"a fault failed: {error}")
        deadline = time.monotonic() + 2 * _PATIENCE_S
        for client in clients:
            client.join(max(0, deadline - time.monotonic()))
            if client.is_alive():
                self.wrong.append("a client has got no answer, and no end of its connection, for too long")

    def _new_deployment(self) -> None:
        self._number += 1
        name = f"new-{self._number}"
        try:
            self._cluster.call(
                "deploy", name=name, url=f"{self._lab.origin_url}/a", min=0, max=1, settings={"kv_cache_mb": "8"}
            )
            self._ask(name, self._random.randrange(2))
            self._cluster.call("remove", name=name)
        except MedusaError as error:
            if not self._arguments.faults:
                self.wrong.append(f"{name}: {error}")
            for _ in range(60):
                with suppress(MedusaError):
                    known = [model["name"] for model in self._cluster.status()["models"]]
                    if name not in known:
                        break
                    self._cluster.call("remove", name=name)
                time.sleep(2)

    def _ask_until(self, names: list[str], ending: float) -> None:
        rng = random.Random(self._random.random())
        while time.monotonic() < ending:
            self._ask(rng.choice(names), rng.randrange(len(_PORTS)), rng)
            time.sleep(0.1)

    def _ask(self, name: str, gateway: int, rng: random.Random | None = None) -> None:
        rng = rng or random.Random(0)
        kind = rng.choice(("whole", "stream", "leave", "unknown", "bad"))
        began = time.monotonic()
        body: dict[str, Any] = {
            "model": name,
            "prompt": "This function returns " * rng.choice((1, 20)),
            "max_tokens": 24,
        }
        body |= {"stream": kind in ("stream", "leave")} | ({"model": f"x{rng.random()}"} if kind == "unknown" else {})
        body |= {"temperature": "x"} if kind == "bad" else {}
        place = urlsplit(self._urls[gateway])
        link = http.client.HTTPConnection(str(place.hostname), place.port, timeout=_PATIENCE_S)
        told = ""
        try:
            link.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            response = link.getresponse()
            if kind == "leave" and response.status == 200:
                response.read1(30)
                told = "left"
            else:
                data = response.read()
                told = str(response.status)
                if kind == "stream" and response.status == 200:
                    told += " whole" if data.endswith(b"data: [DONE]\n\n") else " cut"
                    told += " error" if b'data: {"error"' in data else ""
                expected = {"unknown": (404,), "bad": (400, 503)}.get(kind, (200,))
                if response.status not in expected or "cut" in told or "error" in told:
                    told += f" {data[-400:]!r}" if not self._arguments.faults else ""
                    if not self._arguments.faults:
                        self.wrong.append(f"{kind} {name}: {told}")
                    told = told[:12]
        except TimeoutError:
            told = "timeout"
            self.wrong.append(f"{kind} {name}: no answer within {_PATIENCE_S:g} s")
        except (OSError, http.client.HTTPException) as error:
            told = type(error).__name__
            if not self._arguments.faults:
                self.wrong.append(f"{kind} {name}: {error!r} after {time.monotonic() - began:.1f} s")
        finally:
            link.close()
        with self._lock:
            self.asked[f"{kind} {told}"] += 1

    def _fault(self) -> None:
        kind = self._random.choice(("process", "process", "process", "stop", "link", "node", "gateway", "origin"))
        node = self._random.choice(self._lab.nodes)
        if kind in ("process", "stop"):
            role = self._random.choice(_ROLES)
            found = [pid for pid, line in self._lab.processes(node).items() if role in line or role == _name(pid)]
            if not found:
                return
            # Of a node server and its parent, which look after each other, only one is stopped.
            for pid in found if kind == "process" else [self._random.choice(found)]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if kind == "process" else signal.SIGSTOP)
            kind = f"{kind} {role}"
            if role == "cluster start":
                self._revive()
        elif kind == "link":
            self._lab.cut(node)
            time.sleep(self._random.uniform(0.2, 12))
            self._lab.restore(node)
        elif kind == "node":
            node = self._random.choice(self._lab.nodes[1:])
            self._lab.crash(node)
            time.sleep(self._random.uniform(0.2, 5))
            self._lab.boot(node)
            self._cluster.start_node(node)
        elif kind == "gateway":
            place = self._random.randrange(len(_PORTS))
            self._cluster.gateways[place].kill()
            self._cluster.gateways[place].wait()
            self._cluster.gateways = [each for each in self._cluster.gateways if each.poll() is None]
            self._start_gateway(_PORTS[place])
            if place == 0:
                self._cluster.gateways.reverse()
        else:
            for pid in self._lab.processes(ORIGIN):
                os.kill(pid, signal.SIGSTOP)
            time.sleep(self._random.uniform(0.2, 6))
            for pid in self._lab.processes(ORIGIN):
                os.kill(pid, signal.SIGCONT)
        self.killed[kind] += 1

    def _revive(self) -> None:
        """Start node servers again that have ended, as their supervisor would."""
        time.sleep(1)
        for node, server in self._cluster.servers.items():
            if server.poll() is not None:
                self._cluster.start_node(node)

    def _settle(self, *, wait: bool) -> bool:
        """Wait until all nodes are alive and all models answer, and with ``wait`` until there is no instance.

        Returns whether there is none, as far as was waited for.
        """
        told: Any = None

        def is_alive() -> bool:
            nonlocal told
            self._revive()
            with suppress(MedusaError):
                told = self._cluster.status()
                found = {node["name"]: node["state"] for node in told["nodes"]}
                return all(found.get(name) == "alive" for name in self._lab.nodes)
            return False

        def is_idle() -> bool:
            nonlocal told
            with suppress(MedusaError):
                told = self._cluster.status()
                instances = any(node["instances"] for node in told["nodes"])
                fetching = any(model["state"] == "fetching" for node in told["nodes"] for model in node["models"])
                return not instances and not fetching and {model["name"] for model in told["models"]} == set(_MODELS)
            return False

        try:
            until(is_alive, _WITHIN_S, "all nodes alive")
            if self._arguments.faults:
                for name in _MODELS:
                    until(lambda name=name: self._answers(name), _WITHIN_S, f"an answer of {name}")  # type: ignore[misc]
            if not wait:
                return False
            until(is_idle, _WITHIN_S, "no instance")
            lines = [line for node in self._lab.nodes for line in self._lab.processes(node).values()]
            if serving := [line for line in lines if "medusa_adapters serve" in line]:
                time.sleep(5)
                lines = [line for node in self._lab.nodes for line in self._lab.processes(node).values()]
                if serving := [line for line in lines if "medusa_adapters serve" in line]:
                    self.wrong.append(f"instances that nobody knows of: {serving}")
        except MedusaError as error:
            self.wrong.append(f"{error}: {json.dumps(told)[:6000]}")
        return wait

    def _answers(self, name: str) -> bool:
        answered = []
        for url in self._urls:
            with suppress(OSError, http.client.HTTPException):
                place = urlsplit(url)
                with contextlib.closing(
                    http.client.HTTPConnection(str(place.hostname), place.port, timeout=_HOLD_S)
                ) as link:
                    body = json.dumps({"model": name, "prompt": "This", "max_tokens": 2})
                    link.request("POST", "/v1/completions", body, {"content-type": "application/json"})
                    answered.append(link.getresponse().status)
        return answered == [200] * len(self._urls)

    def _sample(self) -> None:
        held: dict[str, float] = {}
        for node in (*self._lab.nodes, SWITCH):
            where = "head" if node == self._lab.nodes[0] else "gateway" if node == SWITCH else "node"
            for name, value in footprint(list(self._lab.processes(node))).items():
                first, _, rest = name.partition(" ")
                held[f"{first} {where} {rest}"] = held.get(f"{first} {where} {rest}", 0.0) + value
        for place, url in enumerate(self._urls):
            with suppress(OSError, http.client.HTTPException):
                address = urlsplit(url)
                with contextlib.closing(
                    http.client.HTTPConnection(str(address.hostname), address.port, timeout=20)
                ) as link:
                    link.request("GET", "/metrics")
                    held[f"metrics lines {place}"] = float(link.getresponse().read().count(b"\n"))
        with suppress(MedusaError):
            held["status KB"] = len(json.dumps(self._cluster.status())) / 1024
        held["log MB"] = sum(path.stat().st_size for path in self._lab.folder.rglob("*") if _is_log(path)) / MB
        self.samples.append((float(sum(self.asked.values())), held))


def _is_log(path: Path) -> bool:
    return path.is_file() and {".log", ".out", ".err"} & set(path.suffixes) != set()


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


__all__ = ["Soak"]
