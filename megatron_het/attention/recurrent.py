"""Recurrent layers over slices: what a slice leaves for the next one, and the gradient that comes back for it.

A Mamba mixer or a gated delta net knows the tokens before a slice by two tensors: the last inputs of its convolution,
and the state of its recurrence.  A forward pass takes both from the slice before and leaves its own; a backward pass,
which comes to the slices in reverse, hands on the gradient of what the forward took.  Everything else of the layers is
Megatron's, kernels too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_het.attention.core import SliceParams
from megatron_het.attention.kv_pool import CacheError
from megatron_het.families import family_of_model

_RATES, _STEPS, _LEAST_STEP = (1, 16), (0.001, 0.1), 1e-4
"""Where the rates and the steps of a Mamba layer begin, as Megatron has it."""


class Left(NamedTuple):
    """State that a slice leaves to the next one.

    Attributes:
        inputs: The last inputs of the convolution, ``[b, tokens, channels]``.
        state: Of the recurrence.
    """

    inputs: Tensor
    state: Tensor


class Key(NamedTuple):
    """A pass of a layer over a slice: microbatch, which run of the layer it is, and number of the slice."""

    microbatch: int
    run: int
    part: int


class StateCache:
    """Holds the states of slices in one layer, and their gradients, from a slice's forward to its backward."""

    def __init__(self) -> None:
        self._left: dict[Key, Left] = {}
        self._gradients: dict[Key, Sequence[Tensor]] = {}
        self._open: dict[tuple[int, int], int] = {}  # slices that are forward and not backward yet

    def before(self, key: Key) -> Left:
        """Returns what the slice before one has left.

        Raises:
            CacheError: It has not run.
        """
        found = self._left.get(key._replace(part=key.part - 1))
        if found is None:
            raise CacheError(
                f"microbatch {key.microbatch} slice {key.part}: the slice before it has left no state: "
                "slices must go forward in order"
            )
        return found

    def leave(self, key: Key, left: Left) -> None:
        """Keep what a slice leaves; a forward that is run again for its backward has left it before."""
        held = self._open.get(key[:2], 0)
        if key.part >= held:
            self._left[key] = left
            self._open[key[:2]] = key.part + 1

    def hand_back(self, key: Key, gradients: Sequence[Tensor]) -> None:
        """Keep the gradients of what a slice took from the one before it, which is not needed any more."""
        before = key._replace(part=key.part - 1)
        self._gradients[before] = gradients
        del self._left[before]

    def gradients(self, key: Key) -> Sequence[Tensor] | None:
        """Returns the gradients of what a slice left, None for the last one; its backward begins.

        Raises:
            CacheError: A later slice comes first.
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
        """Forget a microbatch, without a backward pass (evaluation)."""
        self._left = {key: left for key, left in self._left.items() if key.microbatch != microbatch}
        self._open = {key: count for key, count in self._open.items() if key[0] != microbatch}

    def check_empty(self) -> None:
        """Raise if anything is left."""
        if self._left or self._gradients or self._open:
            raise CacheError(f"states of slices left at the end of the step: {sorted(self._open)}")

    def tensors(self) -> list[Tensor]:
        """All that is held."""
        return [tensor for held in (self._left, self._gradients) for pair in held.values() for tensor in pair]


class _Take(torch.autograd.Function):
    """Begin with what the slice before has left; ``anchor`` makes autograd come by, and gets no gradient."""

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
    """Leave something for the next slice beside the output ``out``, through which autograd comes by."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, inputs: Tensor, state: Tensor, cache: StateCache, key: Key) -> Tensor:
        ctx.cache, ctx.key = cache, key
        cache.leave(key, Left(inputs.detach().clone(), state.detach()))  # not a view of all tokens of the slice
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        inputs, state = ctx.cache.gradients(ctx.key) or (None, None)
        return grad_out, inputs, state, None, None


