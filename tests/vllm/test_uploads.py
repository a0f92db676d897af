"""Weights that reach a GPU by our link, before vLLM asks for them. The device is a fake driver in host memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_copies import Fake
from medusa_runtime.errors import ConfigError, WeightsError
from medusa_runtime.load.upload.cuda_link import CudaLink
from medusa_runtime.region.layout import Word
from medusa_runtime.region.reader import Region
from torch import Tensor, nn
from vllm_installed import vllm_is_installed
from waiting import until

if not vllm_is_installed():
    pytest.skip("vLLM is not installed", allow_module_level=True)

from medusa_vllm.weights import uploading

pytestmark = pytest.mark.vllm

WEIGHTS = {f"layers.{number}": torch.randn(64, 32, generator=torch.manual_seed(number)) for number in range(6)}
NAMES = list(WEIGHTS)


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The tensors that the current stream may use, in order."""
    found: list[Tensor] = []
    monkeypatch.setattr(CudaLink, "hand_over", lambda self, room: found.append(room))
    return found


def same(found: Any) -> None:
    named = dict(found)
    assert list(named) == NAMES
    for name, tensor in named.items():
        assert torch.equal(tensor, WEIGHTS[name])


def test_all_tensors_come_in_order_and_each_is_handed_over(
    filling: Callable[..., Any], link: Any, handed: list[Tensor]
) -> None:
    region = filling(WEIGHTS).complete().region
    found = list(uploading.uploaded(region, NAMES, link=link))
    same(found)
    assert [tensor.data_ptr() for tensor in handed] == [tensor.data_ptr() for _, tensor in found]


