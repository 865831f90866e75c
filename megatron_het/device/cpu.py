"""CPU device support: Megatron's "current CUDA device" means the CPU in this process.

Megatron names the CUDA device in several hundred places.  None of them is edited: the names of
``torch`` that they go through are rebound, and only for arguments that mean a CUDA device.
``torch.cuda.is_available()`` stays False, because torch itself decides by it.

Each function below installs one kind of support and says what failed, or was silently wrong,
without it.
"""

import contextlib
import ctypes
import functools
import logging
import multiprocessing
import multiprocessing.process
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_het.device.simulated import host_wait

# Processes that Megatron starts compute on the CPU as well, such as the one that writes checkpoints (--async-save).
#
# Such a process is a new interpreter.  Nothing there has called :func:`megatron_het.device.activate`, so that
# Megatron's ``rank % torch.cuda.device_count()`` would divide by zero, and the training would wait for it for ever.


class _Activated(multiprocessing.process.BaseProcess):
    """A process that is made ready before it does anything; what makes it ready goes there with it."""

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        super().__init__(*positional, **keywords)
        self._make_ready = _MAKE_READY[0]

    def run(self) -> None:
        self._make_ready()
        threading.Thread(target=_end_with_parent, daemon=True).start()
        super().run()


def _end_with_parent() -> None:
    """A process that serves one that was killed would wait for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


_MAKE_READY: list[Callable[[], Any]] = []
_CONTEXTS: dict[str, Any] = {
    name: multiprocessing.get_context(name)
    for name in ("spawn", "forkserver")
    if name in multiprocessing.get_all_start_methods()
}
# By a name of this module, under which the new interpreter finds them.
CpuSpawnProcess = type("CpuSpawnProcess", (_Activated, _CONTEXTS["spawn"].Process), {"__module__": __name__})
if "forkserver" in _CONTEXTS:
    CpuForkServerProcess = type(
        "CpuForkServerProcess", (_Activated, _CONTEXTS["forkserver"].Process), {"__module__": __name__}
    )


def prepare_children(make_ready: Callable[[], Any]) -> None:
    """Have ``make_ready`` called first in all processes that get an interpreter of their own from now on."""
    _MAKE_READY[:] = [make_ready]
    type(_CONTEXTS["spawn"]).Process = CpuSpawnProcess
    if "forkserver" in _CONTEXTS:
        type(_CONTEXTS["forkserver"]).Process = CpuForkServerProcess


# Collectives whose parts have different sizes: layers of experts exchange as many tokens as there happen to be.
#
# NCCL has all of them.  gloo takes split sizes as lists only, and in lists of tensors parts of one size only.


_gather, _scatter, _exchange = dist.all_gather, dist.reduce_scatter, dist.all_to_all_single


def _is_for_gloo(parts: Sequence[Tensor], group: Any) -> bool:
    """Whether a blocking collective has parts that the group does not take."""
    return dist.get_backend(group) == "gloo" and len({part.shape for part in parts}) > 1


def _owned(parts: Sequence[Tensor], group: Any) -> list[tuple[Tensor, int]]:
    """Parts that are not empty, with the world ranks that they belong to."""
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    return [(part, rank) for part, rank in zip(parts, ranks, strict=True) if part.numel()]


@functools.wraps(_gather)
def _all_gather(tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Every member broadcasts its own part."""
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
    """Every member's part is reduced to the member."""
    if async_op or not _is_for_gloo(input_list, group):
        return _scatter(output, input_list, op=op, group=group, async_op=async_op)
    parts = [part.clone() for part in input_list]  # a reduction may leave anything on ranks that it is not for
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
    """Sizes may be tensors: Megatron makes lists of those that come from a GPU, of no others."""
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
    # What Megatron's token dispatchers call.
    dist.all_gather = _all_gather
    dist.reduce_scatter = _reduce_scatter
    dist.all_to_all_single = _all_to_all_single


