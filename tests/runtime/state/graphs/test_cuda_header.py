"""Every call, structure and constant of the driver and of CUPTI that is used, compared with NVIDIA's own headers.

The fake driver is ours, so it shares our wrong beliefs. The headers do not.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from medusa_runtime.device import cupti
from medusa_runtime.engine.gpu import graph_pool
from medusa_runtime.kernels import build as kernels
from medusa_runtime.load.upload import staging
from medusa_runtime.state.graphs import compiled as compiled_graphs
from medusa_runtime.state.graphs import placement, structs
from medusa_runtime.state.graphs.blueprint import NodeKind
from medusa_runtime.state.graphs.driver import (
    HOST_MEMORY,
    INVALID_VALUE,
    OUT_OF_MEMORY,
    RELAXED_CAPTURE,
    SIGNATURES,
    STICKY,
)
from medusa_runtime.state.graphs.fingerprint import _CAPABILITY_MAJOR, _CAPABILITY_MINOR, _PROCESSORS
from medusa_runtime.state.graphs.materialization import dump
from medusa_runtime.state.graphs.restoration import build

from benchmarks.gpu import environment


def _folders() -> Iterator[Path]:
    """Folders with CUDA 13's headers, from a toolkit or NVIDIA's packages (nvidia-cuda-runtime, nvidia-cuda-cupti)."""
    spec = importlib.util.find_spec("nvidia")
    packages = [Path(folder) for folder in spec.submodule_search_locations or ()] if spec is not None else []
    toolkits = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")), *sorted(Path("/usr/local").glob("cuda-13*"))]
    for root in (*toolkits, *(one for package in packages for one in sorted(package.glob("cu13*")))):
        header = root / "include/cuda.h"
        if (
            header.is_file()
            and header.with_name("cupti.h").is_file()
            and "#define CUDA_VERSION 13" in header.read_text(errors="replace")
        ):
            yield header.parent


FOLDER = next(_folders(), None)
pytestmark = pytest.mark.skipif(
    FOLDER is None or shutil.which("c++") is None, reason="needs CUDA 13's cuda.h and cupti.h (CUDA_HOME) and c++"
)

# What is called without declared types, by device/, kernels/source/staging.c and engine/gpu/graph_pool.c.
UNTYPED = {
    "cuDeviceGetCount": "p",
    "cuDevicePrimaryCtxRelease_v2": "i",
    "cuDeviceTotalMem_v2": "pi",
    "cuGetErrorName": "ip",
    "cuGetErrorString": "ip",
    "cuEventCreate": "pu",
    "cuEventDestroy_v2": "p",
    "cuEventRecord": "pp",
    "cuEventSynchronize": "p",
    "cuMemFreeHost": "p",
    "cuMemHostAlloc": "pzu",
    "cuMemcpyHtoDAsync_v2": "qpzp",
    "cuStreamDestroy_v2": "p",
}

CALLS = r"""
#include <cuda.h>
#include <cstdio>
#include <type_traits>
#define TEXT(x) #x
#define NAME(x) TEXT(x)
template <class T> char letter() {
  if (std::is_same_v<T, const char *>) return 's';
  if (std::is_pointer_v<T>) return 'p';
  if (std::is_same_v<T, unsigned char>) return 'b';
  if (std::is_same_v<T, size_t>) return 'z';
  if (std::is_same_v<T, unsigned long long>) return 'q';
  if (std::is_same_v<T, unsigned>) return 'u';
  return std::is_same_v<T, int> || (std::is_enum_v<T> && sizeof(T) == 4) ? 'i' : '?';
}
template <class... A> void show(const char *name, CUresult (*)(A...)) {
  char letters[] = {letter<A>()..., 0};
  printf("%s %s\n", name, letters);
}
template <> void show(const char *name, CUresult (*)()) { printf("%s\n", name); }
"""


def compiled(source: str, folder: Path, *include: str) -> list[list[str]]:
    """The words of each line that a program prints."""
    assert FOLDER is not None
    (folder / "program.cpp").write_text(source)
    command = ["c++", "-std=c++17", "-I", str(FOLDER), *include, "-c", "-o"]
    subprocess.run([*command, str(folder / "o"), str(folder / "program.cpp")], check=True, timeout=240)
    # The functions are named and not called: there is no driver to link.
    link = ["c++", "-Wl,--unresolved-symbols=ignore-all", "-o", str(folder / "program"), str(folder / "o")]
    subprocess.run(link, check=True, timeout=240)
    said = subprocess.check_output([str(folder / "program")], text=True, timeout=240)
    return [line.split() for line in said.splitlines()]


def test_calls(tmp_path: Path) -> None:
    """Calls have the names that today's header gives them: a plain name can be an older call."""
    calls = SIGNATURES | UNTYPED
    lines = [f"show(NAME({base}), {base});" for base in (re.sub(r"_v\d+$", "", name) for name in calls)]
    found = compiled(CALLS + "int main() {\n" + "\n".join(lines) + "\n}\n", tmp_path)
    assert {name: "".join(letters) for name, *letters in found} == calls


