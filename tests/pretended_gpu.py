"""A GPU of pretence, for tests/gpu where there is none: `pytest -p tests.pretended_gpu
tests/gpu/...`.

A plugin of pytest, in a process of its own. Tensors of "cuda:0" lie in host memory and are computed
there, but as with a GPU they mix with no tensor of the host, a copy to the host that nobody waited
for has not arrived, what waits for the device is an error where `torch.cuda.set_sync_debug_mode`
has it so and while a graph is recorded, and a graph replays operations with the tensors that it was
recorded with, never the Python code around them; what they make holds until another graph is
replayed. Not so: what is recorded is carried out at once, and of operations that torch puts
together from others only those of `WAITING` are known to wait. Triton's kernels run in its
interpreter, and only where they are asked for: it is slow.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from minivllm.cache.kv import zeros
from minivllm.quant.bnb import import_bitsandbytes

import_bitsandbytes("nf4")  # sooner than its libraries for GPUs seem to be wanted

CUDA = torch.device("cuda:0")
MEMORY = 32 << 20  # bytes that are free
WAITING = {
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "bincount", "multinomial"),
    *("nonzero", "nonzero_numpy", "argwhere", "masked_select"),
    *("_unique", "_unique2", "unique_consecutive", "unique_dim"),
}
# Operations that take a number of the host for one of their tensors; those on single elements do so
# too.
TAKING_NUMBERS = {"fill_", "masked_fill", "masked_fill_", "where", "index_put_", "copy_"}
POISON = 85  # in memory whose content is not to be relied on; every dtype has it
aten = torch.ops.aten


class Device:
    """What the device is doing."""

    late: list[Callable[[], object]] = []  # copies to the host on their way
    pinned: set[int] = set()  # addresses of pinned host memory
    recording: CUDAGraph | None = None
    graphs: list[CUDAGraph] = []
    forbids_waits = False

    @classmethod
    def wait(cls, what: str) -> None:
        """The host waits until the device has done everything."""
        if cls.recording is not None:
            raise RuntimeError(f"operation not permitted while a stream is capturing: {what}")
        if cls.forbids_waits:
            raise RuntimeError(f"called a synchronizing CUDA operation: {what}")
        cls.arrive()

    @classmethod
    def arrive(cls, before: list[Callable[[], object]] | None = None) -> None:
        """All late copies are there, or those of them that were issued before an event."""
        if cls.recording is not None:
            raise RuntimeError("operation not permitted while a stream is capturing: synchronize")
        arriving = [copy for copy in cls.late if before is None or copy in before]
        with _disable_current_modes():
            for copy in arriving:
                copy()
        cls.late = [copy for copy in cls.late if copy not in arriving]


class OnGPU(Tensor):
    """A tensor of the pretended GPU. Python's own ways into a tensor bypass dispatch, and are given
    here."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> OnGPU:
        with _disable_current_modes():
            shape = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device="meta")
        made = Tensor._make_subclass(
            cls, shape, False, dispatch_device=True, device_for_backend_keys=CUDA
        )
        made.host = host
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return (
            CUDA
            if function is torch.ops.prim.device.default
            else dispatch(function, args, kwargs or {})
        )

    device, is_cuda, is_cpu, is_meta = CUDA, True, False, False  # type: ignore[assignment]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"on a pretended GPU: {self.host!r}"

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def storage_offset(self) -> int:
        return self.host.storage_offset()

    def untyped_storage(self) -> Any:
        return self.host.untyped_storage()

    def item(self) -> Any:
        Device.wait("item")
        return self.host.item()

    def tolist(self) -> Any:
        Device.wait("tolist")
        return self.host.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    __bool__, __int__, __float__, __index__ = (
        lambda self, kind=kind: kind(self.item()) for kind in (bool, int, float, int)
    )

    def __invert__(self) -> Tensor:
        return self.bitwise_not()

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
        return self if self.is_contiguous() else self.clone(memory_format=memory_format)

    def split(self, size: Any, dim: int = 0) -> Any:  # type: ignore[override]
        return tuple(map(OnGPU, self.host.split(size, dim)))

    def unbind(self, dim: int = 0) -> Any:  # type: ignore[override]
        return tuple(map(OnGPU, self.host.unbind(dim)))

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.unbind())

    def _cut(self, index: Any) -> tuple[OnGPU, list[Tensor | None]]:
        """The view that an index cuts out, and the tensors that are still to be looked up in it."""
        parts = list(index) if isinstance(index, tuple) else [index]
        for at, part in enumerate(parts):
            if isinstance(part, list):
                parts[at] = torch.tensor(part, device=CUDA)
            elif isinstance(part, Tensor) and part.dim() == 0 and part.dtype is not torch.bool:
                parts[at] = part.item()
        tensors = [part if isinstance(part, Tensor) else None for part in parts]
        mixed = any(part is None or part is Ellipsis or isinstance(part, int) for part in parts)
        if mixed and any(tensor is not None for tensor in tensors):
            raise NotImplementedError(f"an index of tensors and of {parts}")
        cuts = tuple(slice(None) if isinstance(part, Tensor) else part for part in parts)
        return OnGPU(self.host[cuts]), [] if all(tensor is None for tensor in tensors) else tensors

    def __getitem__(self, index: Any) -> Tensor:
        view, tensors = self._cut(index)
        return aten.index.Tensor(view, tensors) if tensors else view

    def __setitem__(self, index: Any, value: Any) -> None:
        view, tensors = self._cut(index)
        if tensors:
            made = value if isinstance(value, Tensor) else torch.tensor(value, dtype=self.dtype)
            aten.index_put_.default(view, tensors, made)
        elif isinstance(value, OnGPU) or (isinstance(value, Tensor) and value.dim()):
            view.copy_(value)
        else:
            # torch fills a slice with a number, and copies one into a single element
            if view.dim() == 0:
                Device.wait("a number into a single element")
            view.fill_(value)


