"""The lean import of torch, each case in a process of its own, as torch can be imported once.

What is said of the import itself is tried in a new interpreter; what comes behind it, in a process forked after it.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from medusa_runtime.imports.lazy_torch import _TESTED_ON_GPUS, TESTED, TESTED_PYTHONS, _built_for_gpu

LEAN = "from medusa_runtime.imports.lazy_torch import complete, import_torch\ntorch = import_torch()\n"
PLAIN = "import torch\n"
PYTHONS = ", ".join(f"{major}.{minor}" for major, minor in TESTED_PYTHONS)

# All that the engine does with torch; prints what came out.
ENGINE = """
import json, mmap, os
from torch import nn
from torch.nn import functional as F

torch.set_num_threads(1)
out = []
def show(tensor):
    out.append([str(tensor.dtype), list(tensor.shape), tensor.double().flatten().tolist()])

generator = torch.Generator().manual_seed(7)
def random(*shape):
    return torch.randn(*shape, generator=generator)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 8, bias=False)
        self.norm = nn.RMSNorm(8)
    def forward(self, x):
        return self.proj(self.norm(x))

with torch.device("meta"):
    block = Block()
assert block.proj.weight.is_meta
memory = mmap.mmap(-1, 8 * 8 * 2)
memory[:] = bytes(range(128))
view = torch.frombuffer(memory, dtype=torch.bfloat16).view(8, 8)
block.proj.weight = nn.Parameter(view.nan_to_num().clamp(-1, 1).float(), requires_grad=False)
block.norm.weight = nn.Parameter(torch.ones(8), requires_grad=False)
seen = []
block.register_forward_pre_hook(lambda module, args: seen.append(len(args)))
with torch.inference_mode():
    hidden = block(random(5, 8))
    assert seen == [1]
    show(hidden)
    show(F.linear(hidden.bfloat16(), block.proj.weight.bfloat16()))
    show(F.embedding(torch.tensor([3, 1]), block.proj.weight))
    show(F.silu(hidden) * F.gelu(hidden) + F.relu(hidden))
    show(F.layer_norm(hidden, (8,)))
    show(torch.rms_norm(hidden, (8,)))
    q, k, v = random(1, 4, 5, 8), random(1, 2, 5, 8), random(1, 2, 5, 8)
    show(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    show(F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), attn_mask=mask))
    cache = torch.zeros(4, 2, 8)
    cache.index_copy_(0, torch.tensor([2, 0]), random(2, 2, 8))
    show(cache.index_select(0, torch.tensor([0, 2])))
    cache[torch.tensor([1, 3])] = 1.0
    show(torch.cat([cache, cache.flip(0)]).gather(0, torch.zeros(1, 2, 8, dtype=torch.int64)))
    logits = random(3, 50)
    values, indices = logits.topk(5)
    show(values), show(indices)
    ordered, order = logits.sort(descending=True)
    keep = ordered.softmax(-1).cumsum(-1) < 0.9
    show(torch.multinomial(keep.float() * ordered.softmax(-1) + 1e-6, 2, generator=generator))
    show(logits.scatter(1, order, ordered).masked_fill(~keep, -1e9).log_softmax(-1))
    show(torch.outer(torch.arange(4.0), torch.arange(3.0)).cos())
    show(logits.to(torch.float8_e4m3fn).to(torch.float32).half())
    show(torch.where(logits > 0, logits, logits * 2).argmax(-1))
    out.append(logits.argmax(-1).tolist())
print(json.dumps(out))
"""

# Prints the names of torch and of its modules.
NAMES = """
import sys
print(json.dumps(sorted(set(dir(torch)) | {name for name in sys.modules if name.startswith("torch.")})))
"""


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, *arguments], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class Plain(NamedTuple):
    """What a plain import gives: the engine's results, and the names of torch and of its modules."""

    results: Any
    names: set[str]
    same: str  # whether a lean import behind it gives the same torch


@pytest.fixture(scope="module")
def plain() -> Plain:
    behind = "import torch as first\n" + LEAN + "complete()\nprint(torch is first)\n"
    names, results, same = run(PLAIN + "import json\n" + NAMES + ENGINE + behind).splitlines()
    return Plain(json.loads(results), set(json.loads(names)), same)


