"""Stand-ins for code that a dry run lacks: fused kernels of GPUs, routers of experts, and results of operators.

Stand-ins of kernels allocate and save the same tensors as the kernels, and compute nothing.

A laptop has no Transformer Engine, so Megatron would build its layers from single operations there, which save several
times as much for the backward pass.  Tensors that each kernel saves:

- attention (FlashAttention 2, section 3.1): queries, keys, values, output, and one fp32 number per query and head,
- RMSNorm: its input and one fp32 number per token,
- rotary embeddings: nothing of their own,
- SwiGLU: its input,
- gradients of weights are added to Megatron's main gradients by the matrix product itself; Adam has no temporaries.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

CountFlops = Callable[[float], None]


def replace_kernels(count: CountFlops, *, attention: bool = True) -> None:
    """Replace the kernels of Megatron and torch by the stand-ins, after Megatron was imported.

    Args:
        count: Called with the FLOPs of attention and of the gradients of weights.
        attention: Whether attention of whole sequences is fused too; else Megatron's own keeps its matrices.
    """
    from megatron.core.fusions import fused_bias_swiglu
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    def accumulate(source: Tensor, grad: Tensor, main_grad: Tensor) -> None:
        count(2.0 * source.shape[0] * source.shape[1] * grad.shape[1])

    layers._grad_accum_fusion_available = True
    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
        wgrad_gemm_accum_fp32=accumulate, wgrad_gemm_accum_fp16=accumulate
    )
    rope_utils.fused_apply_rotary_pos_emb = lambda tensor, *_frequencies, **_options: _Rotated.apply(tensor)
    multi_latent_attention.fused_apply_mla_rope_for_q = lambda queries, *_frequencies, **_options: queries  # in place
    multi_latent_attention.fused_apply_mla_rope_for_kv = _latent_keys
    fused_bias_swiglu.swiglu = _gated
    fused_bias_swiglu.swiglu_back = lambda _gradient, both: torch.empty_like(both)
    fused_bias_swiglu.weighted_swiglu = lambda both, _weights: _gated(both)  # a weight per token, as experts do
    fused_bias_swiglu.weighted_swiglu_back = lambda _gradient, *inputs: tuple(map(torch.empty_like, inputs))
    torch.nn.RMSNorm.forward = lambda self, x: _Norm.apply(x, self.weight)  # type: ignore[method-assign]

    def attend(self: Any, query: Tensor, key: Tensor, value: Tensor, *_mask: Any, **_options: Any) -> Tensor:
        output = _Attention.apply(query, key, value, count)
        return output.reshape(*output.shape[:2], -1)

    if attention:
        layers.ColumnParallelLinear.het_gathers_once = True  # from one half of a backward to the other
        DotProductAttention.forward = attend
    kind: dict[str, Any] = {"fused": True} if attention else {"foreach": True}  # torch's own, where there is no other
    torch.optim.AdamW.__init__ = functools.partialmethod(torch.optim.AdamW.__init__, **kind)  # type: ignore[assignment]


class _Attention(torch.autograd.Function):
    """``[s, b, heads, d]`` queries over ``[s, b, groups, d]`` keys and values, causal."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, count: CountFlops) -> Tensor:
        length, batch, heads, width = query.shape
        output = torch.empty((*query.shape[:-1], value.shape[-1]), dtype=query.dtype, device=query.device)
        statistics = torch.empty(batch, heads, length, dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, output, statistics)
        # Two products, half of each.
        ctx.count, ctx.flops = count, 1.0 * batch * heads * (width + value.shape[-1]) * length * length
        count(ctx.flops)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        ctx.count(2.5 * ctx.flops)  # five products
        return (*(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (query, key, value)), None)


class _Norm(torch.autograd.Function):
    """RMSNorm over the last dimension."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, weight: Tensor) -> Tensor:
        scale = torch.empty(source.shape[:-1], dtype=torch.float32, device=source.device)
        ctx.save_for_backward(source, weight, scale)
        return torch.empty_like(source)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        source, weight, _ = ctx.saved_tensors
        return torch.empty_like(source), torch.empty_like(weight)


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.empty(gradients[0].shape, dtype=gradients[0].dtype, device=gradients[0].device)


def _latent_keys(
    both: Tensor, shared: Tensor, _cos: Tensor, _sin: Tensor, _rotary: int, plain: int, value: int, *_options: Any
) -> tuple[Tensor, Tensor]:
    """Keys and values out of ``[s, b, heads, plain + value]`` and the keys' rotary part ``[s, b, 1, rotary]``."""
    keys, values = torch.split(both, [plain, value], dim=-1)
    return torch.cat((keys, shared.expand(*keys.shape[:-1], -1)), dim=-1), values.clone()


