"""Any module from a region: gates, what factories do, and what does not fit."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from medusa_runtime.errors import CorruptError, MismatchError, WeightsError
from medusa_runtime.fetch.schedule import Schedule
from medusa_runtime.load.alignment import needed_bytes
from medusa_runtime.load.factory.build import build
from medusa_runtime.load.factory.options import BuildOptions
from medusa_runtime.load.loader import Loader
from medusa_runtime.load.pending import PendingParameter
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline
from torch import Tensor, nn
from waiting import until

Fill = Callable[..., Any]
X = torch.linspace(-1, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8)


class Net(nn.Module):
    """Reads weights of modules it never calls, has parameters of its own, keeps references, ties, and is lazy."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.conv = nn.Conv2d(3, 8, 3)
        self.bn = nn.BatchNorm2d(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.kept = [self.first.weight]
        self.lazy = nn.LazyLinear(5)
        self.register_buffer("scale", torch.arange(1.0, 9.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.bn(self.conv(x)).flatten(2).transpose(1, 2) * self.scale + self.token
        hidden = self.attention(hidden, hidden, hidden)[0]
        return torch.as_tensor(self.lazy(self.second(self.first(hidden)) @ self.kept[0]))


def make() -> Net:
    return Net().eval()


def reference() -> tuple[Net, dict[str, Tensor]]:
    torch.manual_seed(0)
    net = make()
    net(X)
    for name, buffer in net.named_buffers():
        if "running" in name:
            buffer.copy_(torch.rand_like(buffer) + 0.5)
    state = dict(net.state_dict())
    del state["second.weight"]
    return net, state


@pytest.fixture
def private() -> Iterator[Callable[[Any], Region]]:
    made: list[Region] = []

    def open_private(filled: Any) -> Region:
        made.append(Region(os.dup(filled.region.fd), private=True))
        return made[-1]

    yield open_private
    for region in made:
        region.close()


def arriving(filled: Any, names: list[str]) -> threading.Thread:
    def run() -> None:
        for name in names:
            time.sleep(0.003)
            filled.arrive(name)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_is_called_at_once_and_equals_eager_loading_bit_for_bit(filling: Fill) -> None:
    net, state = reference()
    filled = filling(state).lay_out()
    module, loader = build(filled.region, make)
    assert type(module.conv.weight) is PendingParameter
    assert (module.conv.weight.device, module.conv.weight.dtype) == (torch.device("cpu"), torch.float32)
    thread = arriving(filled, list(reversed(state)))  # the last first
    assert torch.equal(module(X), net(X))
    loader.wait()
    thread.join()
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in net.named_parameters()]
    assert {type(parameter) for parameter in module.parameters()} == {nn.Parameter}
    assert module.second.weight is module.first.weight
    assert not any(part._forward_pre_hooks for part in module.modules())
    assert torch.equal(module(X), net(X))
    loader.close()


def test_each_submodule_waits_for_its_own(filling: Fill) -> None:
    net, state = reference()
    filled = filling(state).lay_out()
    module, loader = build(filled.region, make)
    with loader:
        filled.arrive("conv.weight", "conv.bias")
        assert torch.equal(module.conv(X), net.conv(X))  # nothing else is there
        filled.arrive(*(name for name in state if not name.startswith("conv")))
        assert torch.equal(module(X), net(X))


def test_prefix_and_rename(filling: Fill) -> None:
    net, state = reference()
    stored = {f"backbone.{name}": tensor for name, tensor in state.items()} | {"head.weight": torch.zeros(3)}
    module, loader = build(filling(stored).complete().region, make, BuildOptions(prefix="backbone."))
    assert torch.equal(module(X), net(X))
    loader.wait()
    odd = {f"x_{name}": tensor for name, tensor in state.items()}
    module, loader = build(
        filling(odd).complete().region, make, BuildOptions(rename=lambda name: name.removeprefix("x_"))
    )
    assert torch.equal(module(X), net(X))
    loader.wait()


def test_types_of_the_module_win_as_with_load_state_dict(filling: Fill) -> None:
    net, state = reference()
    half = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    module, loader = build(filling(half).complete().region, make)
    net.load_state_dict(half, strict=False)
    assert torch.equal(module(X), net(X))
    loader.wait()
    assert module.bn.num_batches_tracked.dtype == torch.int64


def test_converts_as_it_loads(filling: Fill) -> None:
    net, state = reference()
    filled = filling(state).lay_out()
    module, loader = build(filled.region, make, BuildOptions(dtype=torch.bfloat16, memory_format=torch.channels_last))
    assert module.conv.weight.dtype == torch.bfloat16
    assert module.scale.dtype == torch.bfloat16
    thread = arriving(filled, list(state))
    net.to(torch.bfloat16, memory_format=torch.channels_last)
    assert torch.equal(module(X.bfloat16()), net(X.bfloat16()))
    loader.wait()
    thread.join()
    assert module.conv.weight.is_contiguous(memory_format=torch.channels_last)


def test_writing_to_a_parameter_changes_nobody_elses(filling: Fill, private: Callable[[Any], Region]) -> None:
    _, state = reference()
    filled = filling(state).complete()
    module, loader = build(private(filled), make)
    loader.wait()
    with torch.no_grad():
        module.first.weight.zero_()
    assert torch.count_nonzero(module.first.weight) == 0
    other, loader = build(private(filled), make)
    loader.wait()
    assert torch.equal(other.first.weight, state["first.weight"])


def test_compiles_after_completion(filling: Fill) -> None:
    net, state = reference()
    module, loader = build(filling(state).complete().region, make)
    loader.wait()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(X), net(X))  # attention takes another path when it is compiled


class Curious(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 2.0))
        self.norm = float(self.weight.norm()) if self.look else 0.0
        self.register_buffer("twice", self.weight.detach() * 2)

    look = True

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.norm + self.twice


