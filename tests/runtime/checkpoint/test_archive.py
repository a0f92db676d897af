"""PyTorch's own files, written by torch: the same tensors as torch.load gives, and nothing in a pickle ever runs."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fetching import fetch_into
from medusa_runtime.checkpoint.reader import open_checkpoint
from medusa_runtime.errors import CorruptError, ObjectNotFoundError
from medusa_runtime.load.views import Views
from medusa_runtime.region.reader import Region
from torch import nn

SHARED = torch.arange(60.0)
TENSORS = {
    "layers.0.w": torch.randn(300, 7),
    "layers.0.half": torch.randn(5).half(),
    "layers.1.bf": torch.randn(3, 3).bfloat16(),
    "layers.1.f8": torch.randn(4, 4).to(torch.float8_e4m3fn),
    "ids": torch.arange(9).view(3, 3),
    "flag": torch.tensor([True, False]),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "u16": torch.arange(5).to(torch.uint16),
    "front": SHARED[:20],
    "back": SHARED[20:].view(5, 8),
    "turned": torch.randn(4, 6).t(),
    "last_channel": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    "expanded": torch.randn(3, 1).expand(3, 5),
    "parameter": nn.Parameter(torch.randn(2, 2)),
}


def loaded(url: str) -> dict[str, torch.Tensor]:
    region = Region.create()
    try:
        fetch_into(region, url)
        index = region.wait_index()
        views = Views(region)
        assert region.progress().fetched_bytes == region.progress().total_bytes
        return {name: views.tensor(name, entry).clone() for name, entry in index.tensors.items()}
    finally:
        region.close()


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert found[name].float().equal(tensor.detach().float()), name


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: {"epoch": 3, "state_dict": t, "args": [1, "x"]}])
def test_a_local_file_has_what_torch_wrote(tmp_path: Path, wrap: Callable[..., Any]) -> None:
    torch.save(wrap(TENSORS), tmp_path / "model.pt")
    same(loaded(str(tmp_path / "model.pt")), TENSORS)


def test_a_modules_state_dict_in_a_folder_over_http(origin: Any) -> None:
    module = nn.Sequential(nn.Linear(500, 900), nn.BatchNorm1d(900))
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    origin.put("/m/pytorch_model.bin", buffer.getvalue())
    same(loaded(origin.url + "/m"), dict(module.state_dict()))


def test_records_packed_by_another_tool_are_found(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as old, zipfile.ZipFile(tmp_path / "b.pt", "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    same(loaded(str(tmp_path / "b.pt")), TENSORS)


class Exploit:
    def __reduce__(self) -> Any:
        return os.mkdir, ("pwned",)


def test_code_in_the_pickle_is_refused_and_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.zeros(2), "x": Exploit()}, "m.pt")
    with pytest.raises(CorruptError, match=r"posix.mkdir, which is code and is never run"):
        open_checkpoint(str(tmp_path / "m.pt"))
    assert not Path("pwned").exists()
    torch.save(nn.Linear(2, 2), "whole.pt")
    with pytest.raises(CorruptError, match="state_dict"):
        open_checkpoint(str(tmp_path / "whole.pt"))


def _compressed(path: Path) -> None:
    torch.save(TENSORS, path)
    with zipfile.ZipFile(path) as old:
        records = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name, data in records.items():
            new.writestr(name, data)


def _cut(path: Path) -> None:
    torch.save(TENSORS, path)
    path.write_bytes(path.read_bytes()[:-500])


def _without_record(path: Path) -> None:
    torch.save(TENSORS, path)
    with zipfile.ZipFile(path) as old:
        records = {name: old.read(name) for name in old.namelist() if not name.endswith("data/0")}
    with zipfile.ZipFile(path, "w") as new:
        for name, data in records.items():
            new.writestr(name, data)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: torch.save(TENSORS, path, _use_new_zipfile_serialization=False), "before 1.6"),
        (_compressed, "is compressed, expected it stored"),
        (_cut, "truncated"),
        (_without_record, "data/0, which is missing"),
        (lambda path: path.write_bytes(b"GIF89a" * 100), "not a PyTorch checkpoint"),
        (lambda path: zipfile.ZipFile(path, "w").close(), "not a PyTorch checkpoint"),
        (lambda path: torch.save([1, 2], path), "found list"),
        (lambda path: torch.save({"w": torch.eye(2).to_sparse()}, path), "a tensor of torch._utils._rebuild_sparse"),
        (
            lambda path: torch.save({"w": torch.eye(2).to(torch.complex128)}, path),
            "ComplexDoubleStorage; expected dense ones of",
        ),
        (lambda path: torch.save({"epoch": 1}, path), "found dict with epoch"),
    ],
)
def test_what_cannot_be_streamed_says_why(tmp_path: Path, write: Callable[[Path], Any], message: str) -> None:
    write(tmp_path / "m.pth")
    with pytest.raises(CorruptError, match=message):
        open_checkpoint(str(tmp_path / "m.pth"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFoundError, match=r"m\.pt"):
        open_checkpoint(str(tmp_path / "m.pt"))


def sharded(folder: Path, **shards: dict[str, torch.Tensor]) -> None:
    """As transformers wrote large models before safetensors."""
    for name, tensors in shards.items():
        torch.save(tensors, folder / f"{name}.bin")
    places = {tensor: f"{name}.bin" for name, tensors in shards.items() for tensor in tensors}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))


def test_shards_that_an_index_names(tmp_path: Path) -> None:
    one = {name: TENSORS[name] for name in ("layers.0.w", "turned", "front", "scalar")}
    two = {name: tensor for name, tensor in TENSORS.items() if name not in one}
    sharded(tmp_path, one=one, two=two)
    same(loaded(str(tmp_path)), TENSORS)
    checkpoint = open_checkpoint(str(tmp_path))
    assert [shard.name for shard in checkpoint.index.shards] == ["one.bin", "two.bin"]


def test_shards_over_http(origin: Any, tmp_path: Path) -> None:
    sharded(tmp_path, one={"a": torch.arange(9.0)}, two={"b": torch.randn(700, 700)})
    for file in tmp_path.iterdir():
        origin.put(f"/m/{file.name}", file.read_bytes())
    found = loaded(origin.url + "/m")
    assert torch.equal(found["a"], torch.arange(9.0))
    assert torch.equal(found["b"], torch.load(tmp_path / "two.bin")["b"])


def test_shards_that_contradict_their_index(tmp_path: Path) -> None:
    sharded(tmp_path, one={"a": torch.zeros(2)}, two={"b": torch.zeros(2)})
    (tmp_path / "two.bin").unlink()
    with pytest.raises(ObjectNotFoundError, match=r"pytorch_model\.bin\.index\.json names the shard two\.bin"):
        open_checkpoint(str(tmp_path))
    torch.save({"c": torch.zeros(2)}, tmp_path / "two.bin")
    with pytest.raises(CorruptError, match=r"tensor 'b' is in two\.bin, found it in none"):
        open_checkpoint(str(tmp_path))
    for names in ({"a": "../one.bin"}, {"a": "one.safetensors"}, {}):
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
        with pytest.raises(CorruptError, match=r"pytorch_model\.bin\.index\.json"):
            open_checkpoint(str(tmp_path))
