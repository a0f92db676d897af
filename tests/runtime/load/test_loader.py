"""Loading from real regions: views, gates, what does not match, and what fails while it is awaited."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from medusa_runtime.errors import CorruptError, MismatchError
from medusa_runtime.load.applier import Applier
from medusa_runtime.load.loader import Loader
from medusa_runtime.load.quantized.scheme import Quantization
from medusa_runtime.load.skeleton import skeleton
from medusa_runtime.timeline import Timeline
from torch import Tensor, nn
from waiting import until

Fill = Callable[..., Any]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.nn.functional.linear(self.up(x).relu(), self.down.weight)  # reads down without calling it


class Net(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(4, 10, bias=False)
        self.register_buffer("steps", torch.arange(3.0), persistent=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return torch.as_tensor(self.head(hidden))


IDS = torch.tensor([1, 7, 3])


def reference(tied: bool = False) -> tuple[Net, dict[str, Tensor]]:
    torch.manual_seed(0)
    net = Net(tied).eval()
    state = dict(net.state_dict())
    if tied:
        del state["head.weight"]
    return net, state


def empty_net(tied: bool = False) -> Net:
    with skeleton():
        return Net(tied).eval()


def hooks(module: nn.Module) -> int:
    return sum(len(part._forward_pre_hooks) for part in module.modules())


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


def test_parameters_are_views_of_the_region(filling: Fill) -> None:
    net, state = reference()
    filled = filling(state).complete()
    module = empty_net()
    with Loader(filled.region, Applier(module, dtype=torch.float32)) as loader:
        loader.wait()
    torch.testing.assert_close(module(IDS), net(IDS), rtol=0, atol=0)
    for name, parameter in module.named_parameters():
        shard = filled.region.shard(filled.index.tensors[name].shard)
        assert bytes(shard[:4]) == parameter.detach().reshape(-1)[:1].numpy().tobytes()
        assert parameter.data_ptr() % 4096 == 0, f"{name} was copied"
        assert not parameter.requires_grad
    assert hooks(module) == 0


def test_views_outlive_the_region(filling: Fill) -> None:
    net, state = reference()
    filled = filling(state).complete()
    module = empty_net()
    Loader(filled.region, Applier(module)).wait()
    filled.close()
    del filled
    gc.collect()
    torch.testing.assert_close(module(IDS), net(IDS), rtol=0, atol=0)


def test_casts_where_the_dtype_differs(filling: Fill) -> None:
    _, state = reference()
    state = {name: tensor.to(torch.bfloat16) if "head" in name else tensor for name, tensor in state.items()}
    module = empty_net()
    Loader(filling(state).complete().region, Applier(module, dtype=torch.bfloat16)).wait()
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(module.embed.weight.detach(), state["embed.weight"].to(torch.bfloat16))
    assert module.steps.dtype == torch.float32


def test_copies_what_is_misaligned(filling: Fill) -> None:
    net, state = reference()
    module = empty_net()
    Loader(filling(state, shift=3).complete().region, Applier(module)).wait()
    torch.testing.assert_close(module(IDS), net(IDS), rtol=0, atol=0)
    assert all(parameter.data_ptr() % 4 == 0 for parameter in module.parameters())


@pytest.mark.parametrize("duplicate", [False, True])
def test_tied_weights_are_one_tensor(filling: Fill, duplicate: bool) -> None:
    net, state = reference(tied=True)
    if duplicate:
        state = {"head.weight": torch.zeros(10, 4)} | state
    module = empty_net(tied=True)
    Loader(filling(state).complete().region, Applier(module)).wait()
    assert module.head.weight is module.embed.weight
    torch.testing.assert_close(module(IDS), net(IDS), rtol=0, atol=0)


def test_buffers_are_loaded_and_may_be_written(filling: Fill) -> None:
    torch.manual_seed(0)
    source = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    source[1].running_mean.fill_(0.5)
    with skeleton():
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    Loader(filling(dict(source.state_dict())).complete().region, Applier(module, dtype=torch.float32)).wait()
    module.train()(torch.randn(3, 4))  # writes the running statistics
    assert module[1].num_batches_tracked == 1
    assert module[1].running_mean is not None
    assert not torch.equal(module[1].running_mean, torch.full((4,), 0.5))


def test_names_all_that_does_not_match(filling: Fill) -> None:
    _, state = reference()
    del state["layers.1.up.bias"]
    state["layers.7.up.bias"] = torch.zeros(8)
    state["head.weight"] = torch.zeros(10, 5)
    filled = filling(state).lay_out()  # no byte ever arrives
    module = empty_net()
    with Loader(filled.region, Applier(module)) as loader:
        with pytest.raises(MismatchError) as caught:
            module(IDS)
        with pytest.raises(MismatchError):
            loader.wait()
    message = str(caught.value)
    assert "1 missing: layers.1.up.bias" in message
    assert "1 not expected: layers.7.up.bias" in message
    assert "head.weight (expected [10, 4], found [10, 5])" in message


def test_names_whole_numbers_where_floats_belong(filling: Fill) -> None:
    _, state = reference()
    state["head.weight"] = state["head.weight"].to(torch.int64)
    refusal = r"1 quantized, where floats were expected: head\.weight \(I64\)"
    with (
        Loader(filling(state).lay_out().region, Applier(empty_net(), dtype=torch.float32)) as loader,
        pytest.raises(MismatchError, match=refusal),
    ):
        loader.wait()


def test_rename_maps_and_leaves_out(filling: Fill) -> None:
    net, state = reference()
    stored = {f"model.{name}": tensor for name, tensor in state.items()} | {"model.rotary.inv_freq": torch.zeros(2)}
    module = empty_net()

    def rename(name: str) -> str | None:
        return None if name.endswith("inv_freq") else name.removeprefix("model.")

    Loader(filling(stored).complete().region, Applier(module, dtype=None, rename=rename)).wait()
    torch.testing.assert_close(module(IDS), net(IDS), rtol=0, atol=0)


def test_a_forward_waits_for_each_unit_alone(filling: Fill) -> None:
    net, state = reference()
    filled = filling(state).lay_out()
    module = empty_net()
    timeline = Timeline.create("test")
    reached: list[str] = []
    with Loader(filled.region, Applier(module), timeline=timeline) as loader:
        for name in ("embed", "layers.0", "layers.1", "layers.2", "head"):
            module.get_submodule(name).register_forward_hook(lambda *_, name=name: reached.append(name))
        thread, results = in_thread(lambda: module(IDS))
        filled.arrive(*(name for name in state if name.startswith("head")))  # the last first
        until(lambda: not module.head.weight.is_meta)
        assert reached == []
        filled.arrive("embed.weight")
        until(lambda: reached == ["embed"])
        filled.arrive(
            *(name for name in state if name.startswith("layers.1")), "layers.0.up.weight", "layers.0.up.bias"
        )
        until(lambda: not module.layers[0].up.bias.is_meta and not module.layers[1].down.weight.is_meta)
        assert reached == ["embed"]
        filled.arrive("layers.0.down.weight")
        until(lambda: reached == ["embed", "layers.0", "layers.1"])
        filled.arrive(*(name for name in state if name.startswith("layers.2")))
        thread.join(120)
        torch.testing.assert_close(results[0], net(IDS), rtol=0, atol=0)
        loader.wait()
    assert hooks(module) == 0
    stages = [(stage.name, stage.detail["unit"]) for stage in timeline.stages() if "unit" in stage.detail]
    assert {unit for name, unit in stages if name == "apply"} == {"embed", "layers.0", "layers.1", "layers.2", "head"}
    assert [unit for name, unit in stages if name == "wait"] == ["embed", "layers.0", "layers.2"]


def test_weights_that_come_slowly_are_looked_at_seldom(filling: Fill, monkeypatch: pytest.MonkeyPatch) -> None:
    _, state = reference()
    filled = filling(state).lay_out()
    module = empty_net()
    looks = []
    has = filled.region.has
    monkeypatch.setattr(filled.region, "has", lambda name: looks.append(name) or has(name))
    with Loader(filled.region, Applier(module)):
        until(lambda: len(looks) > len(state))
        time.sleep(0.1)
        before = len(looks)
        time.sleep(1.0)
        assert len(looks) - before <= 25 * len(state)  # one look at each tensor every 50 ms
        late = list(state)[-1]  # not the one that is next
        filled.arrive(late)
        until(lambda: not module.get_parameter(late).is_meta)


def test_a_fetch_error_reaches_the_waiting_forward(filling: Fill) -> None:
    _, state = reference()
    filled = filling(state).lay_out()
    module = empty_net()
    with Loader(filled.region, Applier(module)) as loader:
        filled.arrive("embed.weight", "layers.0.up.weight")
        thread, results = in_thread(lambda: module(IDS))
        until(lambda: not module.layers[0].up.weight.is_meta)
        filled.writer.fail(CorruptError("shard 3: checksum"))
        thread.join(120)
        assert isinstance(results[0], CorruptError)
        with pytest.raises(CorruptError, match="shard 3"):
            loader.wait()
        assert module.embed(IDS).shape == (3, 4)  # what is there stays usable


def test_close_lets_a_waiting_forward_go(filling: Fill) -> None:
    _, state = reference()
    filled = filling(state)  # not even laid out
    module = empty_net()
    loader = Loader(filled.region, Applier(module))
    thread, results = in_thread(lambda: module(IDS))
    loader.close()
    loader.close()
    thread.join(120)
    assert isinstance(results[0], RuntimeError)


def test_parameters_that_nobody_calls(filling: Fill) -> None:
    """A root's own parameters and lists of parameters are waited for by the module that holds them."""

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))
            self.list = nn.ParameterList([torch.ones(2), torch.ones(2)])
            self.blocks = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

        def forward(self, x: Tensor) -> Tensor:
            return torch.as_tensor(self.blocks(x * self.scale + self.list[0] + self.list[1]))

    source = Bare()
    filled = filling(dict(source.state_dict())).lay_out()
    with skeleton():
        module = Bare()
    with Loader(filled.region, Applier(module)):
        thread, results = in_thread(lambda: module(torch.ones(2)))
        filled.arrive(*source.state_dict())
        thread.join(120)
    torch.testing.assert_close(results[0], source(torch.ones(2)))