def test_what_the_engine_does_equals_a_plain_import(plain: Plain) -> None:
    still = "import sys\nfrom medusa_runtime.imports.lazy_modules import LazyModule\n"
    still += "print(json.dumps([n for n, m in sys.modules.items() if type(m) is LazyModule]))\n"
    lean, lazy = run(LEAN + ENGINE + still).splitlines()
    assert json.loads(lean) == plain.results
    for name in ("torch.distributed", "torch.fx", "torch.export", "torch._meta_registrations", "torch.jit", "numpy"):
        assert name in json.loads(lazy), f"{name} was executed: the import is not lean"


USES = [
    "assert torch.ones(3).numpy().sum() == 3; import numpy; assert numpy.__version__ > '1.2' and numpy.pi > 3",
    "import numpy.linalg; assert torch.from_numpy(numpy.ones(2)).sum() == 2",
    "assert torch.vmap(torch.neg)(torch.ones(2)).tolist() == [-1, -1]",
    "import torch.distributed as d; assert d.is_available() and not d.is_initialized() and d.ReduceOp.SUM",
    "from torch.fx import symbolic_trace as t; assert 'linear' in t(torch.nn.Linear(2, 2)).code",
    "assert torch.cuda.is_available() in (True, False) and torch.backends.mkldnn.is_available() in (True, False)",
    # Names that importers within torch bind early are others' only when they are the real ones.
    "from torch.nn import DataParallel as D; from torch import vmap; from torch.func import vmap as v\n"
    "assert issubclass(D, torch.nn.Module) and not isinstance(torch, D) and v is vmap is torch.vmap\n"
    "from torch.autograd import gradcheck; assert gradcheck.__code__ and torch.cond.__name__\n"
    "assert 'vmap' in dir(torch) and 'Graph' in vars(torch.fx) and 'Adam' in dir(torch.optim)",
    # What is set stays when the module is executed later.
    "torch.vmap = 3; torch.fx.more = 4; torch.optim.Adam = int; torch.jit.script\n"
    "assert torch.vmap + torch.fx.more + torch.optim.Adam(5) == 12",
    "import numpy.linalg; assert numpy.linalg.__spec__.origin and numpy.linalg.__spec__.has_location",
]
# Each executes the same modules as one above, by another way: in `make test-imports`, and in `make test-slow`.
MORE_USES = [
    "from torch.utils.data import DataLoader; assert [len(b) for b in DataLoader(range(5), 2)] == [2, 2, 1]",
    "x = torch.ones(2, requires_grad=True); (x * x).sum().backward(); assert x.grad.tolist() == [2, 2]",
    "import io; f = io.BytesIO(); torch.save([torch.ones(2)], f); f.seek(0); assert torch.load(f)[0].sum() == 2",
    "assert repr(torch.ones(2)) == 'tensor([1., 1.])'",
    "m = torch.nn.DataParallel(torch.nn.Linear(2, 2)); assert m(torch.ones(1, 2)).shape == (1, 2)",
    "from torch.compiler import is_compiling as f; import torch._dynamo; assert torch._dynamo.optimize and not f()\n"
    "assert torch.compile(lambda x: x + f(), backend='eager')(torch.ones(1)) == 2",
]


@pytest.mark.parametrize("uses", [USES, pytest.param(MORE_USES, marks=pytest.mark.slow)], ids=["some", "more"])
def test_what_was_put_off_works_when_touched(uses: list[str], run_lean: Callable[..., str]) -> None:
    """Each in a child of its own, forked after one lean import."""
    run_lean(
        """
import os, sys, traceback
children = {}
for use in sys.argv[1:]:
    pid = os.fork()
    if pid == 0:
        try:
            exec(use, {"torch": torch})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    children[pid] = use
failed = [use for pid, use in children.items() if os.waitpid(pid, 0)[1]]
assert not failed, failed
""",
        *uses,
    )


THREADS = """
import sys, threading
names = sys.argv[1:]
start, errors = threading.Barrier(len(names)), []

def work(name):
    start.wait()
    try:
        __import__(name, fromlist=["anything"])
        dir(sys.modules[name])
    except BaseException as error:
        errors.append((name, error))

threads = [threading.Thread(target=work, args=(name,), daemon=True) for name in names]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(150)
assert not errors, errors
assert not any(thread.is_alive() for thread in threads)
assert torch.ones(2).numpy().sum() == 2 and torch.fx.Graph
"""


