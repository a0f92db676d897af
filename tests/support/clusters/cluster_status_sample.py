"""A cluster's status with something of everything, for the tests of the page about it."""

from __future__ import annotations

from typing import Any

AT = 1_800_000_000.0
QWEN, PYDOC, LLAMA = "s3://models/qwen2.5-7b-instruct", "https://store.example/pydoc-lm", "s3://models/llama-1.6g"


def status() -> dict[str, Any]:
    nodes = [_node(number) for number in range(1, 9)]
    nodes[6] |= {"state": "draining"}
    nodes[7] |= {"state": "lost", "models": [], "instances": [], "egress_bytes_per_s": 0, "ingress_bytes_per_s": 0}
    return {
        "at": AT,
        "nodes": nodes,
        "models": [
            _model("qwen", QWEN, "vllm", 2, 8, instances=3, starting=2, running=41, waiting=7, tokens_per_s=1240.0)
            | {"copies": ["n1", "n2", "n3"], "ttft_slo_s": 0.45, "tpot_slo_s": 0.15},
            _model("pydoc-lm", PYDOC, "torch", 0, 4, instances=2, starting=0, running=3, waiting=0, tokens_per_s=96.4)
            | {"copies": ["n2", "n5"]},
            _model("llama", LLAMA, "torch", 0, 8, instances=0, starting=0, running=0, waiting=0, tokens_per_s=0.0)
            | {"copies": ["n6"]},
        ],
        "transfers": [
            _transfer("store", "n3", LLAMA, 0.93, 50.1e6),
            _transfer("n3", "n4", QWEN, 0.62, 49.8e6),
            _transfer("n4", "n5", QWEN, 0.58, 49.7e6),
            _transfer("n5", "n6", QWEN, 0.05, 0.0),
        ],
        "chains": [{"url": QWEN, "nodes": ["n3", "n4", "n5", "n6"]}],
        "gateways": [
            {"name": "gw-1", "url": "http://gw-1:8080", "seen": AT - 0.1},
            {"name": "gw-2", "url": "http://gw-2:8080", "seen": AT - 42},
        ],
        "events": [
            _event(840, "deployed", "qwen", None, f"qwen is deployed from {QWEN}"),
            _event(835, "fetch", None, "n1", f"n1 fetches {QWEN} from the store"),
            _event(800, "scale-up", "qwen", "n1", "qwen-1 starts on n1: 12 requests wait"),
            _event(610, "deployed", "pydoc-lm", None, "pydoc-lm is deployed"),
            _event(600, "scale-up", "pydoc-lm", "n2", "pydoc-lm-1 starts on n2"),
            _event(400, "scale-down", "llama", "n6", "llama-4 ends: spare for 0.5 s"),
            _event(120, "node-lost", None, "n8", "the node n8 is lost, with 2 instances"),
            _event(119, "scale-up", "qwen", "n2", "qwen-2 starts on n2: an instance was lost"),
            _event(60, "draining", None, "n7", "the node n7 drains"),
            _event(9, "scale-up", "qwen", "n4", "qwen-4 starts on n4: 1240 tokens/s are above the bound of 1100"),
            _event(8, "start-failed", "qwen", "n7", "qwen-9: no memory on n7"),
            _event(2, "fetch", None, "n4", f"n4 fetches {QWEN} from n3"),
        ],
    }


def _node(number: int) -> dict[str, Any]:
    copies = [_copy(PYDOC, 1.0, 57e6)] if number in (2, 5) else []
    copies += [_copy(QWEN, 1.0, 15.2e9)] if number <= 3 else [_copy(QWEN, 0.6, 15.2e9)] if number in (4, 5) else []
    instances = [_instance("qwen", number, "ready")] if number <= 3 else []
    instances += [_instance("qwen", number, "starting")] if number in (4, 5) else []
    instances += [_instance("pydoc-lm", number, "ready")] if number in (2, 5) else []
    return {
        "name": f"n{number}",
        "address": f"10.0.0.{number}:8114",
        "state": "alive",
        "link_bytes_per_s": 50e6,
        "egress_bytes_per_s": 49.8e6 if number in (3, 4) else 2.1e6,
        "ingress_bytes_per_s": 49.7e6 if number in (4, 5) else 0.6e6,
        "memory_bytes": 64e9,
        "memory_used_bytes": (18 + 4 * number) * 1e9,
        "devices": 0,
        "models": copies,
        "instances": instances,
    }


def _copy(url: str, part: float, total: float) -> dict[str, Any]:
    state = "done" if part == 1 else "fetching"
    return {
        "url": url,
        "version": "1",
        "state": state,
        "fetched_bytes": part * total,
        "total_bytes": total,
        "pinned": True,
    }


def _instance(model: str, number: int, state: str) -> dict[str, Any]:
    return {"id": f"{model}-{number}", "model": model, "state": state, "since": AT - 30 * number, "running": 0}


def _model(name: str, url: str, engine: str, least: int, most: int, **more: Any) -> dict[str, Any]:
    found = {"name": name, "url": url, "engine": engine, "min": least, "max": most, "wanted": more["instances"]}
    return found | {"ttft_slo_s": None, "tpot_slo_s": None} | more


def _transfer(source: str, target: str, url: str, part: float, rate: float) -> dict[str, Any]:
    total = 15.2e9
    left = (1 - part) * total / rate if rate else None
    return {
        "url": url, "from": source, "to": target, "done_bytes": part * total, "total_bytes": total,
        "bytes_per_s": rate, "remaining_s": left,
    }  # fmt: skip


def _event(ago: float, kind: str, model: str | None, node: str | None, text: str) -> dict[str, Any]:
    return {"at": AT - ago, "kind": kind, "model": model, "node": node, "text": text}