NODE, PROP, ACCESS = structs.KernelNodeParams, structs.MemAllocationProp, structs.MemAccessDesc
INSTANTIATE, MODULE, RESOURCE = structs.InstantiateParams, cupti._Module, cupti._Resource

SIZES = {
    "CUDA_KERNEL_NODE_PARAMS": ctypes.sizeof(NODE),
    "CUDA_MEMSET_NODE_PARAMS": structs.MEMSET_NODE.size,
    "CUDA_MEMCPY3D": structs.MEMCPY_NODE_BYTES,
    "CUgraphEdgeData": structs.EDGE_DATA_BYTES,
    "CUlaunchAttributeValue": structs.ATTRIBUTE_BYTES,
    "CUDA_GRAPH_INSTANTIATE_PARAMS": ctypes.sizeof(INSTANTIATE),
    "CUmemAllocationProp": ctypes.sizeof(PROP),
    "CUmemAccessDesc": ctypes.sizeof(ACCESS),
    "CUmemLocation": ctypes.sizeof(structs.MemLocation),
    "CUtensorMap": 128,
    "CUpti_ModuleResourceData": ctypes.sizeof(MODULE),
    "CUpti_ResourceData": ctypes.sizeof(RESOURCE),
}
OFFSETS = {
    ("CUDA_KERNEL_NODE_PARAMS", "func"): NODE.func.offset,
    ("CUDA_KERNEL_NODE_PARAMS", "gridDimX"): NODE.grid.offset,
    ("CUDA_KERNEL_NODE_PARAMS", "blockDimX"): NODE.block.offset,
    ("CUDA_KERNEL_NODE_PARAMS", "sharedMemBytes"): NODE.shared_bytes.offset,
    ("CUDA_KERNEL_NODE_PARAMS", "kernelParams"): NODE.params.offset,
    ("CUDA_KERNEL_NODE_PARAMS", "extra"): NODE.extra.offset,
    ("CUDA_KERNEL_NODE_PARAMS", "kern"): NODE.kern.offset,
    ("CUDA_KERNEL_NODE_PARAMS", "ctx"): NODE.ctx.offset,
    ("CUDA_MEMSET_NODE_PARAMS", "dst"): structs.MEMSET_POINTERS[0],
    ("CUDA_MEMSET_NODE_PARAMS", "width"): 24,
    ("CUDA_MEMCPY3D", "srcMemoryType"): structs.MEMCPY_TYPES[0],
    ("CUDA_MEMCPY3D", "srcDevice"): structs.MEMCPY_POINTERS[0],
    ("CUDA_MEMCPY3D", "dstMemoryType"): structs.MEMCPY_TYPES[1],
    ("CUDA_MEMCPY3D", "dstDevice"): structs.MEMCPY_POINTERS[1],
    ("CUDA_GRAPH_INSTANTIATE_PARAMS", "hUploadStream"): INSTANTIATE.upload_stream.offset,
    ("CUDA_GRAPH_INSTANTIATE_PARAMS", "hErrNode_out"): INSTANTIATE.error_node.offset,
    ("CUDA_GRAPH_INSTANTIATE_PARAMS", "result_out"): INSTANTIATE.result.offset,
    ("CUmemAllocationProp", "location"): PROP.location.offset,
    ("CUmemAllocationProp", "allocFlags"): PROP.flags.offset,
    ("CUmemLocation", "id"): structs.MemLocation.id.offset,
    ("CUmemAccessDesc", "flags"): ACCESS.flags.offset,
    ("CUpti_ModuleResourceData", "cubinSize"): MODULE.size.offset,
    ("CUpti_ModuleResourceData", "pCubin"): MODULE.image.offset,
    ("CUpti_ResourceData", "resourceDescriptor"): RESOURCE.described.offset,
}
CONSTANTS = {
    "CUDA_ERROR_INVALID_VALUE": INVALID_VALUE,
    "CUDA_ERROR_OUT_OF_MEMORY": OUT_OF_MEMORY,
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": _CAPABILITY_MAJOR,
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": _CAPABILITY_MINOR,
    "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT": _PROCESSORS,
    **{f"CU_DEVICE_ATTRIBUTE_{name}": number for name, number in environment._ATTRIBUTES.items()},
    "CU_POINTER_ATTRIBUTE_MEMORY_TYPE": 2,  # CudaDriver.on_host
    "CU_MEMORYTYPE_HOST": HOST_MEMORY,
    "CU_STREAM_CAPTURE_MODE_RELAXED": RELAXED_CAPTURE,
    "CU_POINTER_ATTRIBUTE_RANGE_START_ADDR": 11,  # CudaDriver.range_of
    "CU_POINTER_ATTRIBUTE_RANGE_SIZE": 12,
    "CU_GRAPH_NODE_TYPE_KERNEL": NodeKind.KERNEL,
    "CU_GRAPH_NODE_TYPE_MEMCPY": NodeKind.MEMCPY,
    "CU_GRAPH_NODE_TYPE_MEMSET": NodeKind.MEMSET,
    "CU_GRAPH_NODE_TYPE_EMPTY": NodeKind.EMPTY,
    "CU_MEMORYTYPE_DEVICE": structs.MEMORY_TYPE_DEVICE,
    "CU_MEMORYTYPE_UNIFIED": structs.MEMORY_TYPE_UNIFIED,
    "CU_MEM_ALLOCATION_TYPE_PINNED": placement._PINNED,
    "CU_MEM_LOCATION_TYPE_DEVICE": placement._DEVICE,
    "CU_MEM_ACCESS_FLAGS_PROT_READWRITE": placement._READ_WRITE,
    "CU_MEM_ALLOC_GRANULARITY_MINIMUM": 0,  # placement.place
    "CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD": build._UPLOAD,
    "CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY": build._USE_NODE_PRIORITY,
    "CU_FUNC_ATTRIBUTE_NUM_REGS": dump.REGISTERS,
    "CUPTI_CB_DOMAIN_RESOURCE": cupti._RESOURCE,
    "CUPTI_CBID_RESOURCE_MODULE_LOADED": cupti._MODULE_LOADED,
    "CUPTI_CB_DOMAIN_DRIVER_API": cupti._DRIVER_API,
    "CUPTI_API_EXIT": 1,  # module_recorder.c
}
LISTS = {
    "CU_LAUNCH_ATTRIBUTE_": (
        dump.NODE_ATTRIBUTES,
        "ACCESS_POLICY_WINDOW COOPERATIVE CLUSTER_DIMENSION CLUSTER_SCHEDULING_POLICY_PREFERENCE "
        "PROGRAMMATIC_STREAM_SERIALIZATION PRIORITY "
        "MEM_SYNC_DOMAIN_MAP MEM_SYNC_DOMAIN PREFERRED_CLUSTER_DIMENSION DEVICE_UPDATABLE_KERNEL_NODE "
        "PREFERRED_SHARED_MEMORY_CARVEOUT",
    ),
    "CU_FUNC_ATTRIBUTE_": (
        dump.FUNCTION_ATTRIBUTES,
        "SHARED_SIZE_BYTES CONST_SIZE_BYTES LOCAL_SIZE_BYTES NUM_REGS PTX_VERSION BINARY_VERSION "
        "MAX_DYNAMIC_SHARED_SIZE_BYTES PREFERRED_SHARED_MEMORY_CARVEOUT NON_PORTABLE_CLUSTER_SIZE_ALLOWED",
    ),
    "CUPTI_DRIVER_TRACE_CBID_": (cupti._LOADS, "cuModuleLoad cuModuleLoadData cuModuleLoadDataEx cuLibraryLoadData"),
    "CUDA_ERROR_": (
        STICKY,
        "CONTAINED ILLEGAL_ADDRESS LAUNCH_TIMEOUT ASSERT HARDWARE_STACK_ERROR ILLEGAL_INSTRUCTION MISALIGNED_ADDRESS "
        "INVALID_ADDRESS_SPACE INVALID_PC LAUNCH_FAILED TENSOR_MEMORY_LEAK EXTERNAL_DEVICE",
    ),
    "CU_GRAPH_NODE_TYPE_": (
        tuple(dump._NODE_KINDS),
        "HOST GRAPH WAIT_EVENT EVENT_RECORD EXT_SEMAS_SIGNAL EXT_SEMAS_WAIT MEM_ALLOC MEM_FREE BATCH_MEM_OP "
        "CONDITIONAL",
    ),
}


