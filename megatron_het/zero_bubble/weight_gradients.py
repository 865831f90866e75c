"""Weight gradients of linear layers that wait for their BACKWARD_WEIGHT.

A linear layer's backward has two matrix products: the gradient of its input, which the layer before needs, and
that of its weight, which nobody needs before the optimizer.  Megatron's layers compute both at once, so here they
get another forward function: its backward computes the first product and keeps what the second
one is made of; BACKWARD_WEIGHT computes the second and adds it to ``main_grad``, as the hooks of Megatron's DDP do.
Gradients of everything else (norms, biases, embeddings) are computed with the first half.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.utils import prepare_input_tensors_for_wgrad_compute

Key = tuple[int, int, int]
"""(microbatch, slice, chunk) of the passes that belong together."""


@dataclass(slots=True)
class _Product:
    """A weight gradient that has not been computed.

    Attributes:
        weight: The parameter.
        source: The layer's input ``[s, b, k]``; with sequence parallelism this rank's part of the sequence.
        gradient: Of the layer's output ``[s, b, n]``.
        group: Ranks to gather the input from, None where it is whole.
    """

    weight: torch.nn.Parameter
    source: torch.Tensor
    gradient: torch.Tensor
    group: dist.ProcessGroup | None

    def compute(self) -> torch.Tensor:
        """The weight's gradient ``[n, k]``."""
        source = self.source
        if self.group is not None:
            source = gather_from_sequence_parallel_region(source, group=self.group)
        gradient, source = prepare_input_tensors_for_wgrad_compute(self.gradient, source)
        return gradient.t().matmul(source)


@dataclass
class WeightGradients:
    """What the BACKWARD_INPUT operations of an iteration have left to do.

    What is kept is bounded by the schedule: a microbatch's inputs and output gradients of linear layers,
    from its BACKWARD_INPUT to its BACKWARD_WEIGHT.
    """

    splits: bool = False
    """Whether what runs belongs to a pass whose backward comes in two halves."""
    _waiting: dict[Key, list[_Product]] = field(default_factory=dict)
    _open: list[_Product] | None = None

    @contextlib.contextmanager
    def splitting(self) -> Iterator[None]:
        """Around a FORWARD whose backward comes in two halves."""
        self.splits = True
        try:
            yield
        finally:
            self.splits = False

    @contextlib.contextmanager
    def deferring(self, key: Key) -> Iterator[None]:
        """Around a BACKWARD_INPUT, recomputed forwards included: linear layers leave their second product."""
        self._open = self._waiting[key] = []
        try:
            with self.splitting():
                yield
        finally:
            self._open = None

    def take(self, product: _Product) -> None:
        """Keep a product of the BACKWARD_INPUT that runs; outside of one it is computed at once."""
        if self._open is None:
            _add(product.weight, product.compute())
        else:
            self._open.append(product)

    @torch.no_grad()
    def compute(self, key: Key, ready: Callable[[torch.nn.Parameter], None] | None = None) -> None:
        """Run one BACKWARD_WEIGHT; everything is let go of as soon as it has been used.

        Args:
            key: Of the BACKWARD_INPUT.
            ready: Is told of every weight whose gradient has been added.
        """
        products = self._waiting.pop(key)
        products.reverse()
        while products:
            product = products.pop()
            _add(product.weight, product.compute())
            if ready is not None:
                ready(product.weight)

    def check_empty(self) -> None:
        """The iteration is done.

        Raises:
            RuntimeError: Weight gradients of some passes were not computed.
        """
        if self._waiting:
            raise RuntimeError(f"BACKWARD_WEIGHT is missing for (microbatch, slice, chunk) {sorted(self._waiting)}")

    def clear(self) -> None:
        """Forget everything."""
        self._waiting.clear()


def _add(weight: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    """Accumulate as Megatron's DDP does, or as autograd does without it."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is not None:
        main_grad.add_(gradient)
    elif weight.grad is None:
        weight.grad = gradient
    else:
        weight.grad.add_(gradient)


class _Linear(torch.autograd.Function):
    """``source @ weight.T``; its backward computes the first product and hands over what the second one needs.

    The weight is no input of the function, as autograd knows them: DDP's hooks on weights would take its
    missing gradient for one that has been lost.
    """

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, layer: _Layer) -> torch.Tensor:
        ctx.save_for_backward(source)
        ctx.layer = layer
        if layer.gathers:
            source = gather_from_sequence_parallel_region(source, group=layer.group)
        return torch.matmul(source, layer.weight.t())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,), (source,), layer = grads, ctx.saved_tensors, ctx.layer
        layer.gradients.take(_Product(layer.weight, source, gradient, layer.group if layer.gathers else None))
        return _input_gradient(layer, gradient, source), None


@dataclass(frozen=True, slots=True)
class _Layer:
    """What a call of a linear layer works with.

    Attributes:
        weight: ``[n, k]``.
        reduces: Whether the input's gradient is summed over the TP group.
        gathers: Whether the input is a part of the sequence (sequence parallelism).
        group: The TP group.
        gradients: Takes the second product.
    """

    weight: torch.nn.Parameter
    reduces: bool
    gathers: bool
    group: dist.ProcessGroup | None
    gradients: WeightGradients


def _input_gradient(layer: _Layer, gradient: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The first product, summed over the TP group."""
    whole = gradient.matmul(layer.weight)
    if layer.gathers:
        part = torch.empty_like(source)
        dist.reduce_scatter_tensor(part, whole.contiguous(), group=layer.group)
        return part
    if layer.reduces:
        dist.all_reduce(whole, group=layer.group)
    return whole


@dataclass(frozen=True, slots=True)
class SplitForward:
    """In place of a layer's ``_forward_impl``, with the arguments of Megatron's own.

    Args:
        own: The layer's own, for passes whose backward is whole.
        gradients: Where second products are kept.
    """

    own: Callable[..., torch.Tensor]
    gradients: WeightGradients

    def __call__(
        self, input: torch.Tensor, weight: torch.nn.Parameter, bias: torch.Tensor | None, **options: Any
    ) -> torch.Tensor:
        """``[s, b, n]`` of ``[s, b, k]``."""
        trains = torch.is_grad_enabled() and weight.requires_grad and input.requires_grad
        if not (trains and self.gradients.splits):
            return self.own(input=input, weight=weight, bias=bias, **options)
        layer = _Layer(
            weight, options["allreduce_dgrad"], options["sequence_parallel"], options["tp_group"], self.gradients
        )
        output = _Linear.apply(input, layer)
        return output if bias is None else output + bias


def split_linear_layers(models: Iterable[torch.nn.Module], gradients: WeightGradients) -> list[torch.nn.Module]:
    """Let the backwards of Megatron's linear layers be split.

    Args:
        models: GPTModels, not wrapped.
        gradients: Where second products are kept.

    Returns:
        The layers that were changed.
    """
    found = [
        module
        for model in models
        for module in model.modules()
        if isinstance(module, ColumnParallelLinear | RowParallelLinear)
    ]
    for module in found:
        module._forward_impl = SplitForward(module._forward_impl, gradients)
    return found


def join_linear_layers(layers: Iterable[torch.nn.Module]) -> None:
    """Give layers their own forward back."""
    for layer in layers:
        vars(layer).pop("_forward_impl", None)
