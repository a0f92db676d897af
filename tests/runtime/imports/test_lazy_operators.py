"""Operators that torch or a program defines after a lean import."""

from __future__ import annotations

from collections.abc import Callable

OPERATORS = """
from medusa_runtime.imports.lazy_torch import complete

def define(name):
    torch._TritonLibrary.registerOp(name, f"{name}(Tensor x) -> Tensor", torch.neg, "CPU")

def negates(name):
    return getattr(torch.ops.triton, name)(torch.ones(2)).tolist() == [-1, -1]
"""


def test_what_torch_does_when_cuda_is_initialized_executes_nothing(run_lean: Callable[..., str]) -> None:
    """It defines operators of triton then, where triton is installed. Nothing else shows this without a GPU."""
    run_lean(
        OPERATORS
        + """
import sys
define("first")
define("second")
assert type(sys.modules["torch.fx"]).__name__ == "LazyModule"
assert negates("first")
complete()
define("third")
library = torch._TritonLibrary.lib
library.define("fourth(Tensor x) -> Tensor")
library.impl("fourth", torch.neg, "CPU")
assert all(map(negates, ("first", "second", "third", "fourth")))
assert type(library).__name__ == "Library"
"""
    )


def test_operators_are_defined_behind_other_uses(run_lean: Callable[..., str]) -> None:
    run_lean(OPERATORS + 'torch.fx.Graph\ndefine("first")\ncomplete()\ndefine("second")\nassert negates("second")')
    run_lean(OPERATORS + 'assert torch._TritonLibrary.lib.ns == "triton"\ndefine("first")\nassert negates("first")')
