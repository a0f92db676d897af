"""Read captured graphs from the driver: nodes, parameters, attributes, and edges with their data."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Iterable, Mapping
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint64, c_void_p

from ..blueprint import (
    AttributeSet,
    Blueprints,
    Edge,
    GraphBlueprint,
    KernelRecord,
    MemoryRange,
    Node,
    NodeKind,
    Piece,
    RangeKind,
)
from ..driver import INVALID_VALUE, CudaDriver, CudaError
from ..mismatch import GraphMismatch, Reason
from ..structs import (
    ATTRIBUTE_BYTES,
    EDGE_DATA_BYTES,
    MEMCPY_NODE_BYTES,
    MEMCPY_TYPES,
    MEMORY_TYPE_DEVICE,
    MEMORY_TYPE_UNIFIED,
    MEMSET_NODE,
    PROGRAMMATIC,
    KernelNodeParams,
)
from .host_memory import own_memory
from .images import ImageStore

# CUlaunchAttributeID: access policy window, cooperative, cluster dimension and scheduling, programmatic serialization,
# priority, memory domains, preferred cluster, device-updatable, carveout. Values that are zero or the driver's default
# are left out.
NODE_ATTRIBUTES = (1, 2, 4, 5, PROGRAMMATIC, 8, 9, 10, 11, 13, 14)
# CUfunction_attribute. What the compiler set (static shared, constant and local memory, registers, versions)
# distinguishes kernels of one name. Dynamic shared memory, carveout and non-portable clusters are set by the launch.
REGISTERS = 4
IDENTITY = (1, 2, 3, REGISTERS, 5, 6)
_DYNAMIC_SHARED, _NON_PORTABLE = 8, 14
FUNCTION_ATTRIBUTES = (*IDENTITY, _DYNAMIC_SHARED, 9, _NON_PORTABLE)
_CLUSTER = 4  # the launch attribute
_PORTABLE_BLOCKS = 8  # the most blocks of a cluster that need no permission
_DEVICE_UPDATABLE = 13  # kernels change such a node through a handle, which another process does not have
_NODE_KINDS = {
    3: "host",
    4: "child graph",
    6: "event wait",
    7: "event record",
    8: "semaphore signal",
    9: "semaphore wait",
    10: "memory allocation",
    11: "memory release",
    12: "batch memory operation",
    13: "conditional",
}
_ALIGNMENT = 16
# The driver's defaults that are not zero: memory domains {0, 1}, carveout -1.
_DEFAULTS = {9: b"\0\1", 14: b"\xff\xff\xff\xff"}


def dump_graphs(
    driver: CudaDriver, graphs: Mapping[str, int], ranges: Iterable[MemoryRange], *, images: ImageStore | None = None
) -> Blueprints:
    """Read captured graphs as they are, without relocations. ``graphs`` has a CUgraph for each key.

    In torch, a CUgraph comes from ``raw_cuda_graph()``, with ``keep_graph``. ``ranges`` are all device memory into
    which the graphs may point. The variables of ``images``, the cubins that were loaded while capturing, are added. A
    graph with a node that cannot be materialized is in ``refused`` of the result. There must be a current context.
    """
    reader = _GraphReader(driver, images or ImageStore())
    read: list[GraphBlueprint] = []
    refused = {}
    for key, graph in graphs.items():
        try:
            read.append(reader.graph(key, graph))
        except GraphMismatch as mismatch:
            refused[key] = str(mismatch)
        except CudaError as error:
            if error.sticky:
                raise
            refused[key] = str(GraphMismatch(Reason.DRIVER_CALL, str(error)))
    named = tuple(ranges)
    numbers = {name: number for number, name in enumerate(reader.variables, len(named))}
    return Blueprints(
        ranges=(*named, *reader.variables.values()),
        kernels=tuple(reader.kernels),
        attribute_sets=tuple(reader.sets),
        graphs=tuple(read),
        host=own_memory(),
        contents=tuple(Piece(numbers[name], 0, data) for name, data in reader.written.items()),
        refused=refused,
    )


def nodes_of(driver: CudaDriver, graph: int) -> list[int]:
    count = c_size_t()
    driver.call("cuGraphGetNodes", graph, None, byref(count))
    nodes = (c_uint64 * count.value)()
    if count.value:
        driver.call("cuGraphGetNodes", graph, nodes, byref(count))
    return list(nodes)


def edges_of(driver: CudaDriver, graph: int) -> list[tuple[int, int, bytes]]:
    """Return the edges of a graph as (source, target, edge data).

    They must be read with their data: without it, the driver refuses (402) a graph whose edges have data.
    """
    count = c_size_t()
    driver.call("cuGraphGetEdges_v2", graph, None, None, None, byref(count))
    if not count.value:
        return []
    sources, targets = (c_uint64 * count.value)(), (c_uint64 * count.value)()
    data = ctypes.create_string_buffer(EDGE_DATA_BYTES * count.value)
    driver.call("cuGraphGetEdges_v2", graph, sources, targets, data, byref(count))
    split = [data.raw[i : i + EDGE_DATA_BYTES] for i in range(0, len(data.raw) - 1, EDGE_DATA_BYTES)]
    return list(zip(sources, targets, split, strict=False))


def node_kind(driver: CudaDriver, node: int) -> int:
    kind = c_int()
    driver.call("cuGraphNodeGetType", node, byref(kind))
    return kind.value


def kernel_of(driver: CudaDriver, node: int) -> tuple[KernelNodeParams, str, tuple[tuple[int, int], ...]]:
    """Return a kernel node's parameters, its kernel's name, and the (offset, size) of each parameter."""
    params = KernelNodeParams()
    driver.call("cuGraphKernelNodeGetParams_v2", node, byref(params))
    if params.func and driver.result("cuFuncGetName", byref(c_char_p()), params.func):
        # A CUkernel can be launched in place of a CUfunction, but calls about functions do not accept it.
        params.func, params.kern = None, params.kern or params.func
    return params, *describe(driver, func=params.func or 0, kern=params.kern or 0)


def describe(driver: CudaDriver, *, func: int, kern: int) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Return the name and the parameter layout of a CUfunction or a CUkernel."""
    handle = func or kern
    name = driver.text("cuFuncGetName" if func else "cuKernelGetName", handle)
    call = "cuFuncGetParamInfo" if func else "cuKernelGetParamInfo"
    layout: list[tuple[int, int]] = []
    offset, size = c_size_t(), c_size_t()
    while not (failed := driver.result(call, handle, len(layout), byref(offset), byref(size))):
        layout.append((offset.value, size.value))
    if failed != INVALID_VALUE:  # not the end of the list, but an error: repeat the call, which raises it
        driver.call(call, handle, len(layout), byref(offset), byref(size))
    return name, tuple(layout)