def test_the_next_ones_are_copied_while_vllm_uses_one(
    filling: Callable[..., Any], link: Any, fake: Fake, handed: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = WEIGHTS[NAMES[0]].nbytes
    monkeypatch.setattr(uploading, "_AHEAD_BYTES", 2 * size + 1)
    region = filling(WEIGHTS).complete().region
    coming = uploading.uploaded(region, NAMES, link=link)
    next(coming)
    fake.locked.fake_await(3)  # without being asked for, but no more of them
    assert fake.calls.fake_begun() == 3
    same([(NAMES[0], WEIGHTS[NAMES[0]]), *coming])


def test_a_tensor_is_used_while_the_next_one_has_not_come(
    filling: Callable[..., Any], link: Any, handed: list[Tensor]
) -> None:
    filled = filling(WEIGHTS).lay_out()
    filled.arrive(NAMES[0])
    coming = uploading.uploaded(filled.region, NAMES, link=link)
    first = next(coming)
    filled.complete()
    same([first, *coming])


def test_a_full_device_gets_the_regions_own_tensors(
    filling: Callable[..., Any], link: Any, fake: Fake, handed: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    region, empty, asked = filling(WEIGHTS).complete().region, torch.empty, []

    def on_device(*arguments: Any, **options: Any) -> Tensor:
        asked.append(arguments)
        if len(asked) in (2, 3):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 KiB.")
        return empty(*arguments, **options)

    monkeypatch.setattr(torch, "empty", on_device)
    same(uploading.uploaded(region, NAMES, link=link))
    assert len(handed) == fake.calls.fake_begun() == len(NAMES) - 2


def arrived(filling: Callable[..., Any]) -> Any:
    """A region in which all that vLLM takes is there, and which is not sealed, as with `--host-weights release`."""
    filled = filling(WEIGHTS | {"vision": torch.ones(64, 64)}).lay_out()
    filled.arrive(*WEIGHTS)
    return filled


def test_the_hosts_bytes_are_released_once_the_device_has_them(
    filling: Callable[..., Any], link: Any, handed: list[Tensor]
) -> None:
    filled = arrived(filling)
    same(uploading.uploaded(filled.region, NAMES, link=link, release=True))
    filled.arrive("vision")
    released = sum(weight.nbytes for weight in WEIGHTS.values()) + 64 * 64 * 4
    until(lambda: filled.region._words()[Word.RELEASED_BYTES] == released)  # a fetch waits for none of them
    later = Region(os.dup(filled.region.fd))
    try:
        assert not any(bytes(later.shard(0)) + bytes(later.shard(len(WEIGHTS))))
        with pytest.raises(WeightsError, match="--host-weights release"):
            later.check_whole()
    finally:
        later.close()


def test_a_full_device_gets_copies_of_what_is_released(
    filling: Callable[..., Any], link: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = arrived(filling)
    monkeypatch.setattr(CudaLink, "room_for", lambda self, source: None)
    same(list(uploading.uploaded(filled.region, NAMES, link=link, release=True)))
    assert not any(bytes(filled.region.shard(0)))


@pytest.mark.parametrize(
    ("on_gpu", "releases", "refused"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_what_cannot_be_released_is_refused(
    filling: Callable[..., Any], on_gpu: bool, releases: bool, refused: bool
) -> None:
    """Several GPUs, say. A fetch would wait for memory that nobody frees."""
    weights = [SimpleNamespace(device=torch.device("cuda" if on_gpu else "cpu"), is_cuda=on_gpu)]
    model: nn.Module = SimpleNamespace(parameters=lambda: iter(weights))  # type: ignore[assignment]
    attached: Any = SimpleNamespace(region=filling(WEIGHTS).complete().region, releases=releases)
    asleep = SimpleNamespace(enable_sleep_mode=True)
    expected = pytest.raises(ConfigError, match="use --host-weights keep") if on_gpu and releases else nullcontext()
    with expected, uploading.arriving(attached, model, asleep) as found:
        same(found(NAMES))


def test_a_draft_does_not_read_what_was_released(
    filling: Callable[..., Any], link: Any, handed: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers for multi-token prediction are in the model's checkpoint. The draft would have got zeros."""
    monkeypatch.setattr(uploading, "link_to", lambda *_: nullcontext(link))
    attached: Any = SimpleNamespace(region=arrived(filling).region, releases=True, was_uploaded=False)
    model: Any = None
    with uploading.arriving(attached, model, None) as found:
        same(found(NAMES))
    again = pytest.raises(ConfigError, match=r"a draft reads it again .* use --host-weights keep")
    with again, uploading.arriving(attached, model, None):
        pass


def test_an_abandoned_load_leaves_no_copies(filling: Callable[..., Any], fake: Fake, handed: list[Tensor]) -> None:
    region = filling(WEIGHTS).complete().region
    with fake.link() as link:
        next(uploading.uploaded(region, NAMES, link=link))
    assert fake.calls.fake_pinned() == fake.calls.fake_handles() == 0


@pytest.mark.parametrize(
    ("devices", "sleeps", "ranks", "opens"),
    [
        (("cuda", "cuda"), False, 1, True),
        (("cuda", "cpu"), False, 1, False),
        (("cuda", "meta"), False, 1, False),
        (("cpu",), False, 1, False),
        (("cuda",), True, 1, False),
        (("cuda",), False, 2, False),
    ],
)
def test_a_link_is_opened_to_the_gpu_that_has_all_weights(
    devices: tuple[str, ...], sleeps: bool, ranks: int, opens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = [SimpleNamespace(device=torch.device(device, 0) if device == "cuda" else device) for device in devices]
    for parameter in parameters:
        parameter.device = torch.device(parameter.device)
    model: nn.Module = SimpleNamespace(parameters=lambda: iter(parameters))  # type: ignore[assignment]
    steps: list[str] = []
    made = SimpleNamespace(close=lambda: steps.append("closed"))
    monkeypatch.setattr(uploading, "CudaLink", lambda device: steps.append(str(device)) or made)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: steps.append("emptied"))
    monkeypatch.setattr(uploading, "get_tensor_model_parallel_world_size", lambda: ranks)
    with uploading.link_to(model, SimpleNamespace(enable_sleep_mode=sleeps)) as link:
        assert (link is made) == opens
    assert steps == (["cuda:0", "closed", "emptied"] if opens else [])
