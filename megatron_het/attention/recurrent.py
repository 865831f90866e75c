"""Recurrent layers over slices: the state that a slice passes to the next one, and its gradient on the way back.

In a Mamba mixer or a gated delta net the tokens before a slice act through two tensors: the last inputs of the
convolution, and the state of the recurrence.  A forward pass reads both from the slice before and stores its own.  The
backward passes run over the slices in reverse; each stores the gradient of the state that its forward has read.  With
packed documents a slice is computed document by document, and every document begins with a zero state.  The rest of
the layers, including the kernels, is Megatron's.
Context-parallel ranks have blocks from both ends of a slice, but the recurrence runs over its tokens in order.  So an
all-to-all gives each rank all tokens for some of the heads, and another one returns the results.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_het.attention.calls import Reach
from megatron_het.attention.core import SliceParams
from megatron_het.attention.kv_pool import CacheError
from megatron_het.attention.places import Sharing, take_blocks
from megatron_het.families import family_of_model
from megatron_het.plan.placement import Blocks, part_tokens

_RATES, _STEPS, _LEAST_STEP = (1, 16), (0.001, 0.1), 1e-4
"""Initial ranges of the rates and the steps of a Mamba layer, and the smallest step, as in Megatron."""


class Left(NamedTuple):
    """State that a slice passes to the next one."""

    inputs: Tensor  # the last inputs of the convolution, ``[b, tokens, channels]``
    state: Tensor  # of the recurrence


class Key(NamedTuple):
    """A pass of a layer over a slice: microbatch, which run of the layer it is, and number of the slice."""

    microbatch: int
    run: int
    part: int


class StateCache:
    """States of slices in one layer, and their gradients, from a slice's forward to its backward."""

    def __init__(self) -> None:
        # returns the ranks that share a slice, from the number of its tokens on each; None if no rank shares one
        self.sharing: Callable[[tuple[int, ...]], Sharing] | None = None
        self._left: dict[Key, Left] = {}
        self._gradients: dict[Key, Sequence[Tensor]] = {}
        self._open: dict[tuple[int, int], int] = {}  # number of slices whose backward has not run yet

    def before(self, key: Key) -> Left:
        """Returns the state of the slice before ``key``; raises CacheError if that slice has not run."""
        found = self._left.get(key._replace(part=key.part - 1))
        if found is None:
            raise CacheError(
                f"microbatch {key.microbatch} slice {key.part}: the slice before it has left no state: "
                "slices must go forward in order"
            )
        return found

    def leave(self, key: Key, left: Left) -> None:
        """Store the state after a slice; a recomputed forward stores nothing."""
        held = self._open.get(key[:2], 0)
        if key.part >= held:
            self._left[key] = left
            self._open[key[:2]] = key.part + 1

    def hand_back(self, key: Key, gradients: Sequence[Tensor]) -> None:
        """Store the gradients of the state that a slice has read, and delete that state."""
        before = key._replace(part=key.part - 1)
        self._gradients[before] = gradients
        del self._left[before]

    def gradients(self, key: Key) -> Sequence[Tensor] | None:
        """Begins a slice's backward: returns the gradients of the state after it, None for the last slice.

        Raises:
            CacheError: The backward of a later slice has to run first.
        """
        if self._open.get(key[:2]) != key.part + 1:
            raise CacheError(
                f"backward of microbatch {key.microbatch} slice {key.part} while {self._open.get(key[:2], 0)} slices "
                "have left states: slices must go backward last first, each once"
            )
        self._left.pop(key, None)
        self._open[key[:2]] = key.part
        if not key.part:
            del self._open[key[:2]]
        return self._gradients.pop(key, None)

    def drop(self, microbatch: int) -> None:
        """Delete a microbatch's states without a backward pass (evaluation)."""
        self._left = {key: left for key, left in self._left.items() if key.microbatch != microbatch}
        self._open = {key: count for key, count in self._open.items() if key[0] != microbatch}

    def check_empty(self) -> None:
        """Raise if the cache is not empty."""
        if self._left or self._gradients or self._open:
            raise CacheError(f"states of slices left at the end of the step: {sorted(self._open)}")

    def tensors(self) -> list[Tensor]:
        """All tensors of the cache."""
        return [tensor for held in (self._left, self._gradients) for pair in held.values() for tensor in pair]


