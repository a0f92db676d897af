"""Find a graph's kernels in a new process: in the saved images, or by triggering (MEDUSA §5.2).

To trigger is to capture one layer, so that the libraries load the modules with their kernels.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from ctypes import byref, c_size_t, c_uint, c_uint64
from typing import NamedTuple

from ....errors import DeviceError, StateError
from ..blueprint import Blueprints, KernelRecord, NodeKind
from ..driver import CudaDriver, CudaError
from ..kernel_images import address_of
from ..materialization.dump import IDENTITY, describe, kernel_of, node_kind, nodes_of
from ..mismatch import GraphMismatch, Reason

_LOADERS = 4
Trigger = Callable[[str], int]
"""Captures the first layer at the batch size of the graph with this key, and returns the CUgraph."""


def image_of(variable: str) -> str:
    """Return the digest of the image that has a variable "<image>:<variable>"."""
    return variable.partition(":")[0]


class KernelHandle(NamedTuple):
    """A CUfunction, or a CUkernel of a library. The other one is 0."""

    func: int
    kern: int


class KernelFinder:
    """Loads each image once, and finds kernels in it. ``close`` unloads the images, so no graph may use them then.

    Several threads check and load all images, which are tens of MB for a model, and find their kernels. They begin with
    ``begin_loading``, or when the first kernel is looked for. A damaged image is not loaded, so graphs that use it are
    not restored.
    """

    trigger: Trigger | None = None

    def __init__(self, driver: CudaDriver, blueprints: Blueprints) -> None:
        self._driver = driver
        self._blueprints = blueprints
        self._libraries: dict[str, Future[int]] = {}  # of each image
        self._loading: set[str] = set()  # images that were still being loaded when ``loading`` last looked
        self._modules: dict[str, int] = {}  # by image, the module of a triggered kernel of it
        self._found: dict[int, KernelHandle] = {}
        self._kernels: defaultdict[str, list[int]] = defaultdict(list)  # of each image, by number
        for number, record in enumerate(blueprints.kernels):
            self._kernels[record.image].append(number)
        self._triggered: defaultdict[str, list[KernelHandle]] = defaultdict(list)
        self._done: set[str] = set()
        self._listed: set[int] = set()  # modules whose functions are known

    def handle(self, number: int, graph: str) -> KernelHandle:
        """Return the kernel with this number, for the graph with this key.

        Raises GraphMismatch if it is not found, or if several fit.
        """
        if number in self._found:
            return self._found[number]
        record = self._blueprints.kernels[number]
        self.begin_loading()
        library = self._library(record.image)
        if library:
            if number not in self._found:  # it was refused in the thread that loaded the image; here that raises
                self._find(number, library)
        else:
            handle = self._by_trigger(record, graph)
            set_function_attributes(self._driver, handle, record)
            self._found[number] = handle
        return self._found[number]

    def variable(self, name: str) -> int | None:
        """Return the address of a variable "<image>:<variable>"; None if its image is not loaded yet."""
        image, variable = image_of(name), name.partition(":")[2]
        library, module = self._library(image), self._modules.get(image)
        if not library and not module:
            return None
        call = "cuLibraryGetGlobal" if library else "cuModuleGetGlobal_v2"
        address, size = c_uint64(), c_size_t()
        failed = self._driver.result(call, byref(address), byref(size), library or module, variable.encode())
        return None if failed else address.value

    def close(self) -> None:
        self._loading.clear()
        while self._libraries:
            _, loading = self._libraries.popitem()  # the last first: what has not begun is not loaded
            if not loading.cancel() and not loading.exception():
                self._driver.result("cuLibraryUnload", loading.result())
        self._found.clear()

    def begin_loading(self, first: Iterable[str] = ()) -> None:
        """Begin to load all images, if that has not begun: those with the ``first`` digests before others.

        Raises DeviceError if this thread has no context. The kernels are loaded in that.
        """
        images = self._blueprints.images
        if self._libraries or not images:
            return
        context = self._driver.current_context()
        loaders = ThreadPoolExecutor(_LOADERS, "kernel images")
        for digest in dict.fromkeys((*first, *images)):
            if digest in images:
                self._libraries[digest] = loaders.submit(self._load, digest, context)
        self._loading = set(self._libraries)
        loaders.shutdown(wait=False)  # a graph waits for its own images

    def loading(self) -> set[str]:
        """Return the digests of the images that are still being loaded."""
        self._loading = {image for image in self._loading if not self._libraries[image].done()}
        return self._loading

    def wait_for_an_image(self) -> None:
        """Wait until one more image is loaded than when ``loading`` last looked, if one was being loaded."""
        wait([self._libraries[image] for image in self._loading], return_when=FIRST_COMPLETED)

    def _library(self, image: str) -> int:
        """Return the library of an image; 0 if the bundle does not have it, or it has not been loaded yet.

        Raises GraphMismatch if it is damaged, or the driver refused it.
        """
        loading = self._libraries.get(image)
        return loading.result() if loading is not None else 0

    def _load(self, digest: str, context: int) -> int:
        try:
            self._driver.use_in_thread(context)
            # The blueprints keep the code: the driver may read it later, when a kernel of it is first used.
            code = address_of(self._blueprints.images[digest])
            library = self._driver.handle("cuLibraryLoadData", code, None, None, 0, None, None, 0)
        except StateError as error:
            raise GraphMismatch(Reason.CORRUPT, str(error)) from error
        except CudaError as error:
            raise GraphMismatch(Reason.KERNEL_MISSING, f"a kernel image cannot be loaded: {error}") from error
        for number in self._kernels[digest]:
            # Driver calls that load a kernel take 0.3 ms. A graph that needs one that was refused asks again.
            with suppress(GraphMismatch, DeviceError):
                self._find(number, library)
        return library

    def _find(self, number: int, library: int) -> None:
        """Find a kernel in its image. Raises GraphMismatch if it is not there, CudaError if the driver refuses it."""
        record = self._blueprints.kernels[number]
        try:
            handle = KernelHandle(0, self._in_library(library, record.name))
        except CudaError as error:
            raise GraphMismatch(Reason.KERNEL_MISSING, f"{record.name} is not in its image: {error}") from error
        set_function_attributes(self._driver, handle, record)
        self._found[number] = handle

    def _in_library(self, library: int, name: str) -> int:
        """Return the CUkernel of this name. Raises CudaError if the library has none."""
        try:
            return self._driver.handle("cuLibraryGetKernel", library, name.encode())
        except CudaError:
            # It may be local to its image, as all kernels in a namespace without a name are.
            count = c_uint()
            self._driver.call("cuLibraryGetKernelCount", byref(count), library)
            kernels = (c_uint64 * count.value)()
            self._driver.call("cuLibraryEnumerateKernels", kernels, count.value, library)
            for kernel in kernels:
                if self._driver.text("cuKernelGetName", kernel) == name:
                    return kernel
            raise

    def _by_trigger(self, record: KernelRecord, graph: str) -> KernelHandle:
        if self.trigger is not None and graph not in self._done:
            self._done.add(graph)
            wait(self._libraries.values())  # nothing is loaded beside a capture
            try:
                self._collect(self.trigger(graph))
            except Exception as error:  # the capture of a layer may raise anything; then all graphs are captured
                raise GraphMismatch(Reason.KERNEL_MISSING, f"triggering {graph} failed: {error}") from error
        wanted = _identity(record)
        if (
            len(
                {
                    kernel.image or number
                    for number, kernel in enumerate(self._blueprints.kernels)
                    if _identity(kernel) == wanted
                }
            )
            > 1
        ):
            raise GraphMismatch(Reason.KERNEL_AMBIGUOUS, f"{record.name} is several kernels that nothing tells apart")
        candidates = self._triggered.get(record.name, [])
        matches = [handle for handle in candidates if self._identity_of(handle) == wanted]
        if not matches:
            if candidates:
                raise GraphMismatch(Reason.KERNEL_MISSING, f"{record.name} is another kernel here")
            raise GraphMismatch(Reason.KERNEL_MISSING, f"{record.name} is in no saved image or triggered module")
        if len(matches) > 1:
            raise GraphMismatch(Reason.KERNEL_AMBIGUOUS, f"{record.name} is defined in {len(matches)} loaded modules")
        if record.image:
            self._modules[record.image] = self._driver.handle("cuFuncGetModule", matches[0].func)
        return matches[0]

    def _collect(self, graph: int) -> None:
        """Collect the kernels of a captured graph's nodes, and all others of their modules (MEDUSA §5)."""
        for node in nodes_of(self._driver, graph):
            if node_kind(self._driver, node) != NodeKind.KERNEL:
                continue
            params, name, _ = kernel_of(self._driver, node)
            func = params.func or self._driver.handle("cuKernelGetFunction", params.kern)
            try:
                module = self._driver.handle("cuFuncGetModule", func)
                functions = self._functions(module) if module not in self._listed else []
                self._listed.add(module)
            except CudaError:  # the other kernels of its module stay unknown
                functions = []
            # Only look at names: for anything else, the driver would load the function, and a module may have hundreds.
            for function in functions:
                self._triggered[self._driver.text("cuFuncGetName", function)].append(KernelHandle(function, 0))
            if name not in self._triggered:
                self._triggered[name].append(KernelHandle(func, 0))

    def _functions(self, module: int) -> list[int]:
        count = c_uint()
        self._driver.call("cuModuleGetFunctionCount", byref(count), module)
        functions = (c_uint64 * count.value)()
        self._driver.call("cuModuleEnumerateFunctions", functions, count.value, module)
        return list(functions)

    def _identity_of(self, handle: KernelHandle) -> tuple[str, tuple[tuple[int, int], ...], tuple[int, ...]]:
        values = []
        for attribute in IDENTITY:
            value = ctypes.c_int()
            self._driver.call("cuFuncGetAttribute", byref(value), attribute, handle.func)
            values.append(value.value)
        return *describe(self._driver, func=handle.func, kern=0), tuple(values)


def set_function_attributes(driver: CudaDriver, handle: KernelHandle, record: KernelRecord) -> None:
    """Set the attributes that a kernel's nodes need, such as more than 48 KiB of dynamic shared memory.

    They are set on the kernel and on its function in this context, because the function does not inherit them.
    """
    wanted = [(attribute, value) for attribute, value in record.attributes if attribute not in IDENTITY]
    func = handle.func or (driver.optional("cuKernelGetFunction", handle.kern) if wanted else 0)
    for attribute, value in wanted:
        if handle.kern:
            driver.call("cuKernelSetAttribute", attribute, value, handle.kern, driver.current_device())
        if func:
            driver.call("cuFuncSetAttribute", func, attribute, value)


def _identity(record: KernelRecord) -> tuple[str, tuple[tuple[int, int], ...], tuple[int, ...]]:
    """Return what distinguishes a kernel without a known image from others of the same name."""
    attributes = dict(record.attributes)
    return record.name, record.parameters, tuple(attributes.get(one, 0) for one in IDENTITY)