def test_a_forward_waits_for_all_parts_of_a_quantized_weight(filling: Callable[..., Any]) -> None:
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    groups = {"all": {"targets": ["Linear"], "weights": weights}}
    config = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups}
    quantization = Quantization.of({"quantization_config": config})
    weight, scale = torch.randint(-127, 128, (6, 4)).to(torch.int8), torch.rand(6, 1)
    filled = filling({"0.weight": weight, "0.weight_scale": scale}).lay_out()
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 6, bias=False))
    with Loader(filled.region, Applier(module, dtype=torch.float32, quantization=quantization)) as loader:
        filled.arrive("0.weight")
        assert not loader.is_loaded("0")
        filled.arrive("0.weight_scale")
        assert torch.equal(module(torch.eye(4)), (weight * scale).t())


def test_a_unit_is_loaded_with_the_units_inside_it(filling: Fill) -> None:
    def mixture() -> nn.Module:
        experts = nn.ModuleDict({"norm": nn.LayerNorm(4), "experts": nn.ModuleList(nn.Linear(4, 4) for _ in range(2))})
        return nn.ModuleDict({"layers": nn.ModuleList((experts, nn.Linear(4, 4)))})

    state = {name: tensor.detach().clone() for name, tensor in mixture().named_parameters()}
    filled = filling(state).lay_out()
    with skeleton():
        module = mixture()
    with Loader(filled.region, Applier(module)) as loader:
        filled.arrive("layers.0.norm.weight", "layers.0.norm.bias", "layers.1.weight", "layers.1.bias")
        until(lambda: loader.is_loaded("layers.1") and loader.is_loaded("layers.0.norm"))
        assert not loader.is_loaded("layers.0")
        filled.arrive(*state)
        until(lambda: loader.is_loaded("layers.0"))