class _Take(torch.autograd.Function):
    """Reads the state of the slice before; ``anchor`` only makes autograd run the backward, and gets no gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, cache: StateCache, key: Key) -> tuple[Tensor, Tensor]:
        ctx.cache, ctx.key = cache, key
        inputs, state = cache.before(key)
        return inputs.detach(), state.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.cache.hand_back(ctx.key, gradients)
        return None, None, None


class _Leave(torch.autograd.Function):
    """Identity of ``out`` that stores the state for the next slice; its backward returns that state's gradient."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, inputs: Tensor, state: Tensor, cache: StateCache, key: Key) -> Tensor:
        ctx.cache, ctx.key = cache, key
        cache.leave(key, Left(inputs.detach().clone(), state.detach()))  # a view would keep all tokens
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        inputs, state = ctx.cache.gradients(ctx.key) or (None, None)
        return grad_out, inputs, state, None, None


class Heads(NamedTuple):
    """Ranges ``[first, end)`` of a recurrent layer's heads, and of the key heads or groups that they share."""

    own: tuple[int, int]
    shared: tuple[int, int]


@functools.cache
def divided_heads(shared: int, each: int, ranks: int) -> tuple[Heads, ...]:
    """Returns the heads of every context-parallel rank, divided as evenly as possible.

    Args:
        shared: Number of key heads or groups that heads share.
        each: Number of heads that share one of them.
        ranks: Number of ranks, at most that of heads.
    """
    found = []
    if ranks <= shared:
        for a, b in _evenly(shared, ranks):
            found.append(Heads((a * each, b * each), (a, b)))
        return tuple(found)
    for i, (a, b) in enumerate(_evenly(ranks, shared)):  # several ranks have the same shared head
        found += [Heads((i * each + c, i * each + d), (i, i + 1)) for c, d in _evenly(each, b - a)]
    return tuple(found)