def test_threads_that_import_at_once(run_lean: Callable[..., str]) -> None:
    """Some hold an import lock and ask for what another executes, which asks for that lock."""
    run_lean(THREADS, "numpy.linalg", "numpy", "numpy.ma", "torch.fx", "torch.distributed", "torch.jit", "torch.optim")


def test_a_thread_for_which_the_executing_one_waits(tmp_path: Path) -> None:
    """``one`` executes ``package.a``, which imports ``held``; ``two`` imports ``held``, which asks ``package.b``."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("from . import a, b\n")
    (package / "a.py").write_text("import threads\nthreads.go.set(); threads.held.wait()\nimport held\nx = held.x\n")
    (package / "b.py").write_text("x = 3\n")
    (tmp_path / "held.py").write_text("import threads, package\nthreads.held.set()\nx = package.b.x\n")
    (tmp_path / "threads.py").write_text("import threading\ngo, held = threading.Event(), threading.Event()\n")
    run(
        f"""
import sys, threading
sys.path.insert(0, {str(tmp_path)!r})
from medusa_runtime.imports.lazy_modules import LazyFinder, LazyPolicy
LazyFinder("package", LazyPolicy(packages=("package",), eager=frozenset({{"package"}}))).install()
import package, threads

def two():
    threads.go.wait()
    import held

thread = threading.Thread(target=two, daemon=True)
thread.start()
assert package.a.x == 3
thread.join(150)
assert not thread.is_alive()
"""
    )


def test_a_fork_while_another_thread_executes(run_lean: Callable[..., str]) -> None:
    run_lean(
        """
import os, threading, warnings
warnings.simplefilter("ignore")  # Python warns of a fork beside threads
asked = threading.Event()

def work():
    asked.set()
    torch.jit.script

thread = threading.Thread(target=work)
thread.start()
asked.wait()
child = os.fork()
if child == 0:
    os._exit(0 if torch.fx.Graph and torch.distributed.is_available() else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
thread.join()
"""
    )


def test_a_seed_executes_nothing(run_lean: Callable[..., str]) -> None:
    run_lean("torch.manual_seed(1); import sys; assert type(sys.modules['torch.fx']).__name__ == 'LazyModule'")


def test_layers_that_ask_for_torchscript_execute_nothing(run_lean: Callable[..., str]) -> None:
    """Such a layer would otherwise import all of torch, a second and more, in the first request."""
    run_lean(
        """
import sys
from torch import nn
from torch.jit import is_scripting, is_tracing
x = torch.ones(1, 4, 8)
with torch.inference_mode():
    nn.EmbeddingBag(8, 4)(torch.tensor([1, 2]), torch.tensor([0]))
    nn.LSTM(8, 4, batch_first=True)(x)
    nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 1).eval()(x)
    nn.functional.interpolate(x.unsqueeze(0), scale_factor=2, mode="bilinear")
assert not is_scripting() and not is_tracing()
assert type(sys.modules["torch.fx"]).__name__ == "LazyModule"
import warnings
warnings.simplefilter("ignore")  # TorchScript is deprecated
assert torch.jit.script and is_scripting is torch.jit.is_scripting  # its compiler knows the function by identity
assert torch.jit.trace(lambda x: x * 2 if is_tracing() else x, x)(x).sum() == 2 * x.sum()
"""
    )


def test_complete_leaves_nothing_out(plain: Plain, run_lean: Callable[..., str]) -> None:
    """What a plain import brings is there, and works."""
    names = run_lean(
        "from medusa_runtime.imports.lazy_torch import complete\nimport json\ncomplete()\n"
        + NAMES
        + """