class _GraphReader:
    """Reads graphs, and keeps each kernel and each set of attributes once for all of them."""

    def __init__(self, driver: CudaDriver, images: ImageStore) -> None:
        self._driver = driver
        self._images = images
        self.variables: dict[str, MemoryRange] = {}
        self.written: dict[str, bytes] = {}  # variables that the host has written to, such as constants
        self._device = driver.current_device()
        self.kernels: list[KernelRecord] = []
        self.sets: list[AttributeSet] = [()]
        self._numbers: dict[int, int] = {}

    def graph(self, key: str, graph: int) -> GraphBlueprint:
        handles = nodes_of(self._driver, graph)
        blob = bytearray()
        nodes = tuple(self._node(handle, blob) for handle in handles)
        number = {handle: i for i, handle in enumerate(handles)}
        edges = sorted(
            Edge(number[source], number[target], data) for source, target, data in edges_of(self._driver, graph)
        )
        return GraphBlueprint(key, nodes, tuple(edges), bytes(blob))

    def _node(self, handle: int, blob: bytearray) -> Node:
        blob.extend(bytes(-len(blob) % _ALIGNMENT))
        start = len(blob)
        kind = node_kind(self._driver, handle)
        if kind == NodeKind.KERNEL:
            return self._kernel_node(handle, blob)
        if kind == NodeKind.MEMSET:
            blob += self._structure("cuGraphMemsetNodeGetParams", handle, MEMSET_NODE.size)
        elif kind == NodeKind.MEMCPY:
            blob += self._memcpy(handle)
        elif kind != NodeKind.EMPTY:
            raise GraphMismatch(Reason.NODE_KIND, f"it has a {_NODE_KINDS.get(kind, f'type {kind}')} node")
        return Node(kind, 0, -1, (0, 0, 0), (0, 0, 0), 0, start, len(blob) - start)

    def _structure(self, call: str, handle: int, size: int) -> bytes:
        buffer = ctypes.create_string_buffer(size)
        self._driver.call(call, handle, buffer)
        return buffer.raw

    def _memcpy(self, handle: int) -> bytes:
        data = self._structure("cuGraphMemcpyNodeGetParams", handle, MEMCPY_NODE_BYTES)
        kinds = [int.from_bytes(data[at : at + 4], "little") for at in MEMCPY_TYPES]
        if any(kind not in (MEMORY_TYPE_DEVICE, MEMORY_TYPE_UNIFIED) for kind in kinds):
            raise GraphMismatch(Reason.NODE_KIND, f"it copies between memory of kinds {kinds}, not on the device")
        return data

    def _kernel_node(self, handle: int, blob: bytearray) -> Node:
        params, name, layout = kernel_of(self._driver, handle)
        record = self._record(params, name, layout)
        start = len(blob)
        size = max((offset + size for offset, size in layout), default=0)
        values = bytearray(size)
        # The memory at these pointers belongs to the node: copy it at once, and never write to it.
        packed = _packed(params.extra) if params.extra else 0
        if layout and not packed and not params.params:
            raise GraphMismatch(Reason.NODE_KIND, f"the parameters of {name} cannot be read")
        pointers = (c_uint64 * len(layout)).from_address(params.params) if layout and not packed else ()
        for number, (offset, length) in enumerate(layout):
            source = packed + offset if packed else pointers[number]
            values[offset : offset + length] = ctypes.string_at(source, length)
        blob += values
        attributes = self._attributes(handle)
        self._record_limits(record, params.shared_bytes, dict(attributes).get(_CLUSTER, b""))
        if attributes not in self.sets:
            self.sets.append(attributes)
        grid, block = tuple(params.grid), tuple(params.block)
        return Node(NodeKind.KERNEL, self.sets.index(attributes), record, grid, block, params.shared_bytes, start, size)

    def _record(self, params: KernelNodeParams, name: str, layout: tuple[tuple[int, int], ...]) -> int:
        handle = params.func or params.kern or 0
        if handle not in self._numbers:
            attributes = self._function_attributes(params)
            loaded = self._loaded(params)
            image = self._images.of(name, layout, dict(attributes).get(REGISTERS, 0), loaded)
            if image:
                self._add_variables(image, params)
            self._numbers[handle] = len(self.kernels)
            self.kernels.append(KernelRecord(name, image, layout, tuple(attributes)))
        return self._numbers[handle]

    def _function_attributes(self, params: KernelNodeParams) -> list[tuple[int, int]]:
        """Return the attributes that were set on a CUkernel, or on its CUfunction in this context: each has its own."""
        func = params.func or self._driver.optional("cuKernelGetFunction", params.kern)
        found = []
        for attribute in FUNCTION_ATTRIBUTES:
            values, value = [0], c_int()
            if func and not self._driver.result("cuFuncGetAttribute", byref(value), attribute, func):
                values.append(value.value)
            if params.kern and not self._driver.result(
                "cuKernelGetAttribute", byref(value), attribute, params.kern, self._device
            ):
                values.append(value.value)
            if max(values) > 0:
                found.append((attribute, max(values)))
        return found

    def _loaded(self, params: KernelNodeParams) -> list[int]:
        """Return the handles of a kernel's module and library, as far as the driver knows them."""
        func = params.func or self._driver.optional("cuKernelGetFunction", params.kern)
        module = self._driver.optional("cuFuncGetModule", func) if func else 0
        library = self._driver.optional("cuKernelGetLibrary", params.kern) if params.kern else 0
        return [handle for handle in (module, library) if handle]

    def _record_limits(self, record: int, shared_bytes: int, cluster: bytes) -> None:
        """Record that a kernel may use what this launch used, on whichever handle it was allowed."""
        attributes = dict(self.kernels[record].attributes)
        if attributes.get(_DYNAMIC_SHARED, 0) < shared_bytes:
            attributes[_DYNAMIC_SHARED] = shared_bytes
        if cluster and math.prod(max(size, 1) for size in struct.unpack_from("<3I", cluster)) > _PORTABLE_BLOCKS:
            attributes[_NON_PORTABLE] = 1
        self.kernels[record] = self.kernels[record]._replace(attributes=tuple(sorted(attributes.items())))

    def _add_variables(self, image: str, params: KernelNodeParams) -> None:
        """Add the variables of a kernel's image to the ranges, so that pointers into them are known."""
        try:
            func = params.func or self._driver.handle("cuKernelGetFunction", params.kern)
            module = self._driver.handle("cuFuncGetModule", func)
        except CudaError:
            return
        cubin = self._images.cubin(image)
        for variable, size in cubin.variables.items():
            address, name = c_uint64(), f"{image}:{variable}"
            if name in self.variables or self._driver.result(
                "cuModuleGetGlobal_v2", byref(address), None, module, variable.encode()
            ):
                continue
            self.variables[name] = MemoryRange(name, RangeKind.MODULE, address.value, size)
            # A restored kernel's image is another copy, to which cudaMemcpyToSymbol has not written.
            if variable in cubin.initial and size:
                data = self._driver.read(address.value, size)
                if data != cubin.initial[variable]:
                    self.written[name] = data

    def _attributes(self, handle: int) -> AttributeSet:
        found = []
        for attribute in NODE_ATTRIBUTES:
            value = ctypes.create_string_buffer(ATTRIBUTE_BYTES)
            if self._driver.result("cuGraphKernelNodeGetAttribute", handle, attribute, value):
                continue
            if attribute == _DEVICE_UPDATABLE:
                if any(value.raw[:4]):
                    raise GraphMismatch(Reason.NODE_KIND, "kernels change one of its nodes")
                continue
            if value.raw.rstrip(b"\0") not in (b"", _DEFAULTS.get(attribute)):
                found.append((attribute, value.raw))
        return tuple(found)


def _packed(extra: int) -> int:
    """Return the address of the packed parameters of a launch with ``extra``; 0 if there is none.

    ``extra`` points to pairs of a name and a value; the name 0 ends them.
    """
    words = (c_void_p * 5).from_address(extra)
    for at in range(0, 4, 2):
        if not words[at]:
            break
        if words[at] == 1:
            return words[at + 1] or 0
    return 0