def leaves(tree: Any) -> Iterator[Any]:
    """What lies in tuples, lists and dictionaries, in their order: torch's own `tree_leaves` takes
    longer than most operations."""
    if isinstance(tree, tuple | list) and not isinstance(tree, torch.Size):
        for branch in tree:
            yield from leaves(branch)
    elif isinstance(tree, dict):
        for branch in tree.values():
            yield from leaves(branch)
    else:
        yield tree


def mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """The same tuples, lists and dictionaries of changed leaves; see `leaves`."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind([mapped(change, branch) for branch in tree])
    if kind is dict:
        return {name: mapped(change, branch) for name, branch in tree.items()}
    return tree_map(change, tree) if isinstance(tree, tuple) else change(tree)


def dispatch(function: Any, args: Any, kwargs: Any) -> Any:
    """Compute on the host what concerns the GPU, and note it where a graph is recorded."""
    out = compute(function, args, kwargs)
    given = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, OnGPU)]
    made = [leaf for leaf in leaves(out) if isinstance(leaf, OnGPU)]
    if Device.recording is None or not given + made:
        return out

    def again() -> None:
        results = (
            leaf for leaf in leaves(compute(function, args, kwargs)) if isinstance(leaf, OnGPU)
        )
        for old, new in zip(made, results, strict=True):
            if old.data_ptr() != new.data_ptr():
                old.host.copy_(new.host)

    known = {tensor.untyped_storage().data_ptr() for tensor in given}
    Device.recording.operations.append(again)
    Device.recording.own += [t for t in made if t.untyped_storage().data_ptr() not in known]
    return out


def compute(function: Any, args: Any, kwargs: Any) -> Any:
    name = function._schema.name.removeprefix("aten::")
    names = [argument.name for argument in function._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    if name in ("to", "_to_copy"):
        return moved(name, given)
    if name == "copy_" and isinstance(args[0], OnGPU) != isinstance(args[1], OnGPU):
        return copied(args[0], args[1], given.get("non_blocking", False))
    tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    there = [tensor for tensor in tensors if isinstance(tensor, OnGPU)]
    if there:
        check(function, name, given, tensors)
    device = kwargs.get("device")
    made_there = bool(there) if device is None else is_gpu(device)
    if name in ("pin_memory", "_pin_memory"):
        out = args[0].clone()
        Device.pinned.add(out.untyped_storage().data_ptr())
        return out
    pinned = given.get("pin_memory", False)
    kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    plain_args, plain = mapped(
        on_host, (args, kwargs | ({} if device is None else {"device": "cpu"}))
    )
    if pinned and name == "zeros":  # gigabytes, of which few are written to
        out = zeros(given["size"], given["dtype"], torch.device("cpu"))
    else:
        out = function(*plain_args, **plain)
    if pinned:
        Device.pinned.add(out.untyped_storage().data_ptr())
    if not made_there:
        return out
    known = {id(tensor.host): tensor for tensor in there}  # what was changed in place stays itself

    def on_gpu(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return known[id(value)] if id(value) in known else OnGPU(value)

    return mapped(on_gpu, out)


def check(function: Any, name: str, given: dict[str, Any], tensors: list[Tensor]) -> None:
    """What a GPU refuses, and where the host waits for it, in an operation with a tensor of the
    GPU."""
    indexed = name in ("index", "index_put", "index_put_") and isinstance(given["self"], OnGPU)
    indices = [index for index in given["indices"] if index is not None] if indexed else []
    of_host = [tensor for tensor in tensors if not isinstance(tensor, OnGPU)]
    takes_numbers = torch.Tag.pointwise in function.tags or name in TAKING_NUMBERS
    for tensor in of_host:
        if all(tensor is not index for index in indices) and (tensor.dim() or not takes_numbers):
            raise RuntimeError(
                f"Expected all tensors to be on the same device: {name} of {tensors}"
            )
    if any(index is tensor for index in indices for tensor in of_host):
        Device.wait(f"{name} by indices of the host")
    # A mask says where a number of the host goes without a wait.
    filled = (
        name != "index"
        and indexed
        and not given["values"].dim()
        and not isinstance(given["values"], OnGPU)
    )
    by_mask = not filled and any(index.dtype is torch.bool for index in indices)
    counted = name == "repeat_interleave" and given.get("output_size") is None
    if name in WAITING or by_mask or counted or (name == "where" and len(given) == 1):
        Device.wait(name)


def on_host(value: Any) -> Any:
    return value.host if isinstance(value, OnGPU) else value


def is_gpu(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def moved(name: str, given: dict[str, Any]) -> Tensor:
    """`Tensor.to`: a new tensor of another device or dtype, or the same where nothing changes."""
    source, other = given["self"], given.get("other")
    device = other.device if other is not None else given.get("device")
    dtype = (other.dtype if other is not None else given.get("dtype")) or source.dtype
    there = isinstance(source, OnGPU) if device is None else is_gpu(device)
    same = there == isinstance(source, OnGPU) and dtype == source.dtype
    if name == "to" and same and not given.get("copy"):
        return source
    host = aten._to_copy.default(
        on_host(source), dtype=dtype, memory_format=given.get("memory_format")
    )
    if there == isinstance(source, OnGPU):
        return OnGPU(host) if there else host
    out = torch.empty_like(host)
    return copied(
        OnGPU(out) if there else out,
        host if there else OnGPU(host),
        given.get("non_blocking", False),
    )


def copied(target: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
    """A copy between host and GPU: the host waits, or memory that it will read is not there yet."""
    of_host = target if isinstance(source, OnGPU) else source
    pinned = of_host.untyped_storage().data_ptr() in Device.pinned
    if not non_blocking or (Device.recording is not None and not pinned):
        Device.wait(f"a copy from {source.device} to {target.device}")
    elif isinstance(source, OnGPU):
        data = source.host.clone()
        target.fill_(POISON)
        Device.late.append(lambda: target.copy_(data))
        return target
    on_host(target).copy_(on_host(source))
    return target


class Everywhere(TorchDispatchMode):
    """Brings what makes tensors on the GPU here, where no tensor of it is given."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled, and torch's compiler need not be imported

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return dispatch(function, args, kwargs or {})


