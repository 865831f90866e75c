"""Backward passes in two halves as a feature of a rank."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.utils import prepare_input_tensors_for_wgrad_compute

from megatron_het.lowering.ranks import RankOp
from megatron_het.runtime import feature
from megatron_het.schedule.kinds import Kind

# Deferred weight gradients of linear layers, which BACKWARD_WEIGHT computes.
#
# A linear layer's backward has two matrix products: the gradient of its input, which the layer before needs, and
# that of its weight, which is not needed before the optimizer.  Megatron's layers compute both at once, so here they
# get another forward function: its backward computes the first product and keeps the inputs of the second
# one.  BACKWARD_WEIGHT computes the second and adds it to ``main_grad``, as the hooks of Megatron's DDP do.
# All other gradients (norms, biases, embeddings) are computed with the first half.
# Transformer Engine's layers can defer the second product themselves.  They query a store of their own whether to, and
# ``backward_dw`` takes deferred products from it, in the order of the backwards.  Here that store is replaced by
# :class:`LayerStore`, which keeps them by pass.

Key = tuple[int, int, int]  # (microbatch, slice, chunk) of the passes that belong together


@dataclass(slots=True)
class _Product:
    """A weight gradient that has not been computed."""

    weight: torch.nn.Parameter
    source: torch.Tensor  # the layer's input ``[s, b, k]``; with sequence parallelism this rank's part of the sequence
    gradient: torch.Tensor  # gradient of the layer's output ``[s, b, n]``
    group: dist.ProcessGroup | None  # ranks to gather the input from, None if it is whole

    def add(self) -> tuple[torch.nn.Parameter, ...]:
        """Compute it and add it to the gradients; returns the parameters for which an overlapped reduction waits."""
        source = self.source
        if self.group is not None:
            source = gather_from_sequence_parallel_region(source, group=self.group)
        gradient, source = prepare_input_tensors_for_wgrad_compute(self.gradient, source)
        _add(self.weight, gradient.t().matmul(source))
        return (self.weight,)


@dataclass(slots=True)
class _PutOff:
    """A deferred weight gradient of a Transformer Engine layer."""

    store: "LayerStore"
    entry: Sequence[Any]

    def add(self) -> tuple[torch.nn.Parameter, ...]:
        """Let the layer compute it; returns all parameters of the layer, whose gradients are complete now."""
        return self.store.complete(self.entry)


class LayerStore:
    """Replaces a Transformer Engine layer's store of weight gradients (``WeightGradStore``).

    Args:
        gradients: Keeps the deferred products.
    """

    def __init__(self, layer: Any, gradients: "WeightGradients") -> None:
        self._layer, self._gradients = layer, gradients
        self._due: list[Sequence[Any]] = []
        self.own = layer.wgrad_store

    @property
    def context(self) -> "LayerStore":
        """Returns the object whose ``empty`` the layer reads."""
        return self

    def empty(self) -> bool:
        """Whether no product is to be computed now."""
        return not self._due

    def delay_wgrad_compute(self) -> bool:
        """Whether to defer: in passes that are split, and while deferred products are computed.

        Transformer Engine calls this in the backward, from release 2.16 on in the forward too.
        """
        return self._gradients.splits or bool(self._due)

    def put(self, tensors: Sequence[torch.Tensor], function: Callable[..., Any]) -> None:
        """Defer a function of tensors."""
        self._gradients.take(_PutOff(self, (tensors, function)))

    def pop(self) -> tuple[Any, Sequence[torch.Tensor]]:
        """Computes the product that is due; returns its result and its tensors.

        A bias that is added outside of the layer, or any bias in fp8, has its gradient from the first half.  The layer
        nevertheless takes one from this result if the bias has no ``grad``.
        """
        tensors, function = self._due.pop()
        found = function(*tensors)
        of_biases = found[1] if isinstance(found[1], Sequence) else [found[1]]
        if not any(part is not None and part.numel() for part in of_biases):
            for name, bias in self._layer.named_parameters(recurse=False):
                if "bias" in name and bias.requires_grad:
                    bias.grad = torch.zeros_like(bias)
        return found, tensors

    def complete(self, entry: Sequence[Any]) -> tuple[torch.nn.Parameter, ...]:
        """Let the layer compute its deferred product; returns the layer's parameters.

        With gradient accumulation fusion the layer adds to ``main_grad`` itself.  Otherwise it sets ``grad``, which may
        hold gradients of other passes.
        """
        weights = tuple(p for p in self._layer.parameters(recurse=False) if p.requires_grad)
        before = [weight.grad for weight in weights]
        for weight in weights:
            weight.grad = None
        self._due.append(entry)
        self._layer.backward_dw()
        if self._due:
            raise RuntimeError(f"{type(self._layer).__name__}.backward_dw has not computed a gradient that was put off")
        for weight, earlier in zip(weights, before, strict=True):
            found, weight.grad = weight.grad, earlier
            if found is not None:
                _add(weight, found)
        return weights


_Half = _Product | _PutOff  # the second half of a layer's backward


@dataclass
class WeightGradients:
    """Holds the weight gradients that the BACKWARD_INPUT operations of an iteration have deferred.

    The schedule bounds the memory: a microbatch's inputs and output gradients of linear layers,
    from its BACKWARD_INPUT to its BACKWARD_WEIGHT.
    """

    splits: bool = False  # whether the running pass has its backward in two halves
    _waiting: dict[Key, list[_Half]] = field(default_factory=dict)
    _open: list[_Half] | None = None

    @contextlib.contextmanager
    def splitting(self) -> Iterator[None]:
        """Context around a FORWARD whose backward runs in two halves."""
        self.splits = True
        try:
            yield
        finally:
            self.splits = False

    @contextlib.contextmanager
    def deferring(self, key: Key) -> Iterator[None]:
        """Context around a BACKWARD_INPUT, recomputed forwards included, in which second products are deferred."""
        self._open = self._waiting[key] = []
        try:
            with self.splitting():
                yield
        finally:
            self._open = None

    def take(self, half: _Half) -> None:
        """Defer the second half of a layer's backward; outside of a BACKWARD_INPUT it is computed at once."""
        if self._open is None:
            half.add()
        else:
            self._open.append(half)

    @torch.no_grad()
    def compute(self, key: Key, ready: Callable[[torch.nn.Parameter], None] | None = None) -> None:
        """Run one BACKWARD_WEIGHT, free its inputs at once, and call ``ready`` for every complete weight."""
        halves = self._waiting.pop(key)
        halves.reverse()
        while halves:
            weights = halves.pop().add()
            if ready is not None:
                for weight in weights:
                    ready(weight)

    def check_empty(self) -> None:
        """Raise RuntimeError if weight gradients of some passes were not computed in the iteration."""
        if self._waiting:
            raise RuntimeError(f"BACKWARD_WEIGHT is missing for (microbatch, slice, chunk) {sorted(self._waiting)}")

    def clear(self) -> None:
        """Drop all deferred products."""
        self._waiting.clear()