@pytest.mark.parametrize("look", [True, False])
def test_a_parameter_read_while_constructing_has_its_initial_value(
    filling: Fill, look: bool, caplog: pytest.LogCaptureFixture
) -> None:
    kind = type("Curious", (Curious,), {"look": look})
    state = {"weight": torch.arange(4.0), "twice": torch.arange(4.0)}
    module, loader = build(filling(state).complete().region, kind)
    expected = torch.ones(4) * state["weight"] + (4.0 if look else 0.0) + state["twice"]
    assert torch.equal(module(torch.ones(4)), expected)
    loader.wait()
    assert ("self.weight.norm()" if look else "buffer twice") in caplog.text


def test_what_a_factory_raises_is_raised(filling: Fill) -> None:
    filled = filling({"weight": torch.zeros(2)}).complete()

    def broken() -> nn.Module:
        raise KeyError("layers")

    with pytest.raises(KeyError, match="layers"):
        build(filled.region, broken)
    with pytest.raises(WeightsError, match=r"returned a list; expected a torch\.nn\.Module"):
        build(filled.region, list)  # type: ignore[arg-type,return-value]


def test_what_does_not_fit_is_named_by_the_forward(filling: Fill) -> None:
    _, state = reference()
    del state["bn.running_mean"]
    state["first.weight"] = torch.zeros(8, 9)
    state["other"] = torch.zeros(1)
    module, loader = build(filling(state).complete().region, make)
    with pytest.raises(MismatchError) as caught:
        module(X)
    for part in ("1 missing: bn.running_mean", "1 not expected: other", "first.weight (expected [8, 8], found [8, 9])"):
        assert part in str(caught.value)
    with pytest.raises(MismatchError):
        loader.wait()
    with pytest.raises(MismatchError):
        module.kept[0] + 1


def test_not_strict_leaves_initial_values(filling: Fill) -> None:
    _, state = reference()
    del state["bn.weight"]
    state["other"] = torch.zeros(1)
    module, loader = build(filling(state).complete().region, make, BuildOptions(strict=False))
    loader.wait()
    assert torch.equal(module.bn.weight, torch.ones(8))
    assert torch.equal(module.first.weight, state["first.weight"])
    state["first.weight"] = torch.zeros(8, 9)
    with pytest.raises(MismatchError, match="of another shape"):
        build(filling(state).complete().region, make, BuildOptions(strict=False))[1].wait()


