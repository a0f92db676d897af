"""The driver's calls and structures, on the fake driver; ``test_cuda_header.py`` has NVIDIA's headers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.errors import DeviceError

SCRIPT = """
import os, ctypes, struct
from ctypes import byref, c_uint64
from pathlib import Path
from medusa_runtime.state.graphs import CudaDriver
from medusa_runtime.state.graphs.driver import CudaError
from medusa_runtime.state.graphs.dump import dump_graphs, edges_of
from medusa_runtime.state.graphs.structs import KERNEL_NODE
import medusa_runtime.state.graphs.driver as bindings
bindings.SIGNATURES["cuMemAlloc_v2"] = "pz"

def fails(function, *arguments):
    try:
        driver.call(function, *arguments)
    except CudaError as error:
        return str(error)
    raise AssertionError(function)

driver = CudaDriver(os.environ["FAKE_CUDA_LIBRARY"])
"""


@pytest.fixture
def python(fake_cuda: Path, cubins: Path) -> Any:
    def run(code: str) -> str:
        variables = {**os.environ, "FAKE_CUDA_LIBRARY": str(fake_cuda), "TOY_CUBINS": str(cubins)}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT + code], env=variables, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


CONTEXT = """
driver.call("cuInit", 0)
driver.call("cuCtxSetCurrent", driver.handle("cuDevicePrimaryCtxRetain", 0))
graph = driver.handle("cuGraphCreate", 0)
library = driver.handle("cuLibraryLoadData", Path(os.environ["TOY_CUBINS"], "toy_a.cubin").read_bytes(),
                        None, None, 0, None, None, 0)
"""


def test_errors_are_named(python: Any) -> None:
    said = python(
        """
print(fails("cuDeviceGet", byref(c_uint64()), 0))
try:
    driver.current_context()
except Exception as error:
    print(type(error).__name__, error)
try:
    bindings.SIGNATURES["cuNewerThanThis"] = ""
    driver.call("cuNewerThanThis")
except Exception as error:
    print(error)
"""
    ).splitlines()
    assert said[0] == "cuDeviceGet failed: CUDA_ERROR_NOT_INITIALIZED (3)"
    assert said[1].startswith("DeviceError expected a current CUDA context in this thread, found none")
    assert said[2].endswith("has no cuNewerThanThis; expected the driver of CUDA 12.4 or newer")


def test_no_driver() -> None:
    from medusa_runtime.state.graphs import CudaDriver

    with pytest.raises(DeviceError, match="cannot be loaded"):
        CudaDriver("libno-cuda-here.so")


def test_wrong_handles(python: Any) -> None:
    """A handle of another kind, of another process or of something closed is an error, and no crash."""
    said = python(
        CONTEXT
        + """
kernel = driver.handle("cuLibraryGetKernel", library, b"scale")
for handle in (kernel, 0x550000000008, 1 << 60):
    print(fails("cuGraphGetNodes", handle, None, byref(c_uint64())))
params = KERNEL_NODE.pack(0, 1, 1, 1, 1, 1, 1, 0, 0, 0, graph, 0)
print(fails("cuGraphAddKernelNode_v2", byref(c_uint64()), graph, None, 0, params))
driver.call("cuLibraryUnload", library)
params = KERNEL_NODE.pack(0, 1, 1, 1, 1, 1, 1, 0, 0, 0, kernel, 0)
print(fails("cuGraphAddKernelNode_v2", byref(c_uint64()), graph, None, 0, params))
driver.call("cuGraphDestroy", graph)
print(fails("cuGraphGetNodes", graph, None, byref(c_uint64())))
"""
    ).splitlines()
    assert len(said) == 6
    assert all(line.endswith("failed: CUDA_ERROR_INVALID_HANDLE (400)") for line in said)


def test_packed_parameters_are_read(python: Any) -> None:
    """A launch with ``extra`` hands its parameters over in one buffer; much shared memory must be allowed first."""
    said = python(
        CONTEXT
        + """
kernel = driver.handle("cuLibraryGetKernel", library, b"wide")
x = driver.handle("cuMemAlloc_v2", 64)
values = ctypes.create_string_buffer(struct.pack("<Qi", x, 16), 12)
size = c_uint64(12)
extra = (c_uint64 * 5)(1, ctypes.addressof(values), 2, ctypes.addressof(size), 0)
params = KERNEL_NODE.pack(0, 2, 1, 1, 32, 1, 1, 65536, 0, ctypes.addressof(extra), kernel, 0)
print(fails("cuGraphAddKernelNode_v2", byref(c_uint64()), graph, None, 0, params))
driver.call("cuKernelSetAttribute", 8, 65536, kernel, 0)
driver.call("cuGraphAddKernelNode_v2", byref(c_uint64()), graph, None, 0, params)
dump = dump_graphs(driver, {"g": graph}, [])
print(dump.graphs[0].blob == struct.pack("<Qi", x, 16), dump.graphs[0].nodes[0], dump.kernels[0].attributes)
"""
    ).splitlines()
    assert said[0].endswith("CUDA_ERROR_INVALID_VALUE (1)")
    assert said[1].startswith("True Node(kind=")
    assert "grid=(2, 1, 1), block=(32, 1, 1), shared_bytes=65536, start=0, size=12" in said[1]
    assert "(8, 65536)" in said[1]


def test_edges_are_asked_for_with_their_data(python: Any) -> None:
    said = python(
        CONTEXT
        + """
nodes = (c_uint64 * 2)()
kernel = driver.handle("cuLibraryGetKernel", library, b"scale")
values = ctypes.create_string_buffer(struct.pack("<Qif", 0, 0, 0.0), 16)
at = ctypes.addressof(values)
pointers = (c_uint64 * 3)(at, at + 8, at + 12)
params = KERNEL_NODE.pack(0, 1, 1, 1, 1, 1, 1, 0, ctypes.addressof(pointers), 0, kernel, 0)
for n in range(2):
    driver.call("cuGraphAddKernelNode_v2", ctypes.addressof(nodes) + 8 * n, graph, None, 0, params)
driver.call("cuGraphAddDependencies_v2", graph, nodes, byref(nodes, 8), bytes([1, 0, 1, 0, 0, 0, 0, 0]), 1)
count = c_uint64(1)
print(fails("cuGraphGetEdges_v2", graph, nodes, nodes, None, byref(count)))
print([data for _, _, data in edges_of(driver, graph)])
"""
    ).splitlines()
    assert said[0].endswith("CUDA_ERROR_LOSSY_QUERY (402)")
    assert said[1] == r"[b'\x01\x00\x01\x00\x00\x00\x00\x00']"
