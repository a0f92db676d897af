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
from medusa_runtime.state.graphs.materialization.dump import dump_graphs, edges_of
import medusa_runtime.state.graphs.driver as bindings
KERNEL_NODE = struct.Struct("<Q3I3II4xQQQQ")  # structs.KernelNodeParams
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
    def run(code: str, **environment: str) -> str:
        variables = {**os.environ, "FAKE_CUDA_LIBRARY": str(fake_cuda), "TOY_CUBINS": str(cubins), **environment}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT + code], env=variables, capture_output=True, text=True, timeout=240
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
    bindings.SIGNATURES["cuNewerThanThis"] = "pp"
    driver.call("cuNewerThanThis", None, None)
except Exception as error:
    print(error)
print(driver.optional("cuNewerThanThis", 5))  # as cuKernelGetLibrary is to drivers before CUDA 12.5
"""
    ).splitlines()
    assert said[0] == "cuDeviceGet failed: CUDA_ERROR_NOT_INITIALIZED (3)"
    assert said[1].startswith("DeviceError expected a current CUDA context in this thread, found none")
    assert said[2].endswith("has no cuNewerThanThis; expected the driver of CUDA 12.4 or newer")
    assert said[3] == "0"


def test_no_driver() -> None:
    from medusa_runtime.state.graphs import CudaDriver

    with pytest.raises(DeviceError, match="cannot be loaded"):
        CudaDriver("libno-cuda-here.so")


@pytest.mark.parametrize(
    ("code", "broken"), [(700, True), (710, True), (702, True), (1, False), (2, False), (900, False)]
)
def test_errors_that_break_the_context(code: int, broken: bool) -> None:
    """710 is a failed assertion, such as torch's checks of indices; the context is lost as with an illegal address."""
    from medusa_runtime.state.graphs.driver import CudaError

    assert CudaError("cuStreamSynchronize", code, "").sticky is broken


def test_wrong_handles(python: Any) -> None:
    """A handle of another kind, another process or a closed object is an error and not a crash."""
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
    """A launch with ``extra`` passes its parameters in one buffer.

    Much shared memory must be allowed first, on the kernel's function in the context.
    """
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
print(fails("cuGraphAddKernelNode_v2", byref(c_uint64()), graph, None, 0, params))
driver.call("cuFuncSetAttribute", driver.handle("cuKernelGetFunction", kernel), 8, 65536)
driver.call("cuGraphAddKernelNode_v2", byref(c_uint64()), graph, None, 0, params)
dump = dump_graphs(driver, {"g": graph}, [])
print(dump.graphs[0].blob == struct.pack("<Qi", x, 16), dump.graphs[0].nodes[0], dump.kernels[0].attributes)
"""
    ).splitlines()
    assert said[0].endswith("CUDA_ERROR_INVALID_VALUE (1)")
    assert said[1].endswith("CUDA_ERROR_INVALID_VALUE (1)"), "the function in the context does not inherit it"
    assert said[2].startswith("True Node(kind=")
    assert "grid=(2, 1, 1), block=(32, 1, 1), shared_bytes=65536, start=0, size=12" in said[2]
    assert "(8, 65536)" in said[2]


WIDE = """
kernel = driver.handle("cuLibraryGetKernel", library, b"wide")
values = ctypes.create_string_buffer(struct.pack("<Qi", 0x1234, 16), 12)
pointers = (c_uint64 * 2)(ctypes.addressof(values), ctypes.addressof(values) + 8)
params = KERNEL_NODE.pack(0, 2, 1, 1, 32, 1, 1, 1024, ctypes.addressof(pointers), 0, kernel, 0)
node = driver.handle("cuGraphAddKernelNode_v2", graph, None, 0, params)
images = ImageStore([Path(os.environ["TOY_CUBINS"], "toy_a.cubin").read_bytes()])
"""


@pytest.mark.parametrize("environment", [{}, {"FAKE_CUDA_CAST": "1"}, {"FAKE_CUDA_NO_MODULES": "1"}])
def test_a_kernel_in_place_of_a_function(python: Any, environment: dict[str, str]) -> None:
    """CUDA's runtime launches a CUkernel as if it were a CUfunction, and not every function has a module."""
    said = python(
        "from medusa_runtime.state.graphs.materialization.images import ImageStore"
        + CONTEXT
        + WIDE
        + """
dump = dump_graphs(driver, {"g": graph}, [], images=images)
print(dump.refused, dump.kernels[0].name, bool(dump.kernels[0].image), dump.kernels[0].parameters,
      dict(dump.kernels[0].attributes)[8], dump.graphs[0].blob == values.raw)
""",
        **environment,
    )
    assert said == "{} wide True ((0, 8), (8, 4)) 1024 True\n"