@pytest.mark.parametrize("use", [lambda module: module(X), lambda module: module.attention.out_proj.weight.sum()])
def test_a_fetch_that_fails_in_the_middle_reaches_the_forward(filling: Fill, use: Callable[[Net], Any]) -> None:
    _, state = reference()
    filled = filling(state).lay_out()
    module, loader = build(filled.region, make)
    filled.arrive("conv.weight", "conv.bias")
    failing = threading.Timer(0.1, lambda: filled.writer.fail(CorruptError("bytes 5 to 9")))
    failing.start()
    with pytest.raises(CorruptError, match="bytes 5 to 9"):
        use(module)
    failing.join()
    with pytest.raises(CorruptError):
        loader.wait()


def test_what_a_forward_waits_for_is_asked_for_first(filling: Fill) -> None:
    _, state = reference()
    filled = filling(state).lay_out()
    module, loader = build(filled.region, make)
    waiting = threading.Thread(target=lambda: module.lazy(torch.zeros(1, 8)), daemon=True)
    waiting.start()
    asked: set[int] = set()
    deadline = time.monotonic() + 20
    while not asked:
        assert time.monotonic() < deadline
        asked = {chunk for run in filled.writer.demanded() for chunk in run}
    needed = {chunk for name in ("lazy.weight", "lazy.bias") for chunk in filled.writer.chunks.of_tensor(name)}
    assert asked == needed
    filled.arrive("lazy.weight", "lazy.bias")  # out of order
    waiting.join(120)
    assert not waiting.is_alive()
    loader.close()


def test_released_layers_take_no_memory_and_cannot_be_loaded_again(filling: Fill) -> None:
    big = {f"{number}.weight": torch.randn(700, 700) for number in range(4)}

    def stack() -> nn.Module:
        return nn.Sequential(*(nn.Linear(700, 700, bias=False) for _ in range(4)))

    filled = filling(big).lay_out()
    filled.arrive(*big)
    region: Region = filled.region
    full = os.fstat(region.fd).st_blocks * 512
    module, loader = build(region, stack, BuildOptions(copy=True, release=True))
    loader.wait()
    assert full - os.fstat(region.fd).st_blocks * 512 > 0.98 * sum(t.nbytes for t in big.values())
    assert region.peak_bytes == full
    assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in big.items())
    with pytest.raises(WeightsError, match=r"0\.weight was released"):
        build(region, stack)[1].wait()


def test_views_are_not_released(filling: Fill) -> None:
    net, state = reference()
    filled = filling(state).lay_out()
    filled.arrive(*state)
    module, loader = build(filled.region, make, BuildOptions(release=True))
    loader.wait()
    assert torch.equal(module(X), net(X))
    again = build(filled.region, lambda: nn.Linear(8, 8), BuildOptions(prefix="first."))
    assert isinstance(again[1], Loader)
    again[1].wait()