complete()
from medusa_runtime.imports.lazy_modules import LazyModule, LazyFinder, StandIn
modules = {n: m for n, m in sys.modules.items() if n.startswith(("torch", "numpy"))}
left = [n for n, m in modules.items() if type(m) is LazyModule]
left += [f"{n}.{key}" for n, m in modules.items() for key, value in vars(m).items() if type(value) is StandIn]
assert not left, left
assert not any(type(finder) is LazyFinder for finder in sys.meta_path)
assert issubclass(torch.nn.DataParallel, torch.nn.Module)
assert torch.cond is sys.modules["torch._higher_order_ops"].cond
compiled = torch.compile(lambda x: x.sin() + 1, backend="eager", fullgraph=True)
assert torch.equal(compiled(torch.ones(3)), torch.ones(3).sin() + 1)
assert torch.empty(2, 3, device="meta").matmul(torch.empty(3, 4, device="meta")).shape == (2, 4)
exported = torch.export.export(torch.nn.Linear(2, 3), (torch.ones(1, 2),))
assert exported.module()(torch.ones(1, 2)).shape == (1, 3)
"""
    )
    assert not plain.names - set(json.loads(names))


def test_without_numpy() -> None:
    run("import sys; sys.modules['numpy'] = None\n" + LEAN + "assert torch.ones(2).sum().item() == 2")


def test_numpy_can_be_hidden_from_torch(plain: Plain) -> None:
    script = LEAN.replace("import_torch()", "import_torch(numpy=False)") + ENGINE
    still = "import sys\nassert 'numpy._core' not in sys.modules\nimport numpy\nassert numpy.ones(2).sum() == 2\n"
    assert json.loads(run(script + still)) == plain.results


def test_a_forked_process_computes(run_lean: Callable[..., str]) -> None:
    run_lean(
        """
import os
child = os.fork()
if child == 0:
    os._exit(0 if torch.randn(64, 64).matmul(torch.eye(64)).isfinite().all() else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    )


def test_what_is_put_off_works_at_the_end_of_the_stack(run_lean: Callable[..., str]) -> None:
    """The import's own frames would not fit, and half an import of torch is none."""
    run_lean(
        """
import sys

def ask(frames):
    return ask(frames - 1) if frames else torch.jit.script

limit = sys.getrecursionlimit()
assert ask(limit - 100) is torch.jit.script and sys.getrecursionlimit() == limit
assert torch.fx.Graph and torch.distributed.is_available()
"""
    )


# A user's import of a torch that is built for GPUs is lean only when it is told to be.
HOW = "lean" if _built_for_gpu(Path(str(importlib.util.find_spec("torch").origin))) else "auto"  # type: ignore[union-attr]
FINDERS = (
    "import sys; from medusa_runtime.imports.lazy_torch import make_handlers_import_lean as wait; how = "
    + repr(HOW)
    + "\n"
)


def test_the_users_import_is_lean_when_it_comes() -> None:
    run(
        FINDERS
        + """
wait(how)
import importlib.util
assert importlib.util.find_spec("torch").origin and "torch" not in sys.modules
import numpy
assert numpy.ones(2).sum() == 2
from torch import nn
import torch
assert type(sys.modules["torch.fx"]).__name__ == "LazyModule", sys.modules["torch.fx"]
assert torch.from_numpy(numpy.ones(2)).sum() == 2 and nn.Linear(2, 2)(torch.ones(1, 2)).shape == (1, 2)
"""
    )


def test_a_users_tensor_is_shared_with_its_processes() -> None:
    """With the standard library's multiprocessing, and nothing of torch touched before."""
    run(
        FINDERS
        + """
wait(how)
import multiprocessing, torch

receiver, sender = multiprocessing.Pipe()
tensor, parameter = torch.zeros(2), torch.nn.Parameter(torch.zeros(2), requires_grad=False)
assert type(sys.modules["torch.fx"]).__name__ == "LazyModule" and not tensor.is_shared()
sender.send([tensor, parameter])
for mine, received in zip([tensor, parameter], receiver.recv()):
    received[0] = 7
    assert mine.tolist() == [7, 0] and mine.is_shared()
"""
    )


def stand_in(folder: Path, cuda: str = "None") -> None:
    """A small torch of a tested version."""
    package = folder / "torch"
    package.mkdir()
    (package / "version.py").write_text(f"__version__ = '{TESTED[0]}0'\ncuda: Optional[str] = {cuda}\n")
    (package / "__init__.py").write_text("from . import functional\n")
    (package / "functional.py").write_text("name = 'executed'\n")


