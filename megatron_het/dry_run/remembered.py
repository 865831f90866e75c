"""Results of operators on fake tensors, remembered: the layers of a model ask for the same ones again and again.

What an operator returns depends on the shapes, strides and types of what it is given, because fake tensors have no
values.  PyTorch finds it out by running the operator on the ``meta`` device, and remembers it in a cache of its own,
which costs most of a dry run.  Here the second call with equal arguments only makes the tensors that the first one
returned: new ones, views of arguments, or the arguments themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_PLAIN = (int, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))
# Shapes that depend on values, and operators that change the shape or the storage of an argument.
_NOT_REMEMBERED = (torch.Tag.inplace_view, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_WRAPPING = {torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default}
_CPU = torch.device("cpu")


class _Unknown(Exception):
    """An argument of which nothing can be remembered."""


@dataclass(frozen=True, slots=True)
class _Output:
    """One tensor that an operator returns.

    Attributes:
        given: It is this tensor of the arguments.
        views: It is another view of this tensor's storage.
        shape, stride, offset, dtype: Of a new tensor, or of a view.
        end_bytes: What a storage must have for a view.
    """

    given: int = -1
    views: int = -1
    end_bytes: int = 0
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class Result:
    """Holds what an operator did.

    Attributes:
        outputs: Its tensors.
        kind: ``tuple`` or ``list`` of them, ``None`` for a single one.
        flops: Of the call.
    """

    outputs: tuple[_Output, ...]
    kind: type | None
    flops: int


class Remembered:
    """Use inside of a ``FakeTensorMode``.

    Args:
        mode: Whose tensors these are.
        show_new: Told of every tensor that is made here and has a storage of its own.
    """

    def __init__(self, mode: FakeTensorMode, show_new: Callable[[torch.Tensor], None]) -> None:
        self._mode, self._show_new = mode, show_new
        self._attributes = dict(FakeTensor(mode, torch.empty(0, device="meta"), _CPU).__dict__)
        self._known: dict[tuple[Any, ...], Result] = {}
        self._excluded: dict[Any, bool] = {}

    def key(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
        """Finds what the result depends on, and the tensors among the arguments; a key of None is never remembered."""
        excluded = self._excluded.get(func)
        if excluded is None:
            excluded = self._excluded[func] = _is_excluded(func)
        if excluded:
            return None, []
        key: list[Any] = [func]
        tensors: list[Any] = []
        try:
            _describe(args, key, tensors)
            for name, value in kwargs.items():
                key.append(name)
                _describe_one(value, key, tensors)
        except _Unknown:
            return None, []
        return tuple(key), tensors

    def find(self, key: tuple[Any, ...], tensors: Sequence[torch.Tensor]) -> Result | None:
        """Returns what the operator did when it was called with equal arguments."""
        result = self._known.get(key)
        if result is not None:
            for output in result.outputs:
                if output.end_bytes > 0 and tensors[output.views].untyped_storage().nbytes() < output.end_bytes:
                    return None  # a view of what has been freed, which must not bring it back
        return result

    def keep(self, key: tuple[Any, ...], tensors: Sequence[torch.Tensor], result: Any, flops: int) -> None:
        """Remember a call, if what it returned can be made again.

        Args:
            key, tensors: From :meth:`key`.
            result: What the operator returned.
            flops: Of the call.
        """
        kind = type(result) if isinstance(result, tuple | list) else None
        found: list[torch.Tensor] = list(result) if isinstance(result, tuple | list) else [result]
        outputs = []
        for i, tensor in enumerate(found):
            if any(tensor is one for one in found[:i]):
                return
            output = _output(tensor, tensors)
            if output is None:
                return
            outputs.append(output)
        storages = [t.untyped_storage()._cdata for t, o in zip(found, outputs, strict=True) if o.given < 0 > o.views]
        if len(set(storages)) == len(storages):
            self._known[key] = Result(tuple(outputs), kind, flops)

    def again(self, result: Result, tensors: Sequence[torch.Tensor]) -> Any:
        """Do what was remembered with the tensors of this call."""
        if result.kind is None:
            return self._tensor(result.outputs[0], tensors)
        made = [self._tensor(output, tensors) for output in result.outputs]
        return made if result.kind is list else tuple(made)

    def _tensor(self, output: _Output, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        if output.given >= 0:
            return tensors[output.given]
        with torch._C._DisableTorchDispatch():
            if output.views >= 0:
                storage = tensors[output.views].untyped_storage()
                plain = torch.empty(0, dtype=output.dtype, device="meta")
                plain.set_(storage, output.offset, output.shape, output.stride)
            else:
                plain = torch.empty_strided(output.shape, output.stride, dtype=output.dtype, device="meta")
        tensor: torch.Tensor = torch.Tensor._make_subclass(
            FakeTensor, plain, False, dispatch_device=True, device_for_backend_keys=_CPU
        )
        torch._C._set_throw_on_mutable_data_ptr(tensor)
        tensor.__dict__.update(self._attributes)
        if output.views < 0:
            self._show_new(tensor)
        return tensor


def _is_excluded(func: Any) -> bool:
    """Whether more than shapes decides what an operator returns, or it is none of PyTorch's own."""
    if func.namespace != "aten" or func in _WRAPPING or any(tag in func.tags for tag in _NOT_REMEMBERED):
        return True
    return any(argument.is_out for argument in func._schema.arguments)


def _describe(values: Sequence[Any], key: list[Any], tensors: list[Any]) -> None:
    key.append(len(values))
    for value in values:
        _describe_one(value, key, tensors)


def _describe_one(value: Any, key: list[Any], tensors: list[Any]) -> None:
    kind = type(value)
    if kind is FakeTensor:
        if value.constant is not None or value.fake_device != _CPU:
            raise _Unknown
        key += (value.dtype, value.shape, value.stride(), value.storage_offset())
        tensors.append(value)
    elif kind is list or kind is tuple:
        _describe(value, key, tensors)
    elif kind in _PLAIN:
        key += (kind, value)
    elif kind is float:
        key.append(float)  # no shape depends on it
    else:
        raise _Unknown


def _output(tensor: Any, tensors: Sequence[torch.Tensor]) -> _Output | None:
    """How to make a tensor again; None where that is not known."""
    for i, given in enumerate(tensors):
        if tensor is given:
            return _Output(given=i)
    if type(tensor) is not FakeTensor or tensor.constant is not None or tensor.fake_device != _CPU:
        return None
    if tensor.is_conj() or tensor.is_neg() or tensor.layout != torch.strided:
        return None
    storage, shape, stride = tensor.untyped_storage(), tuple(tensor.shape), tensor.stride()
    spread = sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) + 1 if tensor.numel() else 0
    offset = int(tensor.storage_offset())
    end_bytes = int(offset + spread) * tensor.element_size()
    for i, given in enumerate(tensors):
        if given.untyped_storage()._cdata == storage._cdata:
            return _Output(
                given=-1, views=i, end_bytes=end_bytes, shape=shape, stride=stride, offset=offset, dtype=tensor.dtype
            )
    if offset or storage.nbytes() != end_bytes:
        return None
    return _Output(shape=shape, stride=stride, dtype=tensor.dtype)
