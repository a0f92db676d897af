"""What user code does with a module whose weights have not come: it waits, or is told what to do."""

from __future__ import annotations

import copy
import io
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from medusa_runtime.errors import WeightsError
from medusa_runtime.load.factory.build import build
from medusa_runtime.load.factory.options import BuildOptions
from medusa_runtime.load.gate import Gate
from medusa_runtime.load.loader import Loader
from medusa_runtime.load.pending import PendingParameter, make_pending
from medusa_runtime.region.reader import Region
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
Fill = Callable[..., Any]
X = torch.linspace(-1, 1, 16).view(2, 8)


class Marked(nn.Parameter):
    """A parameter of a class of the user's own."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.marked = Marked(torch.rand(8))
        self.marked.label = "a"  # type: ignore[attr-defined]
        self.plain = nn.BatchNorm1d(8, affine=False)  # nothing but buffers
        self.norm = nn.BatchNorm1d(8)
        self.alias = self.norm.get_buffer("running_mean")
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.plain(x)) * self.marked + self.alias
        for layer in self.layers:
            x = layer(x).relu()
        return torch.as_tensor(self.head(self.encoder(x[None])[0]))


def make() -> Net:
    return Net().eval()


def eager() -> Net:
    torch.manual_seed(4)
    net = make()
    net.load_state_dict(
        {name: torch.rand_like(t) if t.is_floating_point() else t + 3 for name, t in net.state_dict().items()}
    )
    return net


Early = Callable[..., tuple[Net, Loader]]


@pytest.fixture
def early(filling: Fill) -> Iterator[Early]:
    """Of ``eager()``'s weights nothing has come; all comes when a forward, or a thread, waits for something."""
    threads: list[threading.Thread] = []
    regions: list[Region] = []

    def begin(**options: Any) -> tuple[Net, Loader]:
        state = {name: tensor.clone() for name, tensor in eager().state_dict().items()}
        filled = filling(state).lay_out()
        regions.append(Region(os.dup(filled.region.fd), private=True))  # as a handler's
        module, loader = build(regions[-1], make, BuildOptions(**options))

        def come() -> None:
            while not any(filled.writer.demanded()):
                if ended.wait(0.002):
                    return
            filled.arrive(*reversed(state))

        threads.append(threading.Thread(target=come))
        threads[-1].start()
        return module, loader

    ended = threading.Event()
    yield begin
    ended.set()
    for thread in threads:
        thread.join()
    for region in regions:
        region.close()


def saved(module: Net) -> Net:
    torch.save(module, file := io.BytesIO())
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert isinstance(loaded, Net)
    return loaded


COPIES: list[Callable[[Net], Net]] = [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), saved]


@pytest.mark.parametrize("duplicate", COPIES, ids=["deepcopy", "pickle", "save"])
def test_a_copy_has_the_values_and_nothing_of_ours(early: Early, duplicate: Callable[[Net], Net]) -> None:
    module, loader = early()
    copied = duplicate(module)
    assert torch.equal(copied(X), eager()(X))
    assert not any(isinstance(parameter, PendingParameter) for parameter in copied.parameters())
    left = [hook for part in copied.modules() for hook in part._forward_pre_hooks.values()]
    assert all(isinstance(hook, Gate) and hook.is_open and not hook.owners for hook in left)  # of parts nobody called
    loader.wait()
    assert not any(part._forward_pre_hooks for part in module.modules())
    assert torch.equal(module(X), eager()(X))


def test_buffers_wait_like_parameters(early: Early) -> None:
    net = eager()
    assert torch.equal(early()[0].get_buffer("plain.running_var") + 1, net.get_buffer("plain.running_var") + 1)
    assert torch.equal(early()[0].plain.state_dict()["running_mean"], net.get_buffer("plain.running_mean"))
    plain = early()[0].plain
    assert torch.equal(nn.functional.batch_norm(X, plain.running_mean, plain.running_var), net.plain(X))
    module, loader = early()
    module(X)
    loader.wait()
    assert {type(buffer) for buffer in module.buffers()} == {Tensor}
    assert module.alias is module.norm.running_mean


class Never:
    def wait(self) -> None:
        raise AssertionError("nothing may wait here")


def test_the_form_of_a_value_is_known_before_it_comes() -> None:
    parameter = nn.Parameter(torch.empty(3, 4, device="meta"))
    make_pending(parameter, Never(), torch.float16, torch.device("cpu"))
    assert (parameter.dtype, parameter.device, parameter.is_meta) == (torch.float16, torch.device("cpu"), False)
    assert (parameter.itemsize, parameter.nbytes, parameter.element_size()) == (2, 24, 2)
    assert (parameter.shape, len(parameter), parameter.numel(), parameter.size(dim=1)) == ((3, 4), 3, 12, 4)
    assert parameter.is_floating_point()
    assert not parameter.is_complex()
    with pytest.raises(AssertionError):
        parameter.sum()


def test_a_state_dict_can_be_saved_and_loaded(early: Early) -> None:
    module, loader = early()
    for _ in range(2):
        torch.save(module.state_dict(), file := io.BytesIO())
        file.seek(0)
        found = torch.load(file)
        for name, tensor in eager().state_dict().items():
            assert torch.equal(found[name], tensor)
            assert found[name].untyped_storage().nbytes() == tensor.nbytes
        loader.wait()


