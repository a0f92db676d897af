"""Build executable graphs from blueprints."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import byref

from ..blueprint import Blueprints, GraphBlueprint, NodeKind
from ..compiled import CALLS, BuildJob, CompiledBundle, Used, driver_calls
from ..driver import CudaDriver, CudaError
from ..mismatch import GraphMismatch, Reason
from ..structs import InstantiateParams
from ..tables import RelocationTable
from .kernels import KernelHandle

_UPLOAD, _USE_NODE_PRIORITY = 2, 8
_REPLACE_ADDRESS = CALLS.index("cuTensorMapReplaceAddress")


class GraphBuilder:
    """Builds the graphs of one bundle.

    ``build`` and ``construct`` take what a graph uses, by number: the handles of ``kernels``, and the ``addresses`` at
    which memory ranges are now. They raise GraphMismatch: DRIVER_CALL if the driver refuses, CORRUPT if the graph
    refers to something that does not exist. Several threads may build graphs at the same time, if each number has the
    same handle or address for all of them.
    """

    def __init__(self, driver: CudaDriver, blueprints: Blueprints) -> None:
        """Raises NotCompiledError without the compiled library, DeviceError if the driver is too old."""
        self._driver = driver
        self._blueprints = blueprints
        self._bundle = CompiledBundle(blueprints)
        self._calls = driver_calls(driver)

    def used(self, graph: GraphBlueprint) -> Used:
        """Return which kernels and memory ranges a graph uses. Raises GraphMismatch (CORRUPT)."""
        try:
            return self._bundle.check(graph)
        except ValueError as error:
            raise GraphMismatch(Reason.CORRUPT, str(error)) from error

    def build(
        self,
        graph: GraphBlueprint,
        *,
        kernels: Mapping[int, KernelHandle],
        addresses: Mapping[int, int],
        stream: int,
    ) -> int:
        """Build an executable graph (CUgraphExec), which the caller destroys. It is uploaded on ``stream``."""
        made, has_priority = self._construct(graph, kernels, addresses)
        # Upload at once, so that the first launch does not pay for it.
        flags = _UPLOAD | (_USE_NODE_PRIORITY if has_priority else 0)
        params = InstantiateParams(flags=flags, upload_stream=stream)
        try:
            return self._driver.handle("cuGraphInstantiateWithParams", made, byref(params))
        except CudaError as error:
            raise GraphMismatch(Reason.DRIVER_CALL, f"{error}: the whole") from error
        finally:
            self._driver.result("cuGraphDestroy", made)

    def construct(
        self, graph: GraphBlueprint, *, kernels: Mapping[int, KernelHandle], addresses: Mapping[int, int]
    ) -> int:
        """Make the graph's nodes and edges (a CUgraph, which the caller destroys)."""
        return self._construct(graph, kernels, addresses)[0]

    def _construct(
        self, graph: GraphBlueprint, kernels: Mapping[int, KernelHandle], addresses: Mapping[int, int]
    ) -> tuple[int, bool]:
        """Return the graph, and whether a node has a priority of its own."""
        self._bundle.find(kernels)
        self._bundle.place(addresses)
        context = self._driver.current_context()
        made = self._driver.handle("cuGraphCreate", 0)
        try:
            job = self._bundle.build(graph, self._calls, context=context, made=made)
            self._check_calls(graph, job, addresses)
        except (ValueError, MemoryError, GraphMismatch) as error:
            self._driver.result("cuGraphDestroy", made)
            if isinstance(error, GraphMismatch):
                raise
            reason = Reason.CORRUPT if isinstance(error, ValueError) else Reason.MEMORY
            raise GraphMismatch(reason, str(error)) from error
        return made, bool(job.has_priority)

    def _check_calls(self, graph: GraphBlueprint, job: BuildJob, addresses: Mapping[int, int]) -> None:
        """Raise GraphMismatch if the driver has refused a call."""
        if job.result and job.call == _REPLACE_ADDRESS:
            relocation = RelocationTable.of(graph.relocations)[job.number]
            address = addresses[relocation.memory_range] + relocation.offset
            raise GraphMismatch(Reason.DRIVER_CALL, f"the driver writes no address {address:#x} into a tensor map")
        try:
            self._driver.check(CALLS[job.call], job.result)
        except CudaError as error:
            about = self._about(graph, job.number)
            raise GraphMismatch(Reason.DRIVER_CALL, f"{error}: {about}") from error

    def _about(self, graph: GraphBlueprint, number: int) -> str:
        """Describe for a message what the driver was asked to make."""
        if number < 0:
            return "the edges"
        node = graph.nodes[number]
        if node.kind != NodeKind.KERNEL:
            return f"a {NodeKind(node.kind).name.lower()} node"
        attributes = [attribute for attribute, _ in self._blueprints.attribute_sets[node.attributes]]
        kernel = self._blueprints.kernels[node.kernel]
        return f"{kernel.name}, {node.shared_bytes} bytes of shared memory, attributes {attributes}"
