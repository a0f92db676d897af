"""From the region into a device's memory, over a link that a test holds back: order, places, fusing, faults."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from medusa_runtime.errors import DeviceError, WeightsError
from medusa_runtime.load.applier import Applier
from medusa_runtime.load.gate import bypass_gates
from medusa_runtime.load.loader import Loader
from medusa_runtime.load.skeleton import skeleton
from medusa_runtime.load.upload import uploads
from medusa_runtime.load.upload.link import ALIGNMENT
from medusa_runtime.region.reader import Region
from torch import Tensor, nn
from waiting import until

Fill = Callable[..., Any]
IDS = torch.tensor([1, 7, 3])


class HeldCopy:
    def __init__(self, link: HostLink, target: Tensor, source: Tensor, urgent: bool) -> None:
        self.link, self.target, self.source, self.urgent = link, target, source, urgent
        self.is_done = False

    def done(self) -> bool:
        if self.link.failing == "done":
            raise DeviceError("the copy failed")
        if not self.is_done and self.link.open.is_set():
            self.target.copy_(self.source)
            self.is_done = True
        return self.is_done


class HostLink:
    """A device in host memory. Nothing arrives there while ``open`` is not set."""

    def __init__(self, *, is_open: bool = True, failing: str = "") -> None:
        self.open = threading.Event()
        if is_open:
            self.open.set()
        self.failing = failing
        self.copies: list[HeldCopy] = []
        self.most_running_bytes = 0
        self.closed = self.stored = 0

    def allocate(self, name: str, size_bytes: int) -> Tensor:
        if self.failing == "memory":
            raise DeviceError(f"expected {size_bytes} bytes for the {name}")
        return torch.full((size_bytes,), 0xEE, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor, *, urgent: bool, stored: Any = None) -> HeldCopy:
        if self.failing == "copy":
            raise DeviceError("no copy")
        if stored is not None:
            file = os.pread(stored.file.fileno(), source.nbytes, stored.offset)
            assert file == source.contiguous().view(torch.uint8).numpy().tobytes()
            self.stored += 1
        self.copies.append(HeldCopy(self, target, source, urgent))
        running = sum(copy.target.nbytes for copy in self.copies if not copy.is_done)
        self.most_running_bytes = max(self.most_running_bytes, running)
        return self.copies[-1]

    def close(self) -> None:
        self.closed += 1


class Layer(nn.Module):
    FUSED = (("q", "k", "v"),)

    def __init__(self) -> None:
        super().__init__()
        self.k = nn.Linear(8, 4)  # constructed, and in the file, in another order than they are fused
        self.q = nn.Linear(8, 8)
        self.v = nn.Linear(8, 4)
        self.out = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.as_tensor(self.out(self.q(x) + self.k(x).repeat(1, 2) * self.v(x).repeat(1, 2)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(600, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(8, 600, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return torch.as_tensor(self.head(hidden))


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def state(net: Net) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in net.state_dict().items() if name != "head.weight"}


def empty_net() -> Net:
    with skeleton():
        return Net().eval()


def load(filled: Any, module: nn.Module, link: HostLink, **options: Any) -> Loader:
    return Loader(filled.region, Applier(module, dtype=torch.float32), link=link, **options)


def test_all_of_it_arrives_in_execution_order_in_one_slab(filling: Fill, net: Net) -> None:
    module, link = empty_net(), HostLink()
    filled = filling(state(net)).complete()
    with load(filled, module, link) as loader:
        loader.wait()
        assert link.closed == 1, "staging memory is not kept while the engine runs"
        assert link.stored == len(link.copies), "the link may read every tensor from the region's file"
        slab, layout = loader.wait_slab()
    torch.testing.assert_close(module(IDS), net(IDS), rtol=0, atol=0)
    sent = [copy.target.data_ptr() - slab.data_ptr() for copy in link.copies]
    assert sent == [layout.slots[name].offset for name in filled.index.order]
    first, last = slab.data_ptr(), slab.data_ptr() + slab.nbytes
    assert all(first <= tensor.data_ptr() <= last - tensor.nbytes for tensor in module.parameters())
    assert module.head.weight is module.embed.weight


def test_what_is_multiplied_at_once_lies_side_by_side(filling: Fill, net: Net) -> None:
    module = empty_net()
    with load(filling(state(net)).complete(), module, HostLink()) as loader:
        loader.wait()
    for layer, expected in zip(module.layers, net.layers, strict=True):
        for attribute in ("weight", "bias"):
            parts = [getattr(expected.get_submodule(name), attribute) for name in "qkv"]
            rows = sum(len(part) for part in parts)
            q = getattr(layer.q, attribute)
            fused = q.as_strided((rows, *q.shape[1:]), q.stride())
            torch.testing.assert_close(fused, torch.cat(parts), rtol=0, atol=0)


def test_slots_are_aligned_and_do_not_overlap(filling: Fill, net: Net) -> None:
    with load(filling(state(net)).complete(), empty_net(), HostLink()) as loader:
        layout = loader.wait_slab().layout
    slots = sorted(layout.slots.values())
    assert all(slot.offset + slot.size_bytes <= later.offset for slot, later in itertools.pairwise(slots))
    assert slots[-1].offset + slots[-1].size_bytes <= layout.size_bytes
    assert all(slot.offset % 16 == 0 for slot in slots)
    assert layout.slots["layers.1.q.weight"].offset % ALIGNMENT == 0


def test_a_forward_waits_for_the_device_and_not_for_the_host(filling: Fill, net: Net) -> None:
    module, link = empty_net(), HostLink(is_open=False)
    filled = filling(state(net)).complete()
    results: list[Tensor] = []
    with load(filled, module, link) as loader:
        loader.wait_placed()
        assert not module.embed.weight.is_meta, "it has its place before its bytes"
        forward = threading.Thread(target=lambda: results.append(module(IDS)), daemon=True)
        forward.start()
        until(lambda: len(link.copies) == len(filled.index.order))
        forward.join(0.05)
        assert not results
        link.open.set()
        forward.join(60)
        loader.wait()
    torch.testing.assert_close(results[0], net(IDS), rtol=0, atol=0)


def test_whoever_needs_only_addresses_passes(filling: Fill, net: Net) -> None:
    module, link = empty_net(), HostLink(is_open=False)
    with load(filling(state(net)).complete(), module, link) as loader:
        loader.wait_placed()
        with bypass_gates():
            garbage = module(IDS)
        link.open.set()
        loader.wait()
        assert garbage.shape == (3, 600)
        torch.testing.assert_close(module(IDS), net(IDS), rtol=0, atol=0)


def test_what_a_forward_waits_for_is_urgent(filling: Fill, net: Net) -> None:
    module, link = empty_net(), HostLink()
    filled = filling(state(net)).lay_out()
    with load(filled, module, link) as loader:
        loader.wait_placed()
        filled.arrive("layers.2.out.weight")
        until(lambda: len(link.copies) == 1)
        forward = threading.Thread(target=module, args=(IDS,), daemon=True)
        forward.start()
        until(lambda: any(gate.name == "embed" for gate in loader._backlog.demanding))
        filled.arrive(*(name for name in filled.index.order if name != "layers.2.out.weight"))
        filled.writer.finish()
        forward.join(60)
        loader.wait()
    urgent = {copy.target.data_ptr(): copy.urgent for copy in link.copies}
    assert urgent[module.embed.weight.data_ptr()]
    assert not urgent[module.layers[2].out.weight.data_ptr()]


def test_bytes_of_another_type_are_converted(filling: Fill, net: Net) -> None:
    narrow = {name: tensor.to(torch.bfloat16) for name, tensor in state(net).items()}
    module = empty_net()
    with load(filling(narrow).complete(), module, HostLink()) as loader:
        loader.wait()
    torch.testing.assert_close(module.embed.weight.detach(), narrow["embed.weight"].float(), rtol=0, atol=0)


def test_no_more_than_a_window_is_on_its_way(filling: Fill, net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 300
    monkeypatch.setattr(uploads, "_IN_FLIGHT_BYTES", limit)
    module, link = empty_net(), HostLink()
    with load(filling(state(net)).complete(), module, link) as loader:
        loader.wait()
    assert link.most_running_bytes < limit + max(tensor.nbytes for tensor in net.parameters())
    torch.testing.assert_close(module(IDS), net(IDS), rtol=0, atol=0)


def test_the_window_is_of_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "_IN_FLIGHT_BYTES", 30)
    running = uploads.Uploads(HostLink(is_open=False))
    running.begin("wide", torch.zeros(10, dtype=torch.bfloat16), torch.zeros(10, dtype=torch.float32), urgent=False)
    assert not running.has_room, "40 bytes are held for a target of 20"


@pytest.mark.parametrize("failing", ["memory", "copy", "done"])
def test_a_device_that_fails_is_told_to_all_who_wait(filling: Fill, net: Net, failing: str) -> None:
    module = empty_net()
    with load(filling(state(net)).complete(), module, HostLink(failing=failing)) as loader:
        with pytest.raises(DeviceError):
            module(IDS)
        with pytest.raises(DeviceError):
            loader.wait()
        if failing == "memory":
            with pytest.raises(DeviceError):
                loader.wait_placed()


def test_closing_ends_an_upload(filling: Fill, net: Net) -> None:
    link = HostLink(is_open=False)
    loader = load(filling(state(net)).complete(), empty_net(), link)
    loader.wait_placed()
    loader.close()
    loader.close()
    with pytest.raises(RuntimeError, match="closed before all weights"):
        loader.wait()


def test_the_hosts_pages_are_released_behind_it(filling: Fill, net: Net) -> None:
    module, link = empty_net(), HostLink()
    filled = filling(state(net)).lay_out()
    filled.arrive(*filled.index.order)  # not finished: a region that is done is sealed, and keeps its pages
    with load(filled, module, link, release=True) as loader:
        loader.wait()
    torch.testing.assert_close(module(IDS), net(IDS), rtol=0, atol=0)
    later = Region(os.dup(filled.region.fd))
    try:
        assert not any(bytes(later.shard(filled.index.tensors["embed.weight"].shard)[:4096]))
        with load_again(later) as again, pytest.raises(WeightsError, match="--host-weights release"):
            again.wait()
    finally:
        later.close()


def test_what_the_model_does_not_need_is_not_waited_for(filling: Fill, net: Net) -> None:
    unused = {"head.weight": net.head.weight, "first.unused": torch.ones(8, 1024)}
    net.rename = lambda name: None if name == "first.unused" else name  # type: ignore[assignment]
    module = empty_net()
    module.rename = net.rename  # type: ignore[assignment]
    filled = filling(unused | state(net)).lay_out()
    filled.arrive(*filled.index.order)
    with load(filled, module, HostLink(), release=True) as loader:
        loader.wait()
    assert filled.writer.released_bytes == filled.writer.fetched_bytes


def load_again(region: Region) -> Loader:
    return Loader(region, Applier(empty_net(), dtype=torch.float32), link=HostLink())
