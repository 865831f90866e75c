"""A CUDA device that is not there: fake tensors live on ``cuda:0``, and what mixes devices is an error.

Python code sees tensors on ``cuda:0`` and tensors on the CPU.  torch's fake tensors check every operator: two
devices in one operator are refused, as on a GPU.  torch's C++ code believes that all of them are on the CPU, because
its autograd engine asks a real device about its streams.  So a device that C++ code names is not believed
(:class:`OneDevice`), and every function of Python that names a device says so before it goes there.

Nothing here is undone: the process is for one dry run.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.data
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_het.device import cpu

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
_EFFICIENT_BACKWARD = torch.ops.aten._efficient_attention_backward.default
"""torch 2.13 cannot run it on fake tensors: its stand-in lacks the argument ``out``."""
_PINNED: set[int] = set()
"""Storages of pinned memory, by address."""


class _Named(threading.local):
    """Whether a function of Python is at work that has chosen the device of what it makes."""

    now = False


_NAMED = _Named()


@contextlib.contextmanager
def named() -> Iterator[None]:
    """Devices are believed inside."""
    before, _NAMED.now = _NAMED.now, True
    try:
        yield
    finally:
        _NAMED.now = before


def install() -> None:
    """Give this process a device; before Megatron is imported, and before tensors are made."""
    cpu._without_compiler()
    cpu._device_identity()
    cpu._streams_and_events()
    cpu._random_state()
    cpu._memory_queries()
    _device_of_fake_tensors()
    for name in cpu._FACTORIES:
        setattr(torch, name, _making(getattr(torch, name)))
    for name in cpu._TENSOR_FACTORIES:
        setattr(torch.Tensor, name, _making(getattr(torch.Tensor, name), like_self=True))
    _moves()
    _loaders()


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in pinned host memory."""
    return tensor.untyped_storage()._cdata in _PINNED


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Note that a tensor's memory is pinned."""
    storage = tensor.untyped_storage()
    if storage._cdata not in _PINNED:
        _PINNED.add(storage._cdata)
        weakref.finalize(storage, _PINNED.discard, storage._cdata).atexit = False
    return tensor


def _device_of_fake_tensors() -> None:
    from torch._subclasses import fake_tensor

    def device(args: Any) -> torch.device:
        return torch.device("meta") if args[0].fake_mode.in_kernel_invocation else CPU

    fake_tensor._DISPATCH_META_HANDLERS[torch.ops.prim.device.default] = device
    fake: Any = fake_tensor.FakeTensor
    fake.is_cuda = property(lambda self: self.fake_device.type == "cuda")
    fake.is_cpu = property(lambda self: self.fake_device.type == "cpu")
    type_of = torch.Tensor.type

    @functools.wraps(type_of)
    def cuda_type(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = type_of(self, *args, **kwargs)
        if isinstance(result, str) and self.is_cuda and not result.startswith("torch.cuda."):
            return "torch.cuda." + result.removeprefix("torch.")
        return result

    torch.Tensor.type = cuda_type  # type: ignore[method-assign]


def _device(value: Any) -> torch.device:
    """Returns what a device, its name or its number means."""
    device = torch.device("cuda", value) if isinstance(value, int) else torch.device(value)
    return CUDA if device.type == "cuda" else device


def _making(function: Callable[..., Any], like_self: bool = False) -> Callable[..., Any]:
    """A factory whose device is believed, and whose pinned memory is remembered."""

    @functools.wraps(function)
    def make(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = _device(kwargs["device"])
        elif like_self or "like" in function.__name__:
            kwargs["device"] = args[0].device
        pinned = kwargs.pop("pin_memory", False)
        with named():
            made = function(*args, **kwargs)
        return pin(made) if pinned else made

    return make


def _move(tensor: torch.Tensor, device: torch.device, non_blocking: bool = False) -> torch.Tensor:
    if tensor.device == device:
        return tensor
    with named():
        return torch.ops.aten._to_copy.default(tensor, device=device, non_blocking=non_blocking)


def _moves() -> None:
    """``to``, ``cuda``, ``cpu`` and ``pin_memory`` of tensors, and the first three of modules."""
    original = torch.Tensor.to

    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """One copy for device, dtype and layout, as torch's makes."""
        target, rest = kwargs.pop("device", None), list(args)
        if rest and isinstance(rest[0], torch.Tensor):
            target, rest[0] = rest[0].device, rest[0].dtype
        elif rest and isinstance(rest[0], str | int | torch.device) and not isinstance(rest[0], bool):
            target = rest.pop(0)
        elif rest and rest[0] is None:
            rest.pop(0)
        names = ("dtype", "non_blocking", "copy") if not rest or not isinstance(rest[0], bool) else ("non_blocking",)
        wanted = dict(zip(names, rest, strict=False)) | kwargs
        device = self.device if target is None else _device(target)
        if device == self.device and not wanted.get("copy") and wanted.get("dtype") in (None, self.dtype):
            return self
        wanted.pop("copy", None)
        with named():
            return torch.ops.aten._to_copy.default(self, device=device, **wanted)

    def cuda(self: torch.Tensor, device: Any = None, non_blocking: bool = False, **_: Any) -> torch.Tensor:
        return _move(self, CUDA, non_blocking)

    tensor: Any = torch.Tensor
    tensor.to, tensor.cuda = to, cuda
    tensor.cpu = lambda self, *_, **__: _move(self, CPU)
    tensor.pin_memory = lambda self, *_: self if is_pinned(self) else pin(self.clone())
    tensor.is_pinned = lambda self, *_: is_pinned(self)
    module: Any = torch.nn.Module
    module.cuda = lambda self, device=None: _move_module(self, CUDA)
    module.cpu = lambda self: _move_module(self, CPU)


def _loaders() -> None:
    """What a data loader gives is pinned when the loader was told so."""
    loader: Any = torch.utils.data.DataLoader
    original = loader.__iter__

    def pinned(self: Any) -> Iterator[Any]:
        for batch in original(self):
            if self.pin_memory:
                for leaf in tree_leaves(batch):
                    if isinstance(leaf, torch.Tensor):
                        pin(leaf)
            yield batch

    loader.__iter__ = pinned


def _move_module(module: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """torch's own cannot give a parameter other fake data."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.device != device:
                moved = torch.nn.Parameter(_move(parameter.detach(), device), parameter.requires_grad)
                for key, value in parameter.__dict__.items():
                    moved.__dict__.setdefault(key, value)  # its own are those of a fake tensor
                part._parameters[name] = moved
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = _move(buffer, device)
    return module


class OneDevice(TorchDispatchMode):
    """Puts what C++ code makes where its tensors are; use inside of a ``FakeTensorMode``."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _EFFICIENT_BACKWARD:
            return (*(torch.empty_like(t) for t in args[1:4]), torch.empty((), device=args[1].device))
        device = kwargs.get("device")
        if device is not None and not _NAMED.now:
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            kwargs = {**kwargs, "device": given[0].device if given else CUDA}
        return func(*args, **kwargs)