def test_nodes_that_cannot_be_read_are_refused_by_themselves(python: Any) -> None:
    """If the driver fails for one graph, the others are kept."""
    said = python(
        "from medusa_runtime.state.graphs.materialization.images import ImageStore"
        + CONTEXT
        + WIDE
        + """
other = driver.handle("cuGraphCreate", 0)
changed = driver.handle("cuGraphAddKernelNode_v2", other, None, 0, params)
driver.call("cuGraphKernelNodeSetAttribute", changed, 13, struct.pack("<iiQ", 1, 0, 77) + bytes(48))
import medusa_runtime.state.graphs.materialization.dump as dumping
real = dumping.CudaDriver.result
def failing(self, function, *arguments):
    if function == "cuKernelGetParamInfo" and arguments[1] == 1 and broken:
        return 201
    return real(self, function, *arguments)
dumping.CudaDriver.result = failing
for broken in (False, True):
    dump = dump_graphs(driver, {"g": graph, "changed": other, "gone": 3}, [])
    print([one.key for one in dump.graphs])
    print(*sorted(dump.refused.items()), sep="\\n")
"""
    ).splitlines()
    changed, gone = "('changed', 'node-kind: kernels change one of its nodes')", "CUDA_ERROR_INVALID_HANDLE (400)')"
    assert said[:2] == ["['g']", changed]
    assert said[2].startswith("('gone', 'driver-call: cuGraphGetNodes failed")
    assert said[2].endswith(gone)
    assert said[3] == "[]", "a kernel without its parameters was taken"
    assert "('g', 'driver-call: cuKernelGetParamInfo failed" in said[5]


@pytest.mark.parametrize("compiler", ["cc", "false"])
def test_loaded_modules_are_recorded(python: Any, compiler: str) -> None:
    """The callback is in C, which waits for no lock of Python's, or in Python where there is no compiler."""
    said = python(
        """
from medusa_runtime.device.cupti import ModuleRecorder
with ModuleRecorder(os.environ["FAKE_CUDA_LIBRARY"]) as recorder:
    print(recorder.error, recorder._native is None, recorder.images)
"""
        + CONTEXT.replace("\n", "\n    ")
        + """
    driver.handle("cuLibraryLoadData", Path(os.environ["TOY_CUBINS"], "toy_a.cubin").read_bytes(),
                  None, None, 0, None, None, 0)
    driver.handle("cuLibraryLoadData", Path(os.environ["TOY_CUBINS"], "toy_b.cubin").read_bytes(),
                  None, None, 0, None, None, 0)
wanted = [Path(os.environ["TOY_CUBINS"], name).read_bytes() for name in ("toy_a.cubin", "toy_b.cubin")]
print(recorder.images == wanted, recorder.images == wanted)
""",
        CC=compiler,
    )
    assert said == f"None {compiler == 'false'} []\nTrue True\n"


def test_a_module_that_is_loaded_from_a_file_is_recorded_with_its_handle(python: Any) -> None:
    """So that kernels of the same name can be told apart; Inductor's are loaded so."""
    said = python(
        """
import ctypes, hashlib
from medusa_runtime.device.cupti import ModuleRecorder
fake = ctypes.CDLL(os.environ["FAKE_CUDA_LIBRARY"])
cubins, handles = Path(os.environ["TOY_CUBINS"]), []
with ModuleRecorder(os.environ["FAKE_CUDA_LIBRARY"]) as recorder:
"""
        + CONTEXT.replace("\n", "\n    ")
        + """
    for name in ("toy_a.cubin", "toy_b.cubin", "missing.cubin"):
        handle = ctypes.c_void_p()
        print(fake.cuModuleLoad(ctypes.byref(handle), os.fsencode(cubins / name)))
        handles.append(handle.value)
wanted = [hashlib.sha256((cubins / name).read_bytes()).hexdigest() for name in ("toy_a.cubin", "toy_b.cubin")]
print([recorder.handles[handle] for handle in handles[:2]] == wanted, len(recorder.images))
"""
    )
    assert said == "0\n0\n301\nTrue 2\n"