def _gated(both: Tensor) -> Tensor:
    return torch.empty((*both.shape[:-1], both.shape[-1] // 2), dtype=both.dtype, device=both.device)


# Layers of experts without values: every expert gets an equal share of the routed tokens.
#
# The number of tokens per expert depends on the scores of the router.  A dry run has none, so it assumes the balanced
# case.  The memory of a rank with all experts of a layer is the same in any other case, except for temporaries of one
# expert.


SELECT = torch.ops.aten.masked_select.default
"""The operator by which Megatron sorts tokens by their experts; its result has a row per token and chosen expert."""


def check_experts(args: Any) -> int:
    """Refuses layers of experts whose sizes depend on values.

    Args:
        args: Megatron's arguments, as parsed.

    Returns:
        The number of experts per token; 0 without experts.

    Raises:
        SystemExit: The numbers of dropped, padded or sent tokens depend on values.
    """
    if not args.num_experts:
        return 0
    for name in ("moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity"):
        value = getattr(args, name, None)
        if value is not None and value is not False:
            flag = "--" + name.replace("_", "-")
            sys.stderr.write(
                f"megatron_het.dry_run: {flag} {value}: how many tokens are dropped depends on values, which a dry run "
                "does not have. Leave the flag out here: then no token is dropped, which takes the most memory\n"
            )
            raise SystemExit(2)
    if args.moe_token_dispatcher_type != "alltoall":
        sys.stderr.write(
            f"megatron_het.dry_run: --moe-token-dispatcher-type {args.moe_token_dispatcher_type}: a dry run knows the "
            "sizes of what alltoall sends only. Use --moe-token-dispatcher-type alltoall here\n"
        )
        raise SystemExit(2)
    return int(args.moe_router_topk)


def balance_experts() -> None:
    """Make Megatron's dispatcher and experts divide tokens equally, after Megatron was imported."""
    from megatron.core.transformer.moe import router, token_dispatcher
    from megatron.core.transformer.moe.experts import SequentialMLP

    dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
    preprocess, sort, forward = dispatcher.preprocess, token_dispatcher.sort_chunks_by_idxs, SequentialMLP.forward

    @functools.wraps(preprocess)
    def known_splits(self: Any, routing_map: Tensor) -> Any:
        counts = preprocess(self, routing_map)
        if self.output_splits_tp is not None:  # every rank of a replica has an equal part of the sequence
            sent = equal_shares(self.num_out_tokens, self.ep_size)
            self.input_splits = _Sizes(sent, self.input_splits)
            self.output_splits = _Sizes([sent[self.ep_group.rank()]] * self.ep_size, self.output_splits)
            received = sum(self.output_splits)
            self.output_splits_tp = _Sizes([received] * self.tp_size, self.output_splits_tp)
        return counts

    @functools.wraps(sort)
    def sort_equal(source: Tensor, sizes: Tensor, order: Tensor, *positional: Any, **keywords: Any) -> Any:
        parts = order.numel()
        shares = _List(equal_shares(source.shape[0], parts))
        return sort(source, shares, _List(range(parts)), *positional, **keywords)

    @functools.wraps(forward)
    def forward_equal(self: Any, tokens: Tensor, counts: Tensor, probs: Tensor) -> Any:
        return forward(self, tokens, _List(equal_shares(tokens.shape[0], self.num_local_experts)), probs)

    router.sinkhorn = lambda scores: scores  # its number of iterations depends on values
    dispatcher.preprocess = known_splits
    token_dispatcher.sort_chunks_by_idxs = sort_equal
    SequentialMLP.forward = forward_equal


def selected(arguments: tuple[Any, ...], top_k: int) -> Tensor:
    """Returns a result of :data:`SELECT`: ``[tokens * top_k]`` from a ``[experts, tokens]`` mask.

    Args:
        arguments: Arguments of the operator: source and mask.
    """
    source, mask = arguments
    return torch.empty(mask.shape[-1] * top_k, dtype=source.dtype, device=source.device)


def equal_shares(tokens: int, parts: int) -> list[int]:
    """Number of tokens of each part; the first parts get one of the remaining tokens each."""
    share, rest = divmod(tokens, parts)
    return [share + (p < rest) for p in range(parts)]


class _List(list[int]):
    """Replaces a tensor of which only the values are read."""

    def tolist(self) -> list[int]:
        return list(self)


class _Sizes(_List):
    """Sizes beside the tensor that a real run keeps them in, for as long."""

    def __init__(self, values: Iterable[int], counted: Tensor) -> None:
        super().__init__(values)
        self.counted = counted


# A cache of operators' results on fake tensors, because the layers of a model repeat the same calls.
#
# A result depends only on the shapes, strides and types of the arguments, because fake tensors have no
# values.  PyTorch computes it by running the operator on the ``meta`` device, with a cache of its own,
# which takes most of the time of a dry run.  Here a second call with equal arguments only creates the tensors that the
# first one returned: new ones, views of arguments, or the arguments themselves.


_PLAIN = (int, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))
# Shapes that depend on values, and operators that change the shape or the storage of an argument.
_NOT_REMEMBERED = (torch.Tag.inplace_view, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_WRAPPING = {torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default}
_CPU = torch.device("cpu")


class _Unknown(Exception):
    """An argument with which results cannot be cached."""


@dataclass(frozen=True, slots=True)
class _Output:
    """One tensor that an operator returns."""

    given: int = -1  # it is this tensor of the arguments
    views: int = -1  # it is another view of this tensor's storage
    end_bytes: int = 0  # what a storage must have for a view
    # shape, stride, offset, dtype: of a new tensor, or of a view
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class Result:
    """Cached result of an operator."""

    outputs: tuple[_Output, ...]
    kind: type | None  # ``tuple`` or ``list`` of them, ``None`` for a single one
    flops: int


class Remembered:
    """Cache of operators' results in a ``FakeTensorMode``; ``show_new`` gets new tensors with their own storage."""

    def __init__(self, mode: FakeTensorMode, show_new: Callable[[Tensor], None]) -> None:
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

    def find(self, key: tuple[Any, ...], tensors: Sequence[Tensor]) -> Result | None:
        """Returns the cached result of a call with equal arguments; None if there is none."""
        result = self._known.get(key)
        if result is not None:
            for output in result.outputs:
                if output.end_bytes > 0 and tensors[output.views].untyped_storage().nbytes() < output.end_bytes:
                    return None  # a view of what has been freed, which must not bring it back
        return result

    def keep(self, key: tuple[Any, ...], tensors: Sequence[Tensor], result: Any, flops: int) -> None:
        """Cache a call, if its result can be created again.

        Args:
            key, tensors: Results of :meth:`key`.
            result: The operator's result.
        """
        kind = type(result) if isinstance(result, tuple | list) else None
        found: list[Tensor] = list(result) if isinstance(result, tuple | list) else [result]
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

    def again(self, result: Result, tensors: Sequence[Tensor]) -> Any:
        """Create a cached result again, with the tensors of this call."""
        if result.kind is None:
            return self._tensor(result.outputs[0], tensors)
        made = [self._tensor(output, tensors) for output in result.outputs]
        return made if result.kind is list else tuple(made)

    def _tensor(self, output: _Output, tensors: Sequence[Tensor]) -> Tensor:
        if output.given >= 0:
            return tensors[output.given]
        with torch._C._DisableTorchDispatch():
            if output.views >= 0:
                storage = tensors[output.views].untyped_storage()
                plain = torch.empty(0, dtype=output.dtype, device="meta")
                plain.set_(storage, output.offset, output.shape, output.stride)
            else:
                plain = torch.empty_strided(output.shape, output.stride, dtype=output.dtype, device="meta")
        tensor: Tensor = Tensor._make_subclass(
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


def _output(tensor: Any, tensors: Sequence[Tensor]) -> _Output | None:
    """Describes how to create a tensor again; None if that is unknown."""
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
