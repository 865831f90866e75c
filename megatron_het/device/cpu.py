"""CPU device support: in this process Megatron's "current CUDA device" is the CPU.

Megatron names the CUDA device in several hundred places.  None of them is edited.  Instead, functions of
``torch`` are replaced that these places call; arguments that name a CUDA device are changed to the CPU.
``torch.cuda.is_available()`` stays False, because torch's own code depends on it.

Each function that :func:`install` calls adds one kind of support.  Its docstring says what fails without it.
"""

import contextlib
import ctypes
import functools
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_het.device.simulated import host_wait

# Collectives with parts of different sizes, with which expert layers exchange varying numbers of tokens.
#
# NCCL supports all of them.  gloo accepts split sizes only as lists, and in lists of tensors only equal sizes.


_gather, _scatter, _exchange = dist.all_gather, dist.reduce_scatter, dist.all_to_all_single


def _is_for_gloo(parts: Sequence[Tensor], group: Any) -> bool:
    """Whether the group is of gloo and the parts differ in shape, which gloo does not support."""
    return dist.get_backend(group) == "gloo" and len({part.shape for part in parts}) > 1


def _owned(parts: Sequence[Tensor], group: Any) -> list[tuple[Tensor, int]]:
    """Parts that are not empty, with the world ranks that they belong to."""
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    return [(part, rank) for part, rank in zip(parts, ranks, strict=True) if part.numel()]