class Event:
    """What was issued before it was recorded is done once somebody has waited for it."""

    def __init__(self, **_: Any) -> None:
        self.before: list[Callable[[], object]] = []

    def record(self, *_: Any) -> None:
        self.before = list(Device.late)

    def synchronize(self) -> None:
        Device.arrive(self.before)

    def query(self) -> bool:
        return not any(copy in Device.late for copy in self.before)

    def elapsed_time(self, end: Event) -> float:
        return 1.0  # of a device that computes at once


class Stream:
    """There is but one order."""

    def __init__(self, *_: Any) -> None: ...

    def wait_stream(self, other: Stream) -> None: ...

    def synchronize(self) -> None:
        Device.wait("synchronize")


class CUDAGraph:
    """What was recorded."""

    def __init__(self) -> None:
        self.operations: list[Callable[[], object]] = []
        self.own: list[OnGPU] = []  # tensors of the memory that all graphs share

    def forget(self) -> None:
        """The memory was taken for something else."""
        for tensor in self.own:
            tensor.host.fill_(POISON)

    def replay(self) -> None:
        for graph in Device.graphs:
            graph.forget()
        for operation in self.operations:
            operation()


@contextlib.contextmanager
def graph(into: CUDAGraph, **_: Any) -> Iterator[None]:
    Device.recording = into
    try:
        yield
    finally:
        Device.recording = None
    Device.graphs.append(into)
    into.forget()


