"""Differences between CUDA and CPU, in one place.

:func:`activate` is called before ``megatron.training`` is imported.  On a machine with a usable
CUDA device it only stands in for Apex, where that is missing.  Without one it installs the CPU device support of
:mod:`megatron_het.device.cpu`, with which Megatron trains over gloo.

All other code of the project queries the :class:`Platform` instead of testing for CUDA itself.  ``memory.py`` measures
a rank's memory on a device.
"""

import contextlib
import ctypes
import functools
import importlib.machinery
import importlib.util
import multiprocessing.context
import multiprocessing.process
import os
import signal
import socket
import sys
import threading
import types
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_het.device.simulated import host_wait, is_simulated

SAME_DEVICES = "HET_SAME_DEVICES"
"""Set by launchers that show the same devices to all their processes of a host, as ``torchrun`` does."""
SHARING_RANK = "HET_LOCAL_RANK"
"""Variable with the launcher's local rank where ranks share devices: ``LOCAL_RANK`` is the device then."""
_ACTIVE: "list[Platform]" = []
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded here: few calls are safe after a fork


@dataclass(frozen=True)
class Platform:
    """The kind of device this process computes on."""

    kind: Literal["cuda", "cpu"]  # ``"cuda"`` or ``"cpu"``
    # whether a dry run simulates a CUDA device, with NCCL and fused kernels: on the CPU, or on a device of fake
    # tensors
    plays_cuda: bool = False

    @property
    def is_cuda(self) -> bool:
        """Whether the process computes on a CUDA device."""
        return self.kind == "cuda"

    @property
    def has_nccl(self) -> bool:
        """Whether groups of the backend ``nccl`` move this device's tensors (on the CPU: in NCCL's order only)."""
        return self.is_cuda or self.plays_cuda or is_simulated()

    @property
    def device(self) -> torch.device:
        """The current device of this process."""
        if self.is_cuda:
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    @property
    def default_backend(self) -> Literal["nccl", "gloo"]:
        """The ``torch.distributed`` backend that moves this device's tensors."""
        return "nccl" if self.is_cuda else "gloo"

    @property
    def device_name(self) -> str:
        """The model name of the device, for reports."""
        if self.is_cuda:
            return torch.cuda.get_device_name(self.device)
        return "CPU"

    def synchronize(self) -> None:
        """Wait until the device has finished all queued work."""
        if self.is_cuda:
            torch.cuda.synchronize()
        else:
            host_wait("a synchronisation with the device")

    def flags(self) -> "tuple[Flag, ...]":
        """Megatron flags that this machine needs, each with its reason."""
        return platform_flags(self.is_cuda, self.has_nccl, has_kernels=self.plays_cuda)

    def default_flags(self) -> tuple[str, ...]:
        """Returns these flags as words of a command line; empty with CUDA, TE and Apex in place."""
        return tuple(word for flag in self.flags() for word in flag.words)

    def unmet_flags(self, args: object) -> "tuple[Flag, ...]":
        """Flags without which Megatron fails here and that the namespace of its ``parse_args`` lacks."""
        return unmet(self.flags(), args)

    def environment(self) -> Mapping[str, str]:
        """Environment variables for rank processes on one machine, to be set unless they are set already."""
        common = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1"}
        return common if self.is_cuda else common | {"GLOO_SOCKET_IFNAME": "lo"}