class Rows(nn.Module):
    """Products of a matrix and one vector, in the ways that torch has of asking for them."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(1000, 33)
        self.squeeze = nn.Conv2d(1000, 33, 1)
        self.wide = nn.Parameter(torch.rand(33, 1000, dtype=torch.float64))
        self.vector = nn.Parameter(torch.rand(1000))

    def forward(self, x: Tensor) -> Tensor:
        rows = (self.dense(x)[0], self.squeeze(x.view(1, -1, 1, 1)).view(-1), self.wide @ x[0].double())
        return torch.cat([row.double() for row in (*rows, (self.vector @ x[0]).view(1))])


@pytest.mark.parametrize("shift", [0, 8, 24, 32, 40])
def test_bits_do_not_depend_on_where_in_its_file_a_tensor_lies(filling: Fill, shift: int) -> None:
    torch.manual_seed(1)
    eager = Rows().eval()
    state = {name: tensor.detach().clone() for name, tensor in eager.state_dict().items()}
    x = torch.rand(1, 1000)
    with torch.inference_mode():
        module, loader = build(filling(state, shift=shift).complete().region, lambda: Rows().eval())
        loader.wait()
        assert torch.equal(module(x), eager(x))
        viewing, loader = build(
            filling(state, shift=shift).complete().region, lambda: Rows().eval(), BuildOptions(exact=False)
        )
        loader.wait()
        assert viewing.dense.weight.data_ptr() % 64 == shift  # as in its file: this one is no copy
        assert (module.dense.weight.data_ptr() % 64 == shift) or shift % needed_bytes()


def test_the_timeline_tells_a_loads_peak_memory(filling: Fill) -> None:
    net, state = reference()
    timeline = Timeline.create("test")
    module, loader = build(filling(state).complete().region, make, timeline=timeline)
    assert torch.equal(module(X), net(X))
    loader.wait()
    (load,) = [stage for stage in timeline.stages() if stage.name == "load"]
    assert load.detail["peak_bytes"] > load.detail["region_peak_bytes"] > sum(t.nbytes for t in state.values())


def test_is_fetched_in_construction_order_unless_a_forward_was_recorded(filling: Fill) -> None:
    """Names that tell nothing, in a file sorted by them."""
    names = [f"{letter}.weight" for letter in "abcdefgh"]
    state = {name: torch.randn(600, 600) for name in names}  # more than a chunk each

    def stack() -> nn.Module:
        return nn.Sequential(OrderedDict((name[0], nn.Linear(600, 600, bias=False)) for name in reversed(names)))

    filled = filling(state).lay_out()
    module, loader = build(filled.region, stack)
    schedule = Schedule(filled.writer)
    of = {chunk: name for name in names for chunk in filled.writer.chunks.of_tensor(name)}
    until(lambda: len(filled.writer.hinted()) >= len(of))
    taken: dict[str, None] = {}
    while (span := schedule.take(1)) is not None:
        taken |= dict.fromkeys(of[chunk] for chunk in span.chunks)
    assert list(taken) == names[::-1]
    filled.arrive(*names)
    loader.wait()
    assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in state.items())


class Unusual(nn.Module):
    """A module under two names, ``.data`` assigned, and a product that torch folds only where a gradient is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(64, 64)
        self.again = nn.Sequential(self.dense, nn.ReLU())
        self.dense.bias.data = torch.zeros(64)
        self.dense.weight.data.uniform_(-1, 1)
        self.folded = nn.Parameter(torch.rand(128, 4))
        self.fixed = nn.Parameter(torch.rand(9), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.again(self.dense(x))
        return (self.folded @ hidden.view(-1, 4, 8)).sum(-1) + self.fixed.sum()


def test_what_is_unusual_equals_eager_loading(filling: Fill) -> None:
    torch.manual_seed(2)
    eager = Unusual().eval()
    eager.load_state_dict({name: torch.rand_like(tensor) for name, tensor in eager.state_dict().items()})
    stored = {name: tensor.detach().clone() for name, tensor in eager.state_dict().items()}
    assert "again.0.weight" in stored  # both names are in the file, as torch.save writes it
    module, loader = build(filling(stored).complete().region, lambda: Unusual().eval())
    x = torch.rand(3, 64)
    with torch.no_grad():
        assert torch.equal(module(x), eager(x))
    loader.wait()
    assert module.again[0].weight is module.dense.weight
    assert [p.requires_grad for p in module.parameters()] == [p.requires_grad for p in eager.parameters()]
    (module(x).sum()).backward()  # also trains, as what was loaded eagerly
    assert module.folded.grad is not None


@pytest.mark.parametrize("backwards", [False, True])
def test_of_tied_values_that_differ_the_last_counts_as_with_load_state_dict(filling: Fill, backwards: bool) -> None:
    stored = {name: torch.rand_like(tensor) for name, tensor in Unusual().state_dict().items()}
    eager = Unusual().eval()
    eager.load_state_dict(stored)
    assert torch.equal(eager.dense.weight, stored["again.0.weight"])
    in_file = dict(reversed(stored.items())) if backwards else stored
    module, loader = build(filling(in_file).complete().region, lambda: Unusual().eval())
    loader.wait()
    assert torch.equal(module.dense.weight, eager.dense.weight)
    assert torch.equal(module.dense.bias, eager.dense.bias)