def _keep_freed_memory() -> None:
    """Freed activations stay in the process (glibc).

    Otherwise the allocator returns them to the kernel at the end of a pass and the next pass faults every
    page in again, zeroed: for a layer's pass thousands of page faults, and more in a profile of one layer
    alone than in training, where other activations lie above it.
    """
    if {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & set(os.environ):
        return  # somebody has chosen
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(trim_threshold, (1 << 31) - 1)
        mallopt(mmap_threshold, 32 << 20)  # the largest that glibc accepts


def _idle() -> Callable[..., None]:
    """A function that does nothing, a new one for each name: torch's compiler does not allow one function under two."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        pass

    return nothing


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stands for a call that has no meaning on CPU."""


def _as_cpu(device: Any) -> Any:
    """The CPU for anything that means a CUDA device, else ``device`` itself."""
    if isinstance(device, bool):
        return device
    if isinstance(device, int):
        return _CPU
    if isinstance(device, str) and device.startswith("cuda"):
        return _CPU
    if isinstance(device, torch.device) and device.type == "cuda":
        return _CPU
    return device


def _without_compiler() -> None:
    """``torch.compile`` returns the function: ``jit_fuser`` would compile every fused kernel.

    Dynamo is imported first: torch's optimizers import it later, and its table of known functions
    has to be built from the functions as torch defines them.
    """
    import torch._dynamo

    def compile_nothing(model: Callable[..., Any] | None = None, **_: Any) -> Any:
        return model if model is not None else lambda function: function

    torch.compile = compile_nothing


class _Properties:
    """Holds what ``torch.cuda.get_device_properties`` tells about the CPU."""

    name = "CPU"
    major, minor = 8, 0
    multi_processor_count = 1
    total_memory = 0


def _device_identity() -> None:
    """One device, number 0: with a count of 0 Megatron skips device and random set-up."""
    # Megatron insists on it under tensor parallelism, for the order of CUDA kernels.
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
    """A function in which a GPU would make the host wait; where NCCL's order is simulated, it does."""

    def wait(*args: Any, **kwargs: Any) -> None:
        host_wait(why)

    return wait


class _Stream:
    """A stream on which everything has happened already: CPU work is ordered by itself."""

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
        """Milliseconds from this event to ``end``, as CUDA events count them."""
        return (end._recorded_s - self._recorded_s) * 1e3


def _streams_and_events() -> None:
    """Megatron creates, waits for and times streams and events wherever it overlaps."""
    cuda, only_stream = torch.cuda, _Stream()
    cuda.Stream = cuda.ExternalStream = _Stream
    cuda.Event = _Event
    cuda.current_stream = cuda.default_stream = lambda device=None: only_stream
    cuda.set_stream = _idle()
    cuda.stream = lambda stream=None: contextlib.nullcontext(stream)
    cuda.synchronize = _host_wait("torch.cuda.synchronize()")
    Tensor.record_stream = _nothing


class _Generators:
    """``torch.cuda.default_generators``: every device's generator is the CPU's."""

    def __getitem__(self, index: int) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


def _random_state() -> None:
    """Seeds and states of "the CUDA generator" are the CPU generator's.

    Without CUDA torch queues such calls for an initialisation that never comes: seeds and
    restored states would vanish silently, and dropout and weights would differ between runs.
    """

    def seed(value: int) -> None:
        torch.default_generator.manual_seed(int(value))

    # One generator for both is what is wanted here; upstream would warn at every fork.
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
    """Data loaders draw the seeds of their workers from generators of their own.

    Every new iterator of a loader draws one number from the CPU's generator, which drives dropout only here.  Ranks
    that read no data would drop other values than those that do, TP rank 1 than TP rank 0, and a resumed run would be
    one draw ahead.
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
    """There is no device allocator to ask; :mod:`megatron_het.device.memory` measures."""
    cuda = torch.cuda
    cuda.empty_cache, cuda.reset_peak_memory_stats = _host_wait("torch.cuda.empty_cache()"), _idle()
    for name in ["memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"]:
        setattr(cuda, name, lambda device=None: 0)
    cuda.device_memory_used = lambda device=None: 0
    cuda.memory_stats = lambda device=None: defaultdict(int)
    cuda.mem_get_info = lambda device=None: (0, 0)


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with its ``device`` moved to the CPU and without pinned memory."""

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
    """A ``to`` method whose target device, by position or by name, is moved to the CPU."""
    function = _on_cpu(function)

    @functools.wraps(function)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *map(_as_cpu, args[:1]), *args[1:], **kwargs)

    return to


def _pinned_itself(self: Any, *args: Any, **kwargs: Any) -> Any:
    host_wait(_PINNING)
    return self


def _tensor_placement() -> None:
    """Tensors asked for on a CUDA device, or by a device number, are made on the CPU."""
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
    """``Tensor.type()`` says ``torch.cuda.FloatTensor``: the optimizers compare such strings."""
    type_of = Tensor.type

    @functools.wraps(type_of)
    def cuda_type(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = type_of(self, *args, **kwargs)
        if isinstance(result, str) and not result.startswith("torch.cuda."):
            return "torch.cuda." + result.removeprefix("torch.")
        return result

    Tensor.type = cuda_type