def share_devices(environment: MutableMapping[str, str], devices: int) -> str:
    """Prepare the environment of a rank process where several ranks of a host share a device; before NCCL starts.

    NCCL refuses two ranks on one device, which it identifies by host and bus.  With a separate host name for every rank
    it transfers over sockets.  Variables that are set already are not changed.

    Args:
        environment: Environment of this process; changed in place.
        devices: Number of devices that the process sees.

    Returns:
        A message for the user; empty if ranks have devices of their own, or this is unknown.
    """
    local_rank, ranks = (int(environment.get(name, "0")) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    told = any(name in environment for name in (SAME_DEVICES, "TORCHELASTIC_RUN_ID", "NCCL_HOSTID"))
    if not told or ranks <= devices:
        return ""
    settings = {
        "NCCL_HOSTID": f"{socket.gethostname()}-{local_rank}",
        "NCCL_CUMEM_HOST_ENABLE": "0",
        "NCCL_MAX_NCHANNELS": "2",
    }
    if environment.get("WORLD_SIZE") == str(ranks):
        settings |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    for name, value in settings.items():
        environment.setdefault(name, value)
    environment.setdefault(SHARING_RANK, str(local_rank))
    environment["LOCAL_RANK"] = str(local_rank % devices)
    return (
        f"{ranks} ranks share {devices} device{'s' if devices > 1 else ''} on {socket.gethostname()}: NCCL takes every "
        f"rank for a host ({', '.join(settings)}), so that transfers are slow; for trials, not for training"
    )


def activate(*, plays_cuda: bool = False) -> Platform:
    """Make this process ready to import ``megatron.training``, once, and return its platform.

    Args:
        plays_cuda: See :class:`Platform`; for dry runs.
    """
    if not _ACTIVE:
        if torch.cuda.is_available() and torch.cuda.device_count() > 0:
            is_first = os.environ.get("LOCAL_RANK", "0") == "0"
            said = share_devices(os.environ, torch.cuda.device_count())
            if said and is_first:
                sys.stderr.write(f"megatron_het: {said}\n")
            provide_accumulation()
            _ACTIVE.append(Platform("cuda"))
        else:
            from megatron_het.device import cpu

            cpu.install()
            _ACTIVE.append(Platform("cpu"))
        multiprocessing.context.SpawnContext.Process = SpawnedChild
        multiprocessing.context.ForkServerContext.Process = ForkServerChild
    if plays_cuda and not _ACTIVE[0].is_cuda:
        _ACTIVE[0] = Platform("cpu", plays_cuda=True)
    return _ACTIVE[0]


def pretend(platform: Platform) -> None:
    """Set the platform of this process for dry runs, before :func:`activate` is called.

    Args:
        platform: The result of later calls of :func:`activate`.

    Raises:
        RuntimeError: The process has its platform already.
    """
    if _ACTIVE and _ACTIVE[0] != platform:
        raise RuntimeError(f"the platform of this process is {_ACTIVE[0]} already, and cannot become {platform}")
    _ACTIVE[:] = [platform]


def is_active() -> bool:
    """Whether :func:`activate` has been called in this process."""
    return bool(_ACTIVE)


# Processes beside a rank, which others start, such as data workers and those that write checkpoints (--async-save).


class _Child(multiprocessing.process.BaseProcess):
    """A new interpreter with the platform of its parent, with which it ends; unpickled there."""

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        super().__init__(*positional, **keywords)
        self._is_cpu = not _ACTIVE[0].is_cuda

    def run(self) -> None:
        if self._is_cpu:  # Megatron's writer divides by the number of devices, and the training would wait for ever
            activate()
        threading.Thread(target=_end_with_parent, daemon=True).start()
        super().run()


class SpawnedChild(_Child, multiprocessing.context.SpawnProcess):
    """A process that is started with ``spawn``."""


class ForkServerChild(_Child, multiprocessing.context.ForkServerProcess):
    """A process that is started with ``forkserver``."""


def _end_with_parent() -> None:
    """End this process when its parent has ended; a killed parent would not end it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def kill_with(parent: int) -> None:
    """Have Linux kill this process when the thread of its parent that has started it ends, also if that is killed."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it was killed before
            os._exit(1)


@functools.cache
def guard_forks() -> None:
    """Make processes that this one forks leave its network connections, and end with it; a second call does nothing.

    A copy keeps a connection of a killed rank open, and its peers would wait until the timeout.
    """
    rank, main = os.getpid(), threading.main_thread()

    def in_child() -> None:
        # Another thread of the rank may end before it, and a child's child may be a daemon.
        if threading.current_thread() is main and os.getppid() == rank:
            kill_with(rank)
        with open(os.devnull, "rb") as nothing:
            for number in map(int, os.listdir("/dev/fd")):
                with contextlib.suppress(OSError), socket.socket(fileno=number) as found:
                    # The number stays in use, because objects of the parent close it later.
                    if found.detach() > 2 and found.family in (socket.AF_INET, socket.AF_INET6):
                        os.dup2(nothing.fileno(), number, inheritable=False)

    os.register_at_fork(after_in_child=in_child)


# The Megatron flags that a machine needs, each with its reason.
#
# Transformer Engine and Apex are used if they are installed; most of the flags are needed because
# one of them is missing, on CPU and on GPU.


@dataclass(frozen=True)
class Flag:
    """One flag for this machine."""

    words: tuple[str, ...]  # the flag as words of a command line
    attribute: str  # its name in Megatron's parsed namespace
    value: Any  # value of the attribute with the flag
    reason: str  # why the flag is set
    required: bool = True  # whether Megatron fails without it; the others only avoid useless work

    def __str__(self) -> str:
        return f"{' '.join(self.words)} ({self.reason})"


def _off(option: str, reason: str, required: bool = True) -> Flag:
    attributes = {"rope-fusion": "apply_rope_fusion", "persist-layer-norm": "no_persist_layer_norm"}
    attribute = attributes.get(option, option.replace("-", "_"))
    return Flag((f"--no-{option}",), attribute, attribute.startswith("no_"), reason, required)


def _has(*modules: str) -> bool:
    return any(importlib.util.find_spec(module) is not None for module in modules)


def platform_flags(is_cuda: bool, has_nccl: bool = False, has_kernels: bool = False) -> tuple[Flag, ...]:
    """The flags for this machine, from what is installed on it.

    Args:
        is_cuda: Whether the process computes on a CUDA device.
        has_nccl: Whether the backend ``nccl`` moves its tensors, even without CUDA.
        has_kernels: Whether the fused kernels of a GPU, or stand-ins, are available.
    """
    flags: list[Flag] = []
    if not is_cuda and not has_nccl:
        flags.append(
            Flag(("--distributed-backend", "gloo"), "distributed_backend", "gloo", "NCCL moves CUDA tensors only")
        )
    if not (is_cuda and _has("transformer_engine")):
        reason = "Transformer Engine cannot be used"
        flags += [Flag(("--transformer-impl", "local"), "transformer_impl", "local", reason)]
        if not has_kernels:
            flags.append(_off("rope-fusion", reason))
        if not (is_cuda and _has("apex")):
            flags.append(_off("persist-layer-norm", "torch's norms do not know it"))
        if not (is_cuda and _has("scaled_upper_triang_masked_softmax_cuda")):
            flags.append(_off("masked-softmax-fusion", "its CUDA kernel is not installed"))
    if not is_cuda and not has_kernels:
        flags += [
            _off("gradient-accumulation-fusion", "its kernel is one of CUDA"),
            _off("bias-swiglu-fusion", "nothing fuses it on CPU", required=False),
            _off("bias-dropout-fusion", "nothing fuses it on CPU", required=False),
            Flag(("--num-workers", "0"), "num_workers", 0, "every core computes", required=False),
        ]
    return tuple(flags)


def unmet(flags: tuple[Flag, ...], args: object) -> tuple[Flag, ...]:
    """The required ones of :func:`platform_flags` that a namespace parsed by Megatron does not have."""
    return tuple(flag for flag in flags if flag.required and getattr(args, flag.attribute) != flag.value)


# Weight gradients added to fp32 sums by the product itself, where Apex is not installed.
#
# Megatron takes these functions from Apex.  Without fusion a product writes a gradient in bf16, which another kernel
# reads and adds to the sum: for every slice or microbatch three passes over all gradients instead of one.

APEX = "fused_weight_gradient_mlp_cuda"


def provide_accumulation() -> None:
    """Provide Apex's extension for Megatron, if it is not installed; before ``megatron.core`` is imported."""
    if APEX in sys.modules or importlib.util.find_spec(APEX) is not None:
        return
    module = types.ModuleType(APEX)
    module.__spec__ = importlib.machinery.ModuleSpec(APEX, None)
    module.wgrad_gemm_accum_fp32 = module.wgrad_gemm_accum_fp16 = accumulate  # type: ignore[attr-defined]
    sys.modules[APEX] = module


def accumulate(source: Tensor, grad: Tensor, total: Tensor) -> None:
    """Add the gradient of a weight to a sum, in place.

    Args:
        source: Input ``[tokens, in]`` of the layer.
        grad: Gradient ``[tokens, out]`` of its output.
        total: ``[out, in]``, in the type of both or in fp32.
    """
    if total.dtype is source.dtype:
        total.addmm_(grad.t(), source)
    elif _can_widen(total.device, source.dtype):
        torch.ops.aten.addmm.dtype_out(total, grad.t(), source, total.dtype, out=total)
    else:
        total.add_(grad.t().mm(source))


@functools.lru_cache(maxsize=8)
def _can_widen(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of a narrow type are added to fp32 in one kernel on a device, by a trial.

    The host waits for it, as it may at the first launch of any kernel (docs/schedules.md).
    """
    ones = torch.ones(16, 16, device=device, dtype=dtype)
    total = torch.full((16, 16), 2.0**-14, device=device)  # lost where the sum has been rounded to the narrow type
    try:
        torch.ops.aten.addmm.dtype_out(total, ones, ones, torch.float32, out=total)
    except (RuntimeError, AttributeError):  # not on this device, or not in this torch
        return False
    return bool((total == 16 + 2.0**-14).all())