@functools.wraps(_gather)
def _all_gather(tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """``all_gather``; with parts of different shapes over gloo every member broadcasts its own part."""
    if async_op or not _is_for_gloo(tensor_list, group):
        return _gather(tensor_list, tensor, group=group, async_op=async_op)
    tensor_list[dist.get_rank(group)].copy_(tensor)
    for part, owner in _owned(tensor_list, group):
        dist.broadcast(part, owner, group=group)
    return None


@functools.wraps(_scatter)
def _reduce_scatter(
    output: Tensor, input_list: list[Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """``reduce_scatter``; with parts of different shapes over gloo each part is reduced to its member."""
    if async_op or not _is_for_gloo(input_list, group):
        return _scatter(output, input_list, op=op, group=group, async_op=async_op)
    parts = [part.clone() for part in input_list]  # ``reduce`` overwrites the tensor on the other ranks, too
    for part, owner in _owned(parts, group):
        dist.reduce(part, owner, op=op, group=group)
    output.copy_(parts[dist.get_rank(group)])
    return None


@functools.wraps(_exchange)
def _all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """``all_to_all_single`` with sizes as lists or tensors; Megatron converts only tensors of a GPU to lists."""
    return _exchange(
        output, input, _as_list(output_split_sizes), _as_list(input_split_sizes), group=group, async_op=async_op
    )


def _as_list(sizes: Any) -> Any:
    return sizes.tolist() if isinstance(sizes, Tensor) else sizes


_CPU = torch.device("cpu")

_NAMES = (
    "arange as_tensor empty empty_like empty_strided eye full full_like linspace ones ones_like rand rand_like "
    "randint randn randn_like randperm scalar_tensor tensor zeros zeros_like"
)
_FACTORIES = _NAMES.split()
_PINNING = "an allocation of pinned memory"
_TENSOR_FACTORIES = ["new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"]


def install() -> None:
    """Install the CPU device support; called once, by :func:`megatron_het.device.activate`."""
    _keep_freed_memory()
    _without_compiler()
    _device_identity()
    _streams_and_events()
    _random_state()
    _loader_seeds()
    _memory_queries()
    _tensor_placement()
    _tensor_type_names()
    # Used by Megatron's token dispatchers.
    dist.all_gather = _all_gather
    dist.reduce_scatter = _reduce_scatter
    dist.all_to_all_single = _all_to_all_single


def _keep_freed_memory() -> None:
    """Make glibc keep freed memory in the process.

    Otherwise the allocator returns activations to the kernel at the end of a pass, and the next pass has a
    page fault for every page: thousands in a layer's pass, and more in a profile of one layer
    alone than in training, where other activations are above it in the heap.
    """
    if {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & set(os.environ):
        return  # the user has set them
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(trim_threshold, (1 << 31) - 1)
        mallopt(mmap_threshold, 32 << 20)  # the largest that glibc accepts


def _idle() -> Callable[..., None]:
    """Returns a new function that does nothing; torch's compiler does not allow one function under two names."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        pass

    return nothing


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Does nothing, in place of a method without meaning on the CPU."""


def _as_cpu(device: Any) -> Any:
    """The CPU if ``device`` names a CUDA device by name, number or object, else ``device`` itself."""
    is_number = isinstance(device, int) and not isinstance(device, bool)
    is_named = isinstance(device, str | torch.device) and str(device).startswith("cuda")
    return _CPU if is_number or is_named else device


def _without_compiler() -> None:
    """Make ``torch.compile`` return the function; otherwise ``jit_fuser`` compiles every fused kernel.

    Dynamo is imported first.  torch's optimizers would import it later, but its table of known functions
    must be built before torch's functions are replaced.
    """
    import torch._dynamo
    from torch.utils._device import _device_constructors

    _device_constructors()  # likewise the table of ``with torch.device(...)``

    def compile_nothing(model: Callable[..., Any] | None = None, **_: Any) -> Any:
        return model if model is not None else lambda function: function

    torch.compile = compile_nothing


class _Properties:
    """Result of ``torch.cuda.get_device_properties`` for the CPU."""

    name = "CPU"
    major, minor = 8, 0
    multi_processor_count = 1
    total_memory = 0


def _device_identity() -> None:
    """Show one device, number 0; with a count of 0 Megatron does not set up device and random states."""
    # Megatron requires this variable under tensor parallelism, for the order of CUDA kernels.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    cuda = torch.cuda
    cuda.current_device = lambda: 0
    cuda.device_count = lambda: 1
    cuda.set_device = _idle()
    cuda.get_device_capability = lambda device=None: (_Properties.major, _Properties.minor)
    cuda.get_device_properties = lambda device=None: _Properties()
    cuda.get_device_name = lambda device=None: _Properties.name
    cuda._lazy_init = _idle()
    cuda.nvtx.range_push = _idle()
    cuda.nvtx.range_pop = _idle()


def _host_wait(why: str) -> Callable[..., None]:
    """Returns a stand-in for a call in which the host waits for a GPU; it waits only if NCCL's order is simulated."""

    def wait(*args: Any, **kwargs: Any) -> None:
        host_wait(why)

    return wait


class _Stream:
    """A stream whose work is always complete, because CPU operators are synchronous."""

    cuda_stream = 0
    priority = 0
    device = _CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *exception: Any) -> None:
        pass

    wait_stream = wait_event = synchronize = _nothing

    def record_event(self, event: "_Event | None" = None) -> "_Event":
        event = event or _Event()
        event.record()
        return event

    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)


class _Event:
    """An event that is complete when recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._recorded_s = 0.0

    def record(self, stream: _Stream | None = None) -> None:
        self._recorded_s = time.perf_counter()

    wait = synchronize = _nothing

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "_Event") -> float:
        """Milliseconds from this event to ``end``, like CUDA events."""
        return (end._recorded_s - self._recorded_s) * 1e3


def _streams_and_events() -> None:
    """Replace the streams and events that Megatron uses for overlap and timers."""
    cuda, only_stream = torch.cuda, _Stream()
    cuda.Stream = cuda.ExternalStream = _Stream
    cuda.Event = _Event
    cuda.current_stream = cuda.default_stream = lambda device=None: only_stream
    cuda.set_stream = _idle()
    cuda.stream = lambda stream=None: contextlib.nullcontext(stream)
    cuda.synchronize = _host_wait("torch.cuda.synchronize()")
    Tensor.record_stream = _nothing


class _Generators:
    """``torch.cuda.default_generators``, with the CPU's generator for every index."""

    def __getitem__(self, index: int) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


def _random_state() -> None:
    """Apply seeds and states of the CUDA generator to the CPU's generator.

    Without CUDA torch queues such calls for an initialisation that never comes.  Seeds and
    restored states would be lost without an error, and dropout and weights would differ between runs.
    """

    def seed(value: int) -> None:
        torch.default_generator.manual_seed(int(value))

    # Here one generator serves CPU and CUDA; upstream warns at every fork that the CPU's state has changed.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: not record.getMessage().startswith("CPU RNG state changed within")
    )
    torch.cuda._lazy_call = lambda call, **kwargs: call()
    torch.cuda.default_generators = _Generators()
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = lambda device="cuda": torch.default_generator.get_state()
        module.set_rng_state = lambda state, device="cuda": torch.default_generator.set_state(state)
        module.manual_seed = module.manual_seed_all = seed


def _loader_seeds() -> None:
    """Give each data loader its own generator for the seeds of its workers.

    Otherwise every new iterator of a loader draws a number from the CPU's generator, which here also drives dropout.
    Dropout would differ between ranks with and without data, such as TP ranks 0 and 1, and after a resume.
    """
    loader = torch.utils.data.DataLoader
    create = loader.__init__

    @functools.wraps(create)
    def create_seeded(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("generator") is None:
            kwargs["generator"] = torch.Generator().manual_seed(torch.initial_seed())
        create(self, *args, **kwargs)

    loader.__init__ = create_seeded


def _memory_queries() -> None:
    """Make queries of CUDA's allocator return 0; :mod:`megatron_het.device.memory` measures on the CPU."""
    cuda = torch.cuda
    cuda.empty_cache, cuda.reset_peak_memory_stats = _host_wait("torch.cuda.empty_cache()"), _idle()
    for name in ["memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"]:
        setattr(cuda, name, lambda device=None: 0)
    cuda.device_memory_used = lambda device=None: 0
    cuda.memory_stats = lambda device=None: defaultdict(int)
    cuda.mem_get_info = lambda device=None: (0, 0)


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with ``device=`` changed from CUDA to the CPU, and without pinned memory."""

    @functools.wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _as_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            host_wait(_PINNING)
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return on_cpu


def _to_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """A method ``to`` with the CPU in place of a CUDA target, by position or by name."""
    function = _on_cpu(function)

    @functools.wraps(function)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *map(_as_cpu, args[:1]), *args[1:], **kwargs)

    return to


def _pinned_itself(self: Any, *args: Any, **kwargs: Any) -> Any:
    host_wait(_PINNING)
    return self


def _tensor_placement() -> None:
    """Create tensors on the CPU if a CUDA device or a device number is requested."""
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for name in _TENSOR_FACTORIES:
        setattr(Tensor, name, _on_cpu(getattr(Tensor, name)))
    for owner in (Tensor, torch.nn.Module):
        owner.to = _to_cpu(owner.to)
        owner.cuda = lambda self, *args, **kwargs: self
    Tensor.pin_memory = _pinned_itself
    torch.nn.Module.to_empty = _on_cpu(torch.nn.Module.to_empty)


def _tensor_type_names() -> None:
    """Make ``Tensor.type()`` return ``torch.cuda.FloatTensor``, because the optimizers compare such strings."""
    type_of = Tensor.type

    @functools.wraps(type_of)
    def cuda_type(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = type_of(self, *args, **kwargs)
        if isinstance(result, str) and not result.startswith("torch.cuda."):
            return "torch.cuda." + result.removeprefix("torch.")
        return result

    Tensor.type = cuda_type