def test_a_parameter_keeps_its_class_and_attributes(early: Early) -> None:
    module, loader = early()
    assert module.marked.shape == (8,)
    assert torch.equal(module(X), eager()(X))
    loader.wait()
    assert type(module.marked) is Marked
    assert vars(module.marked) == {"label": "a"}


def changed(change: Callable[[Net], Any]) -> Callable[[Net], Tensor]:
    def use(module: Net) -> Tensor:
        change(module)
        return torch.as_tensor(module(X))

    return use


CHANGES: dict[str, Callable[[Net], Any]] = {
    "replaces a head": lambda m: setattr(m, "head", nn.Identity()),
    "drops a layer": lambda m: m.layers.__delitem__(0),
    "puts a layer elsewhere": lambda m: m.layers.insert(0, m.layers[2]),
    "replaces a bias": lambda m: setattr(m.head, "bias", None),
    "replaces a weight": lambda m: setattr(m.head, "weight", nn.Parameter(m.head.weight.detach() * 2)),
    "ties": lambda m: setattr(m.layers[0], "weight", m.layers[1].weight),
    "replaces a buffer": lambda m: m.norm.register_buffer("running_var", torch.full((8,), 2.0)),
    "loads others": lambda m: m.load_state_dict({k: torch.ones_like(t) for k, t in make().state_dict().items()}),
    "assigns others": lambda m: m.load_state_dict(
        {name: torch.full(tensor.shape, 2.0) for name, tensor in make().layers.state_dict(prefix="layers.").items()},
        strict=False,
        assign=True,
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("late", [False, True])
def test_what_its_user_changes_stays_changed(early: Early, change: Callable[[Net], Any], late: bool) -> None:
    """The same whenever it is done: the checkpoint is compared with what the factory made."""
    expected = changed(change)(eager())
    module, loader = early()
    if late:
        module(X)
        loader.wait()
    found = changed(change)(module)
    assert torch.equal(found, expected)
    loader.wait()
    assert torch.equal(module(X), expected)
    assert not any(isinstance(parameter, PendingParameter) for parameter in module.parameters())


def test_a_tied_parameter_is_met_once_while_it_comes(filling: Fill) -> None:
    def tied() -> nn.Module:
        layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        layers[1].weight = layers[0].weight
        return layers

    state = {name: tensor.detach().clone() for name, tensor in tied().named_parameters()}
    filled = filling(state).lay_out()
    module, loader = build(filled.region, tied, BuildOptions(copy=True))
    held, found = list(module.parameters()), list[str]()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if not found:
                filled.arrive(*state)
            parameter.mul_(2)
            found.append(name)
    loader.wait()
    assert found == list(state)
    assert all(torch.equal(module.state_dict()[name], tensor * 2) for name, tensor in state.items())
    assert all(one is other and type(one) is nn.Parameter for one, other in zip(held, module.parameters(), strict=True))


class Scaled(nn.Module):
    """Something happens at the beginning of its forward, which no gate is in front of."""

    first: Callable[[], None]

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(8))
        self.dense = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.first()
        return torch.as_tensor(self.dense(x) * self.scale)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_weights_that_come_while_torch_jit_holds_them(filling: Fill) -> None:
    state = {name: tensor.detach().clone() for name, tensor in Scaled().named_parameters()}
    filled = filling(state).lay_out()
    module, loader = build(filled.region, Scaled)
    early = module.scale

    def come() -> None:
        filled.arrive(*state)
        loader.wait()

    module.first = come
    with pytest.raises(RuntimeError, match="Cannot insert a Tensor that requires grad as a constant"):
        torch.jit.trace(module, X, check_trace=False)  # type: ignore[no-untyped-call]
    assert isinstance(early, PendingParameter)  # it could not become the value
    assert torch.equal(early + 1, state["scale"] + 1)
    assert torch.equal(module(X), nn.functional.linear(X, state["dense.weight"], state["dense.bias"]) * state["scale"])
    assert {type(parameter) for parameter in module.parameters()} == {nn.Parameter}


def trace(module: Net) -> Any:
    return torch.jit.trace(module, X, check_trace=False)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (torch.jit.script, r"torch\.jit\.script of a module whose weights have not come"),
        (trace, r"torch\.jit\.trace of a module whose weights have not come"),
        (lambda module: nn.Parameter(module.head.weight), "a parameter is made of a weight that has not come"),
    ],
)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_what_cannot_wait_says_when_to_do_it(early: Early, use: Callable[[Net], Any], message: str) -> None:
    module, loader = early()
    with pytest.raises(WeightsError, match=message):
        use(module)
    module(X)
    loader.wait()
    use(module)


def test_a_forked_process_does_not_wait_for_ever(early: Early) -> None:
    module, loader = early()
    pid = os.fork()
    if not pid:
        named = 0
        for use in (lambda: module(X), lambda: module.head.weight + 1, loader.wait):
            try:
                use()
            except WeightsError as error:
                named += "expected a fork after context.weights.wait()" in str(error)
        os._exit(named)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    module(X)
    loader.wait()


def test_an_optimizer_made_early_trains_what_has_come(early: Early) -> None:
    module, loader = early(copy=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(X).sum().backward()
    loader.wait()
    before = module.head.weight.detach().clone()
    optimizer.step()
    assert module.head.weight.grad is not None
    assert torch.equal(module.head.weight.detach(), before.add(module.head.weight.grad, alpha=-0.1))