def test_structures_and_constants(tmp_path: Path) -> None:
    wanted: dict[str, int] = {f"sizeof({name})": size for name, size in SIZES.items()}
    wanted |= {f"offsetof({name},{field})": at for (name, field), at in OFFSETS.items()}
    wanted |= {name: int(value) for name, value in CONSTANTS.items()}
    for prefix, (values, names) in LISTS.items():
        wanted |= {prefix + name: value for name, value in zip(names.split(), values, strict=True)}
    lines = [f'printf("{expression} %lld\\n", (long long)({expression}));' for expression in wanted]
    includes = "#include <cuda.h>\n#include <cupti.h>\n#include <cstddef>\n#include <cstdio>\n"
    found = compiled(includes + "int main() {\n" + "\n".join(lines) + "\n}\n", tmp_path)
    assert {name: int(value) for name, value in found} == wanted


def test_every_error_that_breaks_a_context_is_known() -> None:
    """The header says of each such error that the process is left in an inconsistent state, or the context unusable."""
    assert FOLDER is not None
    found, said = set(), ""
    for line in (FOLDER / "cuda.h").read_text(errors="replace").splitlines():
        said += line.replace("*", " ") + " "
        if number := re.match(r"\s*CUDA_ERROR_\w+\s*= (\d+)", line):
            words = " ".join(said.split())
            if "inconsistent state" in words or "cannot be used anymore" in words:
                found.add(int(number[1]))
            said = ""
    assert found == set(STICKY)