def pretend() -> None:
    """Replace what torch and Triton do with a GPU. For the rest of the process."""
    cuda: Any = torch.cuda
    stream = Stream()
    constants = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "get_device_properties": SimpleNamespace(
            multi_processor_count=132, L2_cache_size=1 << 20, name="pretended", total_memory=MEMORY
        ),
        "mem_get_info": (MEMORY, MEMORY),
        "graph_pool_handle": (0, 0),
        "current_stream": stream,
        "default_stream": stream,
        "stream": contextlib.nullcontext(),
        **dict.fromkeys(("memory_reserved", "max_memory_allocated", "max_memory_reserved"), 0),
        **dict.fromkeys(("_lazy_init", "set_device", "reset_peak_memory_stats", "empty_cache")),
    }
    for name, value in constants.items():
        setattr(cuda, name, lambda *_, value=value, **__: value)
    cuda.Event, cuda.Stream, cuda.CUDAGraph, cuda.graph = Event, Stream, CUDAGraph, graph
    cuda.synchronize = lambda *_: Device.arrive()
    cuda.set_sync_debug_mode = lambda mode: setattr(Device, "forbids_waits", mode == "error")

    # These of Python's own look for a GPU before anything is dispatched.
    tensor, to, copy_, arange = torch.tensor, Tensor.to, Tensor.copy_, torch.arange

    def indexed(value: Any) -> Any:
        return CUDA if isinstance(value, str | torch.device) and is_gpu(value) else value

    def new_to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return to(
            self, *map(indexed, args), **{key: indexed(value) for key, value in kwargs.items()}
        )

    def new_copy(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if not isinstance(self, OnGPU) and not isinstance(source, OnGPU):
            return copy_(self, source, non_blocking)
        return dispatch(aten.copy_.default, (self, source.expand(self.shape), non_blocking), {})

    def on_device(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(make)
        def made(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
            if not is_gpu(device):
                return make(*args, device=device, **kwargs)
            fresh = make(*args, **kwargs)
            if make is tensor:
                return fresh.to(CUDA)
            out = OnGPU(fresh.clone())
            if Device.recording is not None:
                Device.recording.operations.append(lambda: out.host.copy_(fresh))
            return out

        return made

    torch.tensor, torch.arange = on_device(tensor), on_device(arange)
    Tensor.to, Tensor.copy_ = new_to, new_copy  # type: ignore[method-assign]
    Tensor.cuda = lambda self, **kwargs: self.to(CUDA, **kwargs)  # type: ignore[method-assign]

    from triton.runtime import interpreter

    interpret = interpreter.GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        given = [value for value in leaves((args, kwargs)) if isinstance(value, Tensor)]
        if any(isinstance(value, OnGPU) for value in given) and not all(
            isinstance(v, OnGPU) for v in given
        ):
            raise ValueError("a kernel was given a tensor of the host")
        args, kwargs = mapped(on_host, (args, kwargs))

        def run() -> None:
            with _disable_current_modes():
                interpret(self, *args, **kwargs)

        run()
        if Device.recording is not None:
            Device.recording.operations.append(run)

    interpreter.GridExecutor.__call__ = launch


def only_what_is_asked_for() -> None:
    """`auto` leaves Triton's kernels out."""
    from minivllm.attention import auto
    from minivllm.kernels import device as places

    takes = places.takes_triton
    places.takes_triton = lambda option, chosen, *where: (
        chosen != "auto" and takes(option, chosen, *where)
    )
    auto.BACKENDS["cuda"] = auto.BACKENDS["cuda"][1:]


pretend()
only_what_is_asked_for()
KEPT = [torch.inference_mode(), Everywhere()]
for context in KEPT:
    context.__enter__()