class SlicePass:
    """A slice's pass through a recurrent layer.

    Args:
        cache: Of the layer.
        params: That the layer was called with.
        history: How many earlier inputs the convolution sees.
    """

    def __init__(self, cache: StateCache, params: object, history: int) -> None:
        if not isinstance(params, SliceParams):
            raise RuntimeError("a recurrent layer was called without a slice: the model runs outside of the schedule")
        self._cache, self._history = cache, history
        self._key = Key(params.microbatch, params.run, params.index)

    def take(self, mixed: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the inputs of the convolution with those before them in front, and the state; None for zeros.

        Args:
            mixed: Inputs of the convolution, ``[b, s, channels]``.
        """
        if not self._key.part:
            return F.pad(mixed, (0, 0, self._history, 0)), None
        before, state = _Take.apply(mixed, self._cache, self._key)
        return torch.cat((before, mixed), dim=1), state

    def own(self, convolved: Tensor) -> Tensor:
        """Returns what a convolution of these inputs gave for the tokens of the slice, ``[b, s, channels]``."""
        return convolved[:, self._history :]

    def leave(self, out: Tensor, inputs: Tensor, state: Tensor) -> Tensor:
        """Leave the last of the inputs, and the state after them; the output ``out`` must be used in its place."""
        last = inputs[:, inputs.shape[1] - self._history :]
        found: Tensor = _Leave.apply(out, last, state, self._cache, self._key)
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
    """A gated delta net of Megatron's over a slice of ``[s, b, h]``."""
    from megatron.core import tensor_parallel
    from megatron.core.ssm.gated_delta_net import common

    here = SlicePass(cache, packed_seq_params, layer.conv_kernel_dim - 1)
    projected = layer.in_proj(hidden_states)[0].transpose(0, 1)
    mixed, gate, beta, alpha = torch.split(projected, layer.feat_dim_split, dim=-1)
    batch, tokens = mixed.shape[:2]
    inputs, state = here.take(mixed)
    weight, bias = layer.conv1d.weight, layer.conv1d.bias
    if layer.config.deterministic_mode:
        convolved = layer.act_fn(_convolution(inputs, weight, bias))
    else:
        convolved = common.causal_conv1d(x=inputs, weight=weight.squeeze(1), bias=bias, activation=layer.activation)[0]
    widths = [2 * layer.qk_dim_local_tp, layer.v_dim_local_tp]
    keyed, value = torch.split(here.own(convolved), widths, dim=-1)
    keyed = keyed.unflatten(-1, (-1, layer.key_head_dim)).contiguous()
    if layer.use_qk_l2norm:
        keyed = common.l2norm(keyed)
    shared = layer.num_value_heads // layer.num_key_heads
    query, key = (part.repeat_interleave(shared, dim=2).contiguous() for part in keyed.chunk(2, dim=2))
    out, state = layer.gated_delta_rule(
        query,
        key,
        value.unflatten(-1, (-1, layer.value_head_dim)).contiguous(),
        g=-layer.A_log.exp() * F.softplus(alpha.float() + layer.dt_bias),
        beta=beta.sigmoid().contiguous(),
        initial_state=state,
        output_final_state=True,
    )
    out = here.leave(out, inputs, state)
    gate = gate.unflatten(-1, (-1, layer.value_head_dim)).contiguous()
    norm = functools.partial(layer._gated_norm_and_a2a, thd_cp_a2a_inv=None, batch=batch, seq_len=tokens)
    if not layer.recompute_norm_out:
        found: tuple[Tensor, Tensor | None] = layer.out_proj(norm(out, gate))
        return found
    layer.norm_out_checkpoint = tensor_parallel.CheckpointWithoutOutput()
    found = layer.out_proj(layer.norm_out_checkpoint.checkpoint(norm, out, gate))
    layer.norm_out_checkpoint.discard_output_and_register_recompute(found[0])
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
    """A Mamba mixer of Megatron's over a slice of ``[s, b, h]``."""
    from megatron.core.ssm import mamba_mixer as kernels

    here = SlicePass(cache, packed_seq_params, mixer.d_conv - 1)
    projected = mixer.in_proj(hidden_states)[0].transpose(0, 1)
    of_groups = mixer.ngroups_local_tp * mixer.d_state
    channels = [mixer.d_inner_local_tp, of_groups, of_groups]
    gate, mixed, step = torch.split(projected, [channels[0], sum(channels), mixer.nheads_local_tp], dim=-1)
    inputs, state = here.take(mixed)
    weight, bias = mixer.conv1d_weight, mixer.conv1d_bias
    if kernels.causal_conv1d_fn is None:
        convolved = mixer.act(_convolution(inputs, weight, bias))
    else:
        by_channel = inputs.transpose(1, 2).contiguous()
        convolved = kernels.causal_conv1d_fn(x=by_channel, weight=weight.squeeze(1), bias=bias, activation="silu")
        convolved = convolved.transpose(1, 2)
    x, writes, reads = torch.split(here.own(convolved), channels, dim=-1)
    of_states = {"state_dtype": mixer.mamba_training_ssm_states_dtype} if kernels.MAMBA_HAS_STATE_DTYPE else {}
    out, state = kernels.mamba_chunk_scan_combined(
        x.unflatten(-1, (-1, mixer.headdim)).contiguous(),
        step.contiguous(),
        -torch.exp(mixer.A_log.float()),
        writes.unflatten(-1, (-1, mixer.d_state)).contiguous(),
        reads.unflatten(-1, (-1, mixer.d_state)).contiguous(),
        mixer.chunk_size,
        D=mixer.D.float().unflatten(0, (-1, mixer.headdim)) if mixer.D_has_hdim else mixer.D,
        z=gate.unflatten(-1, (-1, mixer.headdim)).contiguous(),
        dt_bias=mixer.dt_bias.float(),
        dt_softplus=True,
        initial_states=state,
        return_final_states=True,
        **of_states,
    )
    out = here.leave(out, inputs, state).flatten(2).transpose(0, 1).contiguous()
    found: tuple[Tensor, Tensor | None] = mixer.out_proj(mixer.norm(out) if mixer.rmsnorm else out)
    return found


def _convolution(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A causal convolution of every channel of ``[b, s, channels]``."""
    padded = F.pad(inputs.transpose(1, 2), (weight.shape[-1] - 1, 0))
    return F.conv1d(padded, weight, bias, groups=weight.shape[0]).transpose(1, 2)


def carry_states(model: torch.nn.Module) -> None:
    """Make the recurrent layers of a model chunk, not wrapped, begin where the slice before has ended."""
    chunk: Any = model
    for layer in family_of_model(chunk).recurrent_layers(chunk):
        layer.slice_states = StateCache()
        run = _delta_net if hasattr(layer, "gated_delta_rule") else _mamba
        layer.forward = functools.partial(run, layer, layer.slice_states)


def draws_of(model: torch.nn.Module) -> Iterator[tuple[Tensor, Callable[..., object]]]:
    """The parameters of a chunk's recurrent layers that Megatron draws by itself, with functions that draw alike."""
    chunk: Any = model
    for layer in family_of_model(chunk).recurrent_layers(chunk):
        if not layer.config.perform_initialization:
            continue
        is_mamba = not hasattr(layer, "gated_delta_rule")
        weight = layer.conv1d_weight if is_mamba else layer.conv1d.weight
        bias = layer.conv1d_bias if is_mamba else layer.conv1d.bias
        bound = weight.shape[-1] ** -0.5  # of channels that see no others
        own = layer.conv_init or bound
        yield weight, functools.partial(torch.nn.init.uniform_, a=-own, b=own)
        if bias is not None:
            yield bias, functools.partial(torch.nn.init.uniform_, a=-bound, b=bound)
        low, high = _RATES if is_mamba else layer.A_init_range
        yield layer.A_log, lambda rates, low=low, high=high: rates.uniform_(low, high).log_()
        if is_mamba:
            yield layer.dt_bias, _draw_steps


def _draw_steps(biases: Tensor) -> None:
    """Fill with what softplus turns into steps of a Mamba layer."""
    low, high = map(math.log, _STEPS)
    steps = biases.uniform_(low, high).exp_().clamp_(min=_LEAST_STEP)
    biases.copy_(steps + torch.log(-torch.expm1(-steps)))


def state_caches(models: Sequence[torch.nn.Module]) -> Iterator[StateCache]:
    """Yields the states of slices in the recurrent layers of model chunks."""
    for model in models:
        for module in model.modules():
            if isinstance(cache := getattr(module, "slice_states", None), StateCache):
                yield cache