def test_default_of_memory_domains(tmp_path: Path) -> None:
    source = """
#include <cuda.h>
#include <cstdio>
int main() {
  CUlaunchAttributeValue value = {};
  value.memSyncDomainMap.default_ = CU_LAUNCH_MEM_SYNC_DOMAIN_DEFAULT;
  value.memSyncDomainMap.remote = CU_LAUNCH_MEM_SYNC_DOMAIN_REMOTE;
  printf("%02x%02x\\n", (unsigned char)value.pad[0], (unsigned char)value.pad[1]);
}
"""
    assert compiled(source, tmp_path) == [[dump._DEFAULTS[9].hex()]]


def test_the_recorder_in_c_reads_what_cupti_hands_over(tmp_path: Path) -> None:
    pairs = {
        ("Module", "size"): ("CUpti_ModuleResourceData", "cubinSize"),
        ("Module", "image"): ("CUpti_ModuleResourceData", "pCubin"),
        ("Resource", "described"): ("CUpti_ResourceData", "resourceDescriptor"),
        ("Call", "site"): ("CUpti_CallbackData", "callbackSite"),
        ("Call", "parameters"): ("CUpti_CallbackData", "functionParams"),
        ("Call", "result"): ("CUpti_CallbackData", "functionReturnValue"),
        ("Load ", "handle"): ("cuModuleLoad_params", "module"),
        ("Load ", "code"): ("cuModuleLoad_params", "fname"),
        ("Load", "handle"): ("cuModuleLoadData_params", "module"),
        ("Load", "code"): ("cuModuleLoadData_params", "image"),
        ("Load", "handle "): ("cuModuleLoadDataEx_params", "module"),
        ("Load", "code "): ("cuModuleLoadDataEx_params", "image"),
        (" Load", "handle"): ("cuLibraryLoadData_params", "library"),
        (" Load", "code"): ("cuLibraryLoadData_params", "code"),
    }
    checks = [
        f'_Static_assert(offsetof({ours[0]}, {ours[1]}) == offsetof({theirs[0]}, {theirs[1]}), "{ours}");'
        for ours, theirs in pairs.items()
    ]
    includes = ["#include <cuda.h>", "#include <stddef.h>", "#include <cupti.h>", f'#include "{cupti._SOURCE}"']
    (tmp_path / "program.c").write_text("\n".join([*includes, *checks, ""]))
    command = ["cc", "-I", str(FOLDER), "-fsyntax-only", str(tmp_path / "program.c")]
    subprocess.run(command, check=True, timeout=240)


