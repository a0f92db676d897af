"""hf:// as docs/storage.md describes it, against a hub on loopback that answers as the Hub does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import HubServer
from medusa_adapters.trial import Trial
from medusa_runtime.checkpoint.reader import open_checkpoint
from medusa_runtime.errors import (
    ConfigError,
    ForbiddenError,
    ObjectChangedError,
    ObjectNotFoundError,
    StorageError,
    UnreachableError,
)
from medusa_runtime.storage.base import open_store
from medusa_runtime.storage.hub import HubStore
from medusa_runtime.storage.retry import RetryPolicy

Open = Callable[..., HubStore]
EXAMPLE = Path(__file__).parents[3] / "examples" / "pydoc-lm"
MODEL, TOKEN = "org/tiny", "hf_secret"
QUICK = RetryPolicy(attempts=1, unreachable_attempts=1)


@pytest.fixture
def hub() -> Iterator[HubServer]:
    files = {file.name: file.read_bytes() for file in EXAMPLE.iterdir() if file.is_file()}
    with HubServer(MODEL, TOKEN, files) as server:
        server.branches["v1.0"] = server.branches["refs/pr/7"] = server.branches["main"]
        yield server


@pytest.fixture
def open_hub(hub: HubServer) -> Iterator[Open]:
    opened: list[HubStore] = []

    def open_hub(url: str = f"hf://{MODEL}", **environ: str) -> HubStore:
        opened.append(HubStore(url, QUICK, {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN} | environ))
        return opened[-1]

    yield open_hub
    for store in opened:
        store.close()


def read(store: HubStore, key: str) -> bytes:
    info = store.stat(key)
    buffer = bytearray(info.size)
    with memoryview(buffer) as view:
        store.read_into(key, 0, view, info.version)
    return bytes(buffer)


def test_files_and_weights_come_from_where_the_hub_redirects_to(hub: HubServer, open_hub: Open) -> None:
    store = open_hub()
    for file in ("config.json", "model.safetensors"):
        assert read(store, file) == (EXAMPLE / file).read_bytes()
    assert hub.strangers == [], "the token goes to the hub alone"
    with pytest.raises(ObjectNotFoundError, match="hf://org/tiny/nothing: no such object"):
        store.stat("nothing")


def test_a_gguf_file_of_a_model(hub: HubServer, open_hub: Open, tmp_path: Path) -> None:
    from gguf_files import write_gguf

    first = write_gguf(EXAMPLE, tmp_path / "q8.gguf", "Q8_0", parts=2)
    hub.push("main", {f"Q8/{part.name}": part.read_bytes() for part in first.parent.iterdir()})
    found = open_checkpoint(f"hf://{MODEL}/Q8/{first.name}", store=open_hub(f"hf://{MODEL}/Q8"))
    assert [shard.name for shard in found.index.shards] == ["q8-00001-of-00002.gguf", "q8-00002-of-00002.gguf"]
    assert found.index.tensors["model.embed_tokens.weight"].dtype == "Q8_0"
    assert set(found.files) == {"config.json"}


def test_all_files_are_of_the_commit_of_the_first_answer(hub: HubServer, open_hub: Open) -> None:
    store, old = open_hub(), hub.branches["main"]
    size = store.stat("config.json").size
    hub.push("main", {"config.json": b"{}", "model.safetensors": b"new"})
    assert read(store, "model.safetensors") == (EXAMPLE / "model.safetensors").read_bytes()
    assert store.stat("config.json").size == size
    assert (hub.asked["main"], hub.asked[old]) == (1, 1), "the address of the first file is kept"
    assert read(open_hub(), "model.safetensors") == b"new"


def test_two_first_answers_of_different_commits_are_a_change(hub: HubServer, open_hub: Open) -> None:
    store = open_hub()
    store.stat("config.json")
    store._revision = hub.push("main", {"config.json": b"{}"})  # as if another thread's answer had been the first
    with pytest.raises(ObjectChangedError, match="expected commit"):
        store.notice("config.json", _response({"x-repo-commit": "0" * 40}))


def _response(headers: dict[str, str]) -> Any:
    from medusa_runtime.storage.http.wire import Response

    return Response(200, headers, 0)


@pytest.mark.parametrize(
    ("revision", "asked"),
    [("", "main"), ("@v1.0", "v1.0"), ("@refs/pr/7", "refs/pr/7"), ("@refs%2Fpr%2F7", "refs/pr/7")],
)
def test_revisions(hub: HubServer, open_hub: Open, revision: str, asked: str) -> None:
    store = open_hub(f"hf://{MODEL}{revision}")
    assert read(store, "config.json") == (EXAMPLE / "config.json").read_bytes()
    assert list(hub.asked) == [asked]


def test_an_address_that_has_expired_is_asked_for_again(hub: HubServer, open_hub: Open) -> None:
    store = open_hub()
    info = store.stat("model.safetensors")
    hub.signature += 1
    assert store.read("model.safetensors", 0, 10, info.version)[0] == (EXAMPLE / "model.safetensors").read_bytes()[:10]


def test_what_is_missing_or_denied_is_said(hub: HubServer, open_hub: Open, tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFoundError, match=r"no such model or revision \(404\)"):
        open_checkpoint(f"hf://{MODEL}@v9", store=open_hub(f"hf://{MODEL}@v9"))
    nobody = {"HF_TOKEN": "", "HF_HOME": str(tmp_path)}
    with pytest.raises(ForbiddenError, match=r"a private or gated one, which needs a token .*HF_TOKEN is not set"):
        open_hub(**nobody).stat("config.json")
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    assert open_hub(**nobody).stat("config.json").size
    with pytest.raises(ForbiddenError):
        open_hub(**nobody, HF_HUB_DISABLE_IMPLICIT_TOKEN="1").stat("config.json")
    hub.gated = True
    with pytest.raises(ForbiddenError, match="accept its terms on the Hub"):
        open_hub().stat("config.json")
    with pytest.raises(UnreachableError, match="HF_HUB_OFFLINE is set"):
        open_hub(HF_HUB_OFFLINE="1").stat("config.json")


def test_a_token_that_has_expired_is_named(open_hub: Open, tmp_path: Path) -> None:
    """The Hub refuses it for public models, too, which need none."""
    with pytest.raises(ForbiddenError, match=r"does not accept the token in HF_TOKEN .Invalid credentials in Auth"):
        open_hub(HF_TOKEN="hf_old").stat("config.json")
    (tmp_path / "token").write_text("hf_older")
    with pytest.raises(ForbiddenError, match=r"does not accept the token in \S*/token .*a public model needs none"):
        open_hub(HF_TOKEN="", HF_HOME=str(tmp_path)).stat("config.json")


def test_a_limit_says_when_it_ends(hub: HubServer, open_hub: Open, tmp_path: Path) -> None:
    hub.limit = '"resolvers";r=0;t=217'
    with pytest.raises(StorageError, match=r"answers 429 \(tried once; the server asks to wait 217 s\)"):
        open_hub().stat("config.json")
    with pytest.raises(StorageError, match=r"answers 429; it allows more to requests with a token \(HF_TOKEN\)"):
        open_hub(HF_TOKEN="", HF_HOME=str(tmp_path)).stat("config.json")


@pytest.mark.parametrize("place", ["", "/", "/tree/main", "/blob/main", "?library=transformers"])
def test_the_address_of_a_models_page_is_not_taken_for_a_folder(place: str) -> None:
    with pytest.raises(ConfigError, match=r"expected hf://org/name"):
        open_store(f"https://huggingface.co/org/name{place}")
    store = open_store("https://huggingface.co/org/name/resolve/main")
    store.close()


def test_bad_addresses_and_tokens_are_refused() -> None:
    for url in ("hf://gpt2", "hf://", "hf://org/", "hf:///name", "hf://org/na me", "hf://org/name@"):
        with pytest.raises(ConfigError, match="expected hf://org/name"):
            open_store(url)
    with pytest.raises(ConfigError, match="expected a token in one line"):
        HubStore("hf://org/name", environ={"HF_TOKEN": "hf_a\nX-Other: b"})
    with pytest.raises(ConfigError, match=r"HF_ENDPOINT='hub\.example' cannot be used"):
        HubStore("hf://org/name", environ={"HF_ENDPOINT": "user:secret@hub.example"})


def test_a_folder_of_a_repository(hub: HubServer, open_hub: Open) -> None:
    hub.push("main", {"onnx/my model/config.json": b"{}"})
    store = open_hub(f"hf://{MODEL}/onnx/my model")
    assert read(store, "config.json") == b"{}"


def test_an_agent_for_others_follows_the_hubs_redirects(hub: HubServer, open_hub: Open) -> None:
    store = open_hub()
    store.limit_redirects(lambda url: False)
    assert store.stat("model.safetensors").size


def test_the_hubs_own_client_reads_the_same(hub: HubServer, tmp_path: Path) -> None:
    """So the hub of these tests is one."""
    pytest.importorskip("huggingface_hub")
    code = "import sys, huggingface_hub as h; print(h.hf_hub_download(sys.argv[1], sys.argv[2]))"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environ = clean | {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path)}
    for file in ("config.json", "model.safetensors"):
        command = [sys.executable, "-c", code, MODEL, file]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=True)
        assert Path(done.stdout.strip()).read_bytes() == (EXAMPLE / file).read_bytes()


def test_a_model_is_fetched_with_a_command(hub: HubServer, tmp_path: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "MEDUSA_"))}
    command = [sys.executable, "-m", "medusa_adapters.cli.main", "fetch", f"hf://{MODEL}", "--to", str(tmp_path / "to")]
    environ = clean | {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        assert (tmp_path / "to" / file).read_bytes() == (EXAMPLE / file).read_bytes()


def test_a_model_is_served_from_the_hub(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with Trial("--model", f"hf://{MODEL}") as function:
        answer = function.post("/v1/completions", '{"prompt": "This", "max_tokens": 2}')
    assert answer.status == 200
    assert answer.json["usage"]["completion_tokens"] == 2