def _evenly(count: int, parts: int) -> list[tuple[int, int]]:
    return list(itertools.pairwise(i * count // parts for i in range(parts + 1)))


class Section(NamedTuple):
    """Number of channels per head, or per shared key head or group, in a part of a tensor."""

    width: int
    is_shared: bool = False


class _Swap(torch.autograd.Function):
    """All-to-all of one tensor per context-parallel rank; the backward returns the gradients."""

    @staticmethod
    def forward(ctx: Any, sharing: Sharing, shapes: Any, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.sharing, ctx.shapes = sharing, [part.shape for part in parts]
        return tuple(part.view_as(part) for part in sharing.swap(parts, shapes))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.sharing.swap(gradients, ctx.shapes)


Kernel = Callable[..., tuple[Tensor, Tensor]]
"""Returns output ``[b, s, heads, size]`` and last state of one document.  Arguments: the convolution's inputs with
``history`` earlier ones in front, the other tensors of the tokens, and the state before them (None: zeros)."""


class SlicePass:
    """A slice's pass through a recurrent layer.

    Each context-parallel rank has all heads of some tokens, but convolves and recurs some heads of all tokens.

    Args:
        params: The layer's ``packed_seq_params``.
        history: Number of earlier inputs that the convolution reads.
        shared: Number of key heads or groups of the layer on this TP rank.
        heads: Number of heads of the layer on this TP rank.
    """

    def __init__(self, cache: StateCache, params: object, history: int, shared: int, heads: int) -> None:
        if not isinstance(params, SliceParams):
            raise RuntimeError("a recurrent layer was called without a slice: the model runs outside of the schedule")
        self._cache, self._history = cache, history
        self._key = Key(params.microbatch, params.run, params.index)
        self._span, self._starts = params.span, params.state_starts
        self._counts, self._placed = (heads, shared), params.placed
        self._sharing = None if cache.sharing is None else cache.sharing(params.parts)
        each = heads // shared
        self._divided = divided_heads(shared, each, 1 if self._sharing is None else self._sharing.size)
        self._own = self._divided[0 if self._sharing is None else self._sharing.rank]

    def own(self, tensor: Tensor, sections: Sequence[Section], heads: Heads | None = None, dim: int = 0) -> Tensor:
        """Returns the channels of ``heads`` (default: this rank's) of a parameter or an activation."""
        if len(self._divided) == 1:
            return tensor
        parts, at = [], 0
        for width, is_shared in sections:
            first, end = (heads or self._own)[is_shared]
            parts.append(tensor.narrow(dim, at + first * width, (end - first) * width))
            at += self._counts[is_shared] * width
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)

    def gather(self, *tensors: tuple[Tensor, Sequence[Section]]) -> list[Tensor]:
        """Exchanges this rank's tokens with all heads for all tokens with its heads, ``[b, s, channels]``.

        Args:
            *tensors: ``[s, b, channels]``, and the sections of the channels.
        """
        if self._sharing is None:
            return [tensor.transpose(0, 1) for tensor, _ in tensors]
        split = [[self.own(*each, heads, dim=-1) for each in tensors] for heads in self._divided]
        mine, blocks = split[self._sharing.rank], self._by_rank(len(tensors[0][0]))
        widths = [tensor.shape[-1] for tensor in mine]
        shapes = [(part_tokens(own), mine[0].shape[1], sum(widths)) for own in blocks]
        found = _Swap.apply(self._sharing, shapes, *(torch.cat(parts, dim=-1) for parts in split))
        placed: list[tuple[int, Tensor]] = []
        for own, part in zip(blocks, found, strict=True):
            sizes = [end - first for first, end in own]
            placed += zip((first for first, _ in own), part.split(sizes), strict=True)
        whole = torch.cat([part for _, part in sorted(placed, key=lambda each: each[0])])
        return list(whole.transpose(0, 1).split(widths, dim=-1))

    def scatter(self, out: Tensor, tokens: int) -> Tensor:
        """Exchanges all tokens with this rank's heads for its tokens with all heads, ``[s, b, heads, size]``.

        Args:
            out: ``[b, s, heads, size]``.
        """
        out = out.transpose(0, 1)
        if self._sharing is None:
            return out
        parts = [take_blocks(out, blocks, dim=0).contiguous() for blocks in self._by_rank(tokens)]
        size = (parts[0].shape[1], parts[0].shape[3])
        shapes = [(tokens, size[0], heads.own[1] - heads.own[0], size[1]) for heads in self._divided]
        return torch.cat(_Swap.apply(self._sharing, shapes, *parts), dim=2)

    def _by_rank(self, own: int) -> Sequence[Blocks]:
        """Returns the blocks of the slice's tokens on each context-parallel rank, if this one has ``own`` tokens."""
        assert self._sharing is not None
        return self._sharing.by_rank(own) if self._placed is None else self._placed.by_slice[self._key.part]

    def run(self, mixed: Tensor, others: Sequence[Tensor], kernel: Kernel) -> Tensor:
        """Compute the slice document by document, beginning with the state of the slice before.

        Args:
            mixed: Inputs of the convolution, ``[b, s, channels]``.
            others: Other tensors of the tokens, ``[b, s, ...]``.
            kernel: Computes one document.

        Returns:
            ``[b, s, heads, size]``.
        """
        history, before = self._history, None
        inputs = mixed
        if self._key.part:
            earlier, before = _Take.apply(mixed, self._cache, self._key)
            inputs = torch.cat((earlier, mixed), dim=1)
        held = inputs.shape[1] - mixed.shape[1]
        outs, states = [], []
        for sequences, documents in Reach(self._starts).documents(self._span, mixed.shape[0]):
            pieces = []
            for (lo, hi), begin in documents:
                first, end, seen = lo - self._span[0], hi - self._span[0], min(history, lo - begin)
                own = inputs[sequences, held + first - seen : held + end]
                own = own if seen == history else F.pad(own, (0, 0, history - seen, 0))
                rest = (tensor[sequences, first:end] for tensor in others)
                state = before[sequences] if before is not None and lo > begin else None
                out, last = kernel(own, *rest, state=state)
                pieces.append(out)
            outs.append(torch.cat(pieces, dim=1) if len(pieces) > 1 else pieces[0])
            states.append(last)
        whole, after = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in (outs, states))
        left = inputs[:, max(inputs.shape[1] - history, 0) :]
        left = F.pad(left, (0, 0, history - left.shape[1], 0))
        found: Tensor = _Leave.apply(whole, left, after, self._cache, self._key)
        return found


def _delta_net(
    layer: Any,
    cache: StateCache,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    *,
    packed_seq_params: object = None,
    **_unused: Any,
) -> tuple[Tensor, Tensor | None]:
    """Forward of Megatron's gated delta net over a slice ``[s, b, h]``."""
    from megatron.core import tensor_parallel

    size, keys = layer.value_head_dim, layer.qk_dim_local_tp // layer.key_head_dim
    here = SlicePass(cache, packed_seq_params, layer.conv_kernel_dim - 1, keys, layer.v_dim_local_tp // size)
    projected = layer.in_proj(hidden_states)[0]
    tokens, batch = projected.shape[:2]
    mixed, gate, beta, alpha = torch.split(projected, layer.feat_dim_split, dim=-1)
    of_heads, convolved = [Section(1)], [Section(layer.key_head_dim, is_shared=True)] * 2 + [Section(size)]
    mixed, beta, alpha = here.gather((mixed, convolved), (beta, of_heads), (alpha, of_heads))
    weight, bias = layer.conv1d.weight, layer.conv1d.bias
    kernel = functools.partial(
        _delta_rule, layer, weight=here.own(weight, convolved), bias=bias if bias is None else here.own(bias, convolved)
    )
    rates = -here.own(layer.A_log, of_heads).exp() * F.softplus(alpha.float() + here.own(layer.dt_bias, of_heads))
    out = here.scatter(here.run(mixed, (rates, beta.sigmoid()), kernel), tokens)
    gate = gate.transpose(0, 1).unflatten(-1, (-1, size)).contiguous()
    norm = functools.partial(layer._gated_norm_and_a2a, thd_cp_a2a_inv=None, batch=batch, seq_len=tokens)
    out = out.transpose(0, 1).contiguous()
    if not layer.recompute_norm_out:
        found: tuple[Tensor, Tensor | None] = layer.out_proj(norm(out, gate))
        return found
    layer.norm_out_checkpoint = tensor_parallel.CheckpointWithoutOutput()
    found = layer.out_proj(layer.norm_out_checkpoint.checkpoint(norm, out, gate))
    layer.norm_out_checkpoint.discard_output_and_register_recompute(found[0])
    return found


def _delta_rule(
    layer: Any,
    inputs: Tensor,
    rates: Tensor,
    beta: Tensor,
    *,
    state: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Convolution and recurrence of a gated delta net over the tokens of one document."""
    from megatron.core.ssm.gated_delta_net import common

    if layer.config.deterministic_mode:
        convolved = layer.act_fn(_convolution(inputs, weight, bias))
    else:
        convolved = common.causal_conv1d(x=inputs, weight=weight.squeeze(1), bias=bias, activation=layer.activation)[0]
    width = beta.shape[-1] * layer.value_head_dim
    convolved = convolved[:, layer.conv_kernel_dim - 1 :]
    keyed, value = torch.split(convolved, [convolved.shape[-1] - width, width], dim=-1)
    keyed = keyed.unflatten(-1, (-1, layer.key_head_dim)).contiguous()
    if layer.use_qk_l2norm:
        keyed = common.l2norm(keyed)
    shared = 2 * beta.shape[-1] // keyed.shape[2]
    query, key = (part.repeat_interleave(shared, dim=2).contiguous() for part in keyed.chunk(2, dim=2))
    found: tuple[Tensor, Tensor] = layer.gated_delta_rule(
        query,
        key,
        value.unflatten(-1, (-1, layer.value_head_dim)).contiguous(),
        g=rates.contiguous(),
        beta=beta.contiguous(),
        initial_state=state,
        output_final_state=True,
    )
    return found


def _mamba(
    mixer: Any,
    cache: StateCache,
    hidden_states: Tensor,
    inference_context: object = None,
    *,
    packed_seq_params: object = None,
    **_unused: Any,
) -> tuple[Tensor, Tensor | None]:
    """Forward of Megatron's Mamba mixer over a slice ``[s, b, h]``."""
    size, states = mixer.headdim, mixer.d_state
    here = SlicePass(cache, packed_seq_params, mixer.d_conv - 1, mixer.ngroups_local_tp, mixer.nheads_local_tp)
    projected = mixer.in_proj(hidden_states)[0]
    inner, of_groups = mixer.d_inner_local_tp, mixer.ngroups_local_tp * states
    gate, mixed, step = torch.split(projected, [inner, inner + 2 * of_groups, mixer.nheads_local_tp], dim=-1)
    of_heads, convolved = [Section(1)], [Section(size)] + [Section(states, is_shared=True)] * 2
    gate, mixed, step = here.gather((gate, [Section(size)]), (mixed, convolved), (step, of_heads))
    kernel = functools.partial(
        _scan,
        mixer,
        weight=here.own(mixer.conv1d_weight, convolved),
        bias=here.own(mixer.conv1d_bias, convolved) if mixer.conv1d_bias is not None else None,
        rates=-torch.exp(here.own(mixer.A_log, of_heads).float()),
        skipped=here.own(mixer.D, [Section(size if mixer.D_has_hdim else 1)]),
        least=here.own(mixer.dt_bias, of_heads).float(),
    )
    out = here.scatter(here.run(mixed, (gate, step), kernel), projected.shape[0]).flatten(2).contiguous()
    found: tuple[Tensor, Tensor | None] = mixer.out_proj(mixer.norm(out) if mixer.rmsnorm else out)
    return found


def _scan(
    mixer: Any,
    inputs: Tensor,
    gate: Tensor,
    step: Tensor,
    *,
    state: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    rates: Tensor,
    skipped: Tensor,
    least: Tensor,
) -> tuple[Tensor, Tensor]:
    """Convolution and recurrence of a Mamba mixer over the tokens of one document."""
    from megatron.core.ssm import mamba_mixer as kernels

    if kernels.causal_conv1d_fn is None:
        convolved = mixer.act(_convolution(inputs, weight, bias))
    else:
        by_channel = inputs.transpose(1, 2).contiguous()
        convolved = kernels.causal_conv1d_fn(x=by_channel, weight=weight.squeeze(1), bias=bias, activation="silu")
        convolved = convolved.transpose(1, 2)
    inner = gate.shape[-1]
    of_groups = (convolved.shape[-1] - inner) // 2
    x, writes, reads = torch.split(convolved[:, mixer.d_conv - 1 :], [inner, of_groups, of_groups], dim=-1)
    of_states = {"state_dtype": mixer.mamba_training_ssm_states_dtype} if kernels.MAMBA_HAS_STATE_DTYPE else {}
    found: tuple[Tensor, Tensor] = kernels.mamba_chunk_scan_combined(
        x.unflatten(-1, (-1, mixer.headdim)).contiguous(),
        step.contiguous(),
        rates,
        writes.unflatten(-1, (-1, mixer.d_state)).contiguous(),
        reads.unflatten(-1, (-1, mixer.d_state)).contiguous(),
        mixer.chunk_size,
        D=skipped.float().unflatten(0, (-1, mixer.headdim)) if mixer.D_has_hdim else skipped,
        z=gate.unflatten(-1, (-1, mixer.headdim)).contiguous(),
        dt_bias=least,
        dt_softplus=True,
        initial_states=state,
        return_final_states=True,
        **of_states,
    )
    return found


def _convolution(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A causal convolution of every channel of ``[b, s, channels]``."""
    padded = F.pad(inputs.transpose(1, 2), (weight.shape[-1] - 1, 0))
    return F.conv1d(padded, weight, bias, groups=weight.shape[0]).transpose(1, 2)


def carry_states(model: torch.nn.Module) -> None:
    """Make the recurrent layers of a model chunk without wrappers begin with the state of the slice before."""
    chunk: Any = model
    for layer in family_of_model(chunk).recurrent_layers(chunk):
        layer.slice_states = StateCache()
        run = _delta_net if hasattr(layer, "gated_delta_rule") else _mamba
        layer.forward = functools.partial(run, layer, layer.slice_states)


def draws_of(model: torch.nn.Module) -> Iterator[tuple[Tensor, Callable[..., object]]]:
    """Yields recurrent parameters of a chunk that Megatron draws without ``init_method``, and how to draw them."""
    chunk: Any = model
    for layer in family_of_model(chunk).recurrent_layers(chunk):
        if not layer.config.perform_initialization:
            continue
        is_mamba = not hasattr(layer, "gated_delta_rule")
        weight = layer.conv1d_weight if is_mamba else layer.conv1d.weight
        bias = layer.conv1d_bias if is_mamba else layer.conv1d.bias
        bound = weight.shape[-1] ** -0.5  # PyTorch's default for a depthwise convolution
        own = layer.conv_init or bound
        yield weight, functools.partial(torch.nn.init.uniform_, a=-own, b=own)
        if bias is not None:
            yield bias, functools.partial(torch.nn.init.uniform_, a=-bound, b=bound)
        low, high = _RATES if is_mamba else layer.A_init_range
        yield layer.A_log, lambda rates, low=low, high=high: rates.uniform_(low, high).log_()
        if is_mamba:
            yield layer.dt_bias, _draw_steps


def _draw_steps(biases: Tensor) -> None:
    """Fill biases so that their softplus gives the steps of a Mamba layer."""
    low, high = map(math.log, _STEPS)
    steps = biases.uniform_(low, high).exp_().clamp_(min=_LEAST_STEP)
    biases.copy_(steps + torch.log(-torch.expm1(-steps)))


def state_caches(models: Sequence[torch.nn.Module]) -> Iterator[StateCache]:
    """Yields the states of slices in the recurrent layers of model chunks."""
    for model in models:
        for module in model.modules():
            if isinstance(cache := getattr(module, "slice_states", None), StateCache):
                yield cache