def _add(weight: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    """Add a gradient to ``main_grad`` as Megatron's DDP does, or without DDP to ``grad`` as autograd does."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is not None:
        main_grad.add_(gradient)
    elif weight.grad is None:
        weight.grad = gradient
    else:
        weight.grad.add_(gradient)


class _Linear(torch.autograd.Function):
    """``source @ weight.T``; its backward computes the first product and defers the second one.

    The weight is not an input of the function for autograd, because DDP's hooks on weights would treat its
    missing gradient as an error.
    """

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, layer: "_Layer") -> torch.Tensor:
        ctx.save_for_backward(source)
        ctx.layer = layer
        if layer.gathers:
            source = gather_from_sequence_parallel_region(source, group=layer.group)
        return torch.matmul(source, layer.weight.t())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,), (source,), layer = grads, ctx.saved_tensors, ctx.layer
        # Detached: after a recomputation the graph would keep the layer's input and that input's gradient.
        kept, group = source.detach(), layer.group if layer.gathers else None
        if group is not None and layer.gathers_once:
            kept, group = gather_from_sequence_parallel_region(source, group=group), None
        layer.gradients.take(_Product(layer.weight, kept, gradient, group))
        return _input_gradient(layer, gradient, source), None


@dataclass(frozen=True, slots=True)
class _Layer:
    """Inputs and settings of a linear layer's call."""

    weight: torch.nn.Parameter  # ``[n, k]``
    reduces: bool  # whether the input's gradient is summed over the TP group
    gathers: bool  # whether the input is a part of the sequence (sequence parallelism)
    gathers_once: bool  # whether the second product reuses the input that the first half gathered, as in dry runs
    group: dist.ProcessGroup | None
    gradients: WeightGradients  # keeps the second product


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
    """Replaces a layer's ``_forward_impl``, with the arguments of Megatron's own.

    Args:
        own: The layer's own function, for passes whose backward is not split.
        gradients: Keeps the second products.
    """

    own: Callable[..., torch.Tensor]
    gradients: WeightGradients

    def __call__(
        self, input: torch.Tensor, weight: torch.nn.Parameter, bias: torch.Tensor | None, **options: Any
    ) -> torch.Tensor:
        """Maps ``[s, b, k]`` to ``[s, b, n]``."""
        trains = torch.is_grad_enabled() and weight.requires_grad and input.requires_grad
        if not (trains and self.gradients.splits):
            return self.own(input=input, weight=weight, bias=bias, **options)
        gathers, once = options["sequence_parallel"], getattr(ColumnParallelLinear, "het_gathers_once", False)
        layer = _Layer(weight, options["allreduce_dgrad"], gathers, once, options["tp_group"], self.gradients)
        output = _Linear.apply(input, layer)
        return output if bias is None else output + bias


def split_linear_layers(models: Iterable[torch.nn.Module], gradients: WeightGradients) -> list[torch.nn.Module]:
    """Split the backwards of linear layers, Megatron's own and Transformer Engine's; returns the changed layers.

    Args:
        models: GPTModels without wrappers.
        gradients: Keeps the second products.
    """
    found = []
    for module in (module for model in models for module in model.modules()):
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            layer: Any = module
            layer._forward_impl = SplitForward(layer._forward_impl, gradients)
            found.append(module)
        elif getattr(module, "wgrad_store", None) is not None:
            _split_layer(module, gradients)
            found.append(module)
    return found


def _split_layer(layer: Any, gradients: WeightGradients) -> None:
    """Replace the store of a layer of Transformer Engine."""
    layer.wgrad_store = LayerStore(layer, gradients)
    # Megatron's subclasses check it before they call the layer's own ``backward_dw``.  No other code reads it after
    # models are built; as a flag it is refused, because it needs Megatron's own schedules.
    owners: tuple[Any, ...] = layer, getattr(layer, "config", None)
    for owner in owners:
        if hasattr(owner, "delay_wgrad_compute"):
            owner.delay_wgrad_compute = True


def join_linear_layers(layers: Iterable[torch.nn.Module]) -> None:
    """Restore the layers' own forward or store."""
    for layer in layers:
        vars(layer).pop("_forward_impl", None)
        store = getattr(layer, "wgrad_store", None)
        if isinstance(store, LayerStore):
            layer.wgrad_store = store.own


class ZeroBubbleFeature(feature.RuntimeFeature):
    """Defers the weight gradients of linear layers from BACKWARD_INPUT to BACKWARD_WEIGHT."""

    def __init__(self) -> None:
        self._gradients = WeightGradients()
        self._layers: list[torch.nn.Module] = []
        self._late: dict[torch.nn.Parameter, Any] = {}  # Transformer Engine's parameters with DDP's hooks
        self._hides = False  # whether DDP's hooks have to skip these

    def handlers(self) -> Mapping[Kind, feature.Handler]:
        return {Kind.BACKWARD_WEIGHT: self._backward_weight}

    def attach(self, models: Sequence[torch.nn.Module]) -> None:
        self._layers += split_linear_layers(models, self._gradients)
        for layer in (layer for layer in self._layers if hasattr(layer, "wgrad_store")):
            for parameter in (p for p in layer.parameters(recurse=False) if p.requires_grad and p not in self._late):
                self._late[parameter] = parameter.register_post_accumulate_grad_hook(self._take)

    def around_forward(self, forward: feature.ForwardPass, call: feature.Call) -> feature.Around:
        """See :class:`RuntimeFeature`; all backwards of these schedules are split."""
        return contextlib.nullcontext() if call.forward_only else self._gradients.splitting()

    def around_backward(
        self, backward: feature.BackwardPass, call: feature.Call, state: feature.Iteration
    ) -> feature.Around:
        if backward.op.kind != Kind.BACKWARD_INPUT:
            return contextlib.nullcontext()
        return self._first_half(backward.op.key, call.models[backward.op.chunk] if self._late else None)

    @contextlib.contextmanager
    def _first_half(self, key: Key, model: Any) -> Iterator[None]:
        """Context around a BACKWARD_INPUT, in which DDP's hooks skip parameters of Transformer Engine's layers."""
        with self._gradients.deferring(key):
            if not _overlaps(model):
                yield
                return
            groups, self._hides = model.param_to_bucket_group, True
            model.param_to_bucket_group = {p: group for p, group in groups.items() if p not in self._late}
            try:
                yield
            finally:
                model.param_to_bucket_group, self._hides = groups, False

    def _take(self, parameter: Any) -> None:
        """Add a gradient from the first half (of a norm inside a layer), as DDP's hooks would do."""
        if self._hides:
            # A layer that adds to ``main_grad`` itself returns a placeholder.
            if parameter.grad is not None and not parameter.grad_added_to_main_grad:
                _add(parameter, parameter.grad)
            parameter.grad = None

    def _backward_weight(self, op: RankOp, call: feature.Call, state: feature.Iteration) -> None:
        ddp: Any = call.models[op.chunk]
        if not _overlaps(ddp):
            self._gradients.compute(op.key)
            return
        # As DDP's hooks do after an ordinary backward: a bucket is reduced as soon as all of its gradients
        # are complete.  DDP counts gradients per parameter, from any source.
        self._gradients.compute(
            op.key, lambda weight: ddp.param_to_bucket_group[weight].register_grad_ready(weight, ddp.force_all_reduce)
        )

    def finish(self, call: feature.Call, state: feature.Iteration) -> None:
        self._gradients.check_empty()

    def close(self) -> None:
        join_linear_layers(self._layers)
        self._layers.clear()
        for hook in self._late.values():
            hook.remove()
        self._late.clear()
        self._gradients.clear()


def _overlaps(model: Any) -> bool:
    """Whether DDP reduces gradients while backwards run (``--overlap-grad-reduce``)."""
    config = getattr(model, "ddp_config", None)
    return config is not None and config.overlap_grad_reduce


def open_feature(context: feature.OpenContext) -> feature.RuntimeFeature:
    """This rank's part of the feature."""
    return ZeroBubbleFeature()
