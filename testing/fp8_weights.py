"""A weight in fp8 on a machine without it: Transformer Engine's quantised tensor, stood in for with one fixed scale."""

from types import MethodType
from typing import Any

import torch
from torch.utils._pytree import tree_map

_SCALE = 64.0


class Fp8Weight(torch.Tensor):
    """Bytes in E4M3 that are read as the type they stand for; what is copied into them is quantised.

    As Transformer Engine's tensors it has no memory of its own: slices are copies.
    """

    _data: torch.Tensor

    @classmethod
    def of(cls, data: torch.Tensor, dtype: torch.dtype) -> "Fp8Weight":
        made: Fp8Weight = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=dtype, device=data.device)
        made._data = data
        return made

    def dequantize(self) -> torch.Tensor:
        return (self._data.view(torch.float8_e4m3fn).float() / _SCALE).to(self.dtype)

    def untyped_storage(self) -> torch.UntypedStorage:
        return torch.UntypedStorage(0)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls.of(args[0]._data, args[0].dtype)
        if func is torch.ops.aten.copy_.default and isinstance(args[0], cls):
            args[0]._data.copy_(_bytes(_plain(args[1])))
            return args[0]
        return func(*tree_map(_plain, args), **tree_map(_plain, kwargs or {}))


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return (values.detach().float() * _SCALE).to(torch.float8_e4m3fn).view(torch.uint8)


def _plain(value: Any) -> Any:
    return value.dequantize() if isinstance(value, Fp8Weight) else value


def quantised(weight: torch.nn.Parameter) -> torch.nn.Parameter:
    """The parameter in fp8; it keeps its values and what is known of it, as a layer of Transformer Engine does."""
    made = torch.nn.Parameter(Fp8Weight.of(_bytes(weight), weight.dtype))
    vars(made).update(vars(weight))
    kept = [weight.detach().cpu().clone()]
    made.get_high_precision_init_val = MethodType(lambda _: kept[0], made)  # type: ignore[attr-defined]
    made.clear_high_precision_init_val = MethodType(lambda _: kept.clear(), made)  # type: ignore[attr-defined]
    return made