@pytest.mark.parametrize("reason", ["a torch for GPUs", "an extension"])
def test_the_users_import_is_plain_for_a_reason(tmp_path: Path, reason: str) -> None:
    stand_in(tmp_path, cuda="'13.0'" if reason == "a torch for GPUs" else "None")
    if reason == "an extension":
        (tmp_path / "other-1.dist-info").mkdir()
        (tmp_path / "other-1.dist-info" / "entry_points.txt").write_text("[torch.backends]\nother = other:load\n")
    script = (
        f"import logging; logging.basicConfig(level='INFO', stream=sys.stdout)\nsys.path[:0] = [{str(tmp_path)!r}]\n"
    )
    script += "wait('auto')\nimport torch\nassert vars(torch.functional)['name'] == 'executed'\n"
    said = run(FINDERS + script + "assert not any(type(f).__name__ == 'LazyFinder' for f in sys.meta_path)")
    assert "importing torch plainly: " in said


def test_another_version_is_imported_plainly(tmp_path: Path) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "version.py").write_text("__version__ = '1.13.1'\n")
    (package / "__init__.py").write_text("from . import functional\nfinders = list(__import__('sys').meta_path)\n")
    (package / "functional.py").write_text("name = 'executed'\n")
    run(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        + LEAN
        + """
from medusa_runtime.imports.lazy_modules import LazyFinder
assert vars(torch.functional)["name"] == "executed"
assert not any(type(finder) is LazyFinder for finder in torch.finders)
complete()
"""
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("lazy_torch.TESTED_PYTHONS = ((3, 10),)", "the lean import was tested with CPython 3.10"),
        ("sys.implementation.name = 'pypy'", f"pypy {{}}.{{}}, the lean import was tested with CPython {PYTHONS}"),
    ],
)
def test_another_python_imports_plainly_and_says_so_once(change: str, said: str, tmp_path: Path) -> None:
    stand_in(tmp_path)
    script = "import logging, sys; logging.basicConfig(level='INFO', stream=sys.stdout)\n"
    script += f"sys.path[:0] = [{str(tmp_path)!r}]\n"
    script += f"from medusa_runtime.imports import lazy_torch\n{change}\n"
    used = "assert vars(torch.functional)['name'] == 'executed'; lazy_torch.complete()"
    output = run(script + "torch = lazy_torch.import_torch(); " + used)
    (line,) = output.splitlines()
    assert line.startswith("INFO:medusa_runtime.imports.lazy_modules:importing torch plainly: ")
    assert line.endswith(said.format(*sys.version_info[:2]))


def test_this_python_is_a_tested_one() -> None:
    assert sys.version_info[:2] in TESTED_PYTHONS


ENGINE_IMPORT = """
import logging, sys
logging.basicConfig(level="INFO", stream=sys.stdout)  # it would name a reason to import plainly
from medusa_runtime.config import Settings
from medusa_runtime.zygote import load_engine_class
load_engine_class(Settings(torch_import=sys.argv[1], device=sys.argv[2]))
print(type(sys.modules["torch.fx"]).__name__)
"""


@pytest.mark.parametrize(
    ("how", "device", "found"),
    [
        ("auto", "cpu", "LazyModule"),
        ("lean", "cpu", "LazyModule"),
        ("plain", "cpu", "module"),
        ("auto", "cuda", "LazyModule" if version("torch").startswith(_TESTED_ON_GPUS) else "module"),
        ("lean", "cuda", "LazyModule"),
    ],
)
def test_the_engines_torch_is_imported_as_it_was_asked_to(how: str, device: str, found: str) -> None:
    *said, kind = run(ENGINE_IMPORT, how, device).splitlines()
    assert kind == found
    assert bool(said) == (found == "module" and how != "plain"), said


def test_a_setting_that_needs_the_whole_import(tmp_path: Path) -> None:
    stand_in(tmp_path)
    begin = f"import os, sys; os.environ['TORCH_LOGS'] = 'dynamo'; sys.path.insert(0, {str(tmp_path)!r})\n"
    run(begin + LEAN + "assert vars(torch.functional)['name'] == 'executed'")


def test_torch_that_is_there_already_is_returned(plain: Plain) -> None:
    assert plain.same == "True"