def test_without_cupti_no_image_is_recorded_and_nothing_fails(python: Any) -> None:
    said = python(
        """
from medusa_runtime.device.cupti import ModuleRecorder
with ModuleRecorder("libno-cupti-here.so") as recorder:
    print(recorder.images, recorder.error)
with ModuleRecorder(os.environ["FAKE_CUDA_LIBRARY"]), ModuleRecorder(os.environ["FAKE_CUDA_LIBRARY"]) as recorder:
    print(recorder.images, recorder.error)
"""
    ).splitlines()
    assert said[0].startswith("[] expected CUPTI")
    assert said[1].startswith("[] cuptiSubscribe failed: CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED (39)")


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


def test_a_kernel_that_is_local_to_its_image_is_found(python: Any) -> None:
    """cuLibraryGetKernel need not know it by its name; its library lists it."""
    out = python(
        CONTEXT
        + """
from medusa_runtime.state.graphs.blueprint import Blueprints, KernelRecord
from medusa_runtime.state.graphs.materialization.cubin import parse_cubin
from medusa_runtime.state.graphs.restoration.kernels import KernelFinder
image = (Path(os.environ["TOY_CUBINS"]) / "toy_g.cubin").read_bytes()
(local,) = (name for name in parse_cubin(image).kernels if "count_twice" in name)
kernels = tuple(KernelRecord(name, "image", ((0, 8),), ()) for name in ("count", local))
finder = KernelFinder(driver, Blueprints(kernels=kernels, images={"image": image}))
for number in range(2):
    print(driver.text("cuKernelGetName", finder.handle(number, "decode").kern))
"""
    )
    first, second = out.split()
    assert first == "count"
    assert second.endswith("count_twiceEPi")


def test_images_are_loaded_in_the_order_in_which_they_are_needed(python: Any) -> None:
    """Their threads find the kernels, too. What the driver refuses there is asked for again, and named."""
    out = python(
        CONTEXT
        + """
from threading import current_thread
from medusa_runtime.state.graphs.blueprint import Blueprints, KernelRecord
from medusa_runtime.state.graphs.materialization.cubin import parse_cubin
from medusa_runtime.state.graphs.mismatch import GraphMismatch
from medusa_runtime.state.graphs.restoration import kernels as restoration

class Recording(type(driver)):
    calls = []
    def result(self, function, *arguments):
        self.calls.append((function, current_thread().name))
        return super().result(function, *arguments)

images = {name: (Path(os.environ["TOY_CUBINS"]) / f"{name}.cubin").read_bytes() for name in ("toy_a", "toy_b", "toy_g")}
names = {image: next(iter(parse_cubin(data).kernels)) for image, data in images.items()}
records = [KernelRecord(name, image, (), ((8, 1024),)) for image, name in names.items()]
records.append(KernelRecord("absent", "toy_b", (), ()))
restoration._LOADERS = 1
driver = Recording(os.environ["FAKE_CUDA_LIBRARY"])
finder = restoration.KernelFinder(driver, Blueprints(kernels=tuple(records), images=images))
finder.begin_loading(["toy_g", "toy_b"])
finder.begin_loading(["toy_a"])
print(*finder._libraries)
for number in range(3):
    print(driver.text("cuKernelGetName", finder.handle(number, "decode").kern) == records[number].name)
print({thread for function, thread in driver.calls if function == "cuFuncSetAttribute"})
try:
    finder.handle(3, "decode")
except GraphMismatch as mismatch:
    print(mismatch)
asked = [thread for function, thread in driver.calls if function == "cuLibraryGetKernelCount"]
print(asked[-2:])
finder.close()
print(sum(function == "cuLibraryUnload" for function, _ in driver.calls))
"""
    ).splitlines()
    assert out[:4] == ["toy_g toy_b toy_a", "True", "True", "True"]
    assert out[4] == "{'kernel images_0'}"
    assert out[5].startswith("kernel-missing: absent is not in its image: cuLibraryGetKernel failed")
    assert out[6:] == ["['kernel images_0', 'MainThread']", "3"]