def test_the_pool_in_c_calls_the_driver_as_it_is(tmp_path: Path) -> None:
    source = graph_pool._SOURCE.read_text()
    calls = dict(re.findall(r'driver\.(\w+) = dlsym\(cuda, "(\w+)"\)', source))
    assert len(calls) == 8
    assert set(calls.values()) <= SIGNATURES.keys() | UNTYPED.keys(), "their names are compared above"
    equal = {
        "sizeof(Properties)": "sizeof(CUmemAllocationProp)",
        "offsetof(Properties, location)": "offsetof(CUmemAllocationProp, location)",
        "offsetof(Properties, flags)": "offsetof(CUmemAllocationProp, allocFlags)",
        "sizeof(Access)": "sizeof(CUmemAccessDesc)",
        "offsetof(Access, flags)": "offsetof(CUmemAccessDesc, flags)",
        "offsetof(Location, number)": "offsetof(CUmemLocation, id)",
        "PINNED": "CU_MEM_ALLOCATION_TYPE_PINNED",
        "ON_DEVICE": "CU_MEM_LOCATION_TYPE_DEVICE",
        "READ_WRITE": "CU_MEM_ACCESS_FLAGS_PROT_READWRITE",
        "RELAXED": "CU_STREAM_CAPTURE_MODE_RELAXED",
    }
    checks = [f'_Static_assert((int)({ours}) == (int)({theirs}), "{ours}");' for ours, theirs in equal.items()]
    compare_calls(calls, source)
    compile_checks(tmp_path, graph_pool._SOURCE, checks)


def test_staging_in_c_calls_the_driver_as_it_is(tmp_path: Path) -> None:
    source = kernels.SOURCE_DIR / "staging.c"
    compare_calls(staging._FUNCTIONS, source.read_text())
    equal = {
        "NON_BLOCKING": "CU_STREAM_NON_BLOCKING",
        "SLEEPING": "(CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING)",
    }
    checks = [f'_Static_assert((int){ours} == (int){theirs}, "{ours}");' for ours, theirs in equal.items()]
    compile_checks(tmp_path, source, checks)


def test_the_builder_in_c_calls_the_driver_as_it_is(tmp_path: Path) -> None:
    path = kernels.SOURCE_DIR / "graphs.c"
    source = path.read_text()
    calls = re.findall(r"^    int \(\*(cu\w+)\)\(([^)]*)\);", source, re.MULTILINE)
    assert tuple(name for name, _ in calls) == compiled_graphs.CALLS
    kinds = {"size_t": "z", "int": "i"}  # everything else is a pointer or a handle
    for name, arguments in calls:
        ours = "".join(kinds.get(argument.strip().rpartition(" ")[0], "p") for argument in arguments.split(","))
        assert ours == SIGNATURES[name], "compared with the header above"
    pairs = {
        "func": "func",
        "grid": "gridDimX",
        "block": "blockDimX",
        "shared_bytes": "sharedMemBytes",
        "params": "kernelParams",
        "extra": "extra",
        "kern": "kern",
        "context": "ctx",
    }
    equal = {
        "sizeof(struct kernel_node)": "sizeof(CUDA_KERNEL_NODE_PARAMS)",
        "MEMSET_BYTES": "sizeof(CUDA_MEMSET_NODE_PARAMS)",
        "MEMCPY_BYTES": "sizeof(CUDA_MEMCPY3D)",
        "MAP_BYTES": "sizeof(CUtensorMap)",
        "ALIGNMENT": "_Alignof(CUtensorMap)",
        "ATTRIBUTE_BYTES": "sizeof(CUlaunchAttributeValue)",
        "sizeof(((struct edge *)0)->data)": "sizeof(CUgraphEdgeData)",
        "PROGRAMMATIC": "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION",
        "PRIORITY": "CU_LAUNCH_ATTRIBUTE_PRIORITY",
        **{name: f"CU_GRAPH_NODE_TYPE_{name}" for name in ("KERNEL", "MEMCPY", "MEMSET", "EMPTY")},
        **{
            f"offsetof(struct kernel_node, {ours})": f"offsetof(CUDA_KERNEL_NODE_PARAMS, {theirs})"
            for ours, theirs in pairs.items()
        },
    }
    checks = [f'_Static_assert((int)({ours}) == (int)({theirs}), "{ours}");' for ours, theirs in equal.items()]
    compile_checks(tmp_path, path, checks)


def compare_calls(calls: Mapping[str, str], source: str) -> None:
    """Enumerations and handles are an int and pointers to the caller, so only the number of arguments is left."""
    for ours, theirs in calls.items():
        arguments = re.search(rf"\(\*{ours}\)\(([^)]*)\)", source)
        assert arguments is not None
        assert len(arguments[1].split(",")) == len((SIGNATURES | UNTYPED)[theirs])


def compile_checks(folder: Path, source: Path, checks: Sequence[str]) -> None:
    assert FOLDER is not None
    includes = ["#include <cuda.h>", "#include <stddef.h>", f'#include "{source}"']
    (folder / "program.c").write_text("\n".join([*includes, *checks, ""]))
    command = ["cc", "-I", str(FOLDER), "-fsyntax-only", str(folder / "program.c")]
    subprocess.run(command, check=True, timeout=240)
