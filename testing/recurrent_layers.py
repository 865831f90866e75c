"""Recurrent layers for CPUs: ``--spec testing.recurrent_layers stack_spec``.

Megatron's own Mamba mixer and gated delta net, with its sharding and its checkpoints, on plain replacements of their
CUDA kernels, which process a sequence token by token: exact and slow.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.ssm import mamba_context_parallel, mamba_mixer
from megatron.core.ssm.gated_delta_net import common, gdn
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from megatron_het.hybrid_layers import local_stack_spec, norm

_LOCAL = LocalSpecProvider()


def rearrange(tensor: Tensor, pattern: str) -> Tensor:
    """``einops.rearrange`` for patterns that permute dimensions and remove those of size 1."""
    before, after = (side.split() for side in pattern.split(" -> "))
    for place in reversed([place for place, name in enumerate(before) if name == "1"]):
        tensor = tensor.squeeze(place)
    names = [name for name in before if name != "1"]
    return tensor.permute([names.index(name) for name in after])


def causal_conv1d_fn(x: Tensor, weight: Tensor, bias: Tensor | None, **_: Any) -> Tensor:
    """A causal convolution of every channel, and SiLU.

    Args:
        x: ``[b, channels, s]``.
        weight: ``[channels, tokens]``.
        bias: ``[channels]``.
    """
    padded = F.pad(x, (weight.shape[-1] - 1, 0))
    return F.silu(F.conv1d(padded, weight.unsqueeze(1), bias, groups=weight.shape[0]))


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, **_: Any) -> tuple[Tensor, None]:
    """:func:`causal_conv1d_fn` for ``[b, s, channels]``."""
    return causal_conv1d_fn(x.transpose(1, 2), weight, bias).transpose(1, 2), None


def l2norm(x: Tensor, eps: float = 1e-6, **_: Any) -> Tensor:
    """Normalises vectors of the last dimension to length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None, **_: Any
) -> tuple[Tensor, Tensor]:
    """``state = exp(g) state``, ``state += k beta (v - k state)``, ``out = q state``, token by token.

    Args:
        q, k: ``[b, s, heads, key size]``.
        v: ``[b, s, heads, value size]``.
        g, beta: ``[b, s, heads]``.
        initial_state: ``[b, heads, key size, value size]``; None for zeros.
    """
    state = v.new_zeros(*k.shape[:1], *k.shape[2:], v.shape[-1]) if initial_state is None else initial_state
    decay, scale, found = g.exp(), k.shape[-1] ** -0.5, []
    for t in range(k.shape[1]):
        state = state * decay[:, t, :, None, None]
        known = (state * k[:, t, :, :, None]).sum(-2)
        added = (v[:, t] - known) * beta[:, t, :, None]
        state = state + k[:, t, :, :, None] * added[:, :, None]
        found.append((state * q[:, t, :, :, None]).sum(-2) * scale)
    return torch.stack(found, dim=1).to(v.dtype), state


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    **_: Any,
) -> Any:
    """``state = exp(dt A) state + dt B x``, ``y = C state + D x``, token by token, gated by ``silu(z)``.

    Args:
        x, z: ``[b, s, heads, head size]``.
        dt: ``[b, s, heads]``, before its softplus.
        A, D, dt_bias: ``[heads]``.
        B, C: ``[b, s, groups, state size]``.
        chunk_size: Unused.
        initial_states: ``[b, heads, head size, state size]``; None for zeros.
        return_final_states: Whether the last state is returned beside the output.
    """
    heads = x.shape[2]
    dt = F.softplus(dt if dt_bias is None else dt + dt_bias)
    decay = torch.exp(dt * A)
    reads, writes = (part.repeat_interleave(heads // B.shape[2], dim=2) for part in (C, B))
    state = x.new_zeros(*x.shape[:1], *x.shape[2:], B.shape[-1]) if initial_states is None else initial_states
    found = []
    for t in range(x.shape[1]):
        added = (dt[:, t, :, None] * x[:, t])[..., None] * writes[:, t, :, None]
        state = state * decay[:, t, :, None, None] + added
        found.append((state * reads[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
    y = torch.stack(found, dim=1).to(x.dtype)
    y = y if z is None else y * F.silu(z)
    return (y, state) if return_final_states else y


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    weight: Tensor,
    bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    headdim: int,
    ngroups: int,
    **_: Any,
) -> Tensor:
    """Convolution and scan of ``[b, s, projected]`` in one call."""
    inner, channels = headdim * A.shape[0], weight.shape[0]
    z, mixed, dt = zxbcdt.split([inner, channels, A.shape[0]], dim=-1)
    mixed = causal_conv1d_fn(mixed.transpose(1, 2), weight, bias).transpose(1, 2)
    x, writes, reads = mixed.split([inner, (channels - inner) // 2, (channels - inner) // 2], dim=-1)
    by_head, by_group = (-1, headdim), (ngroups, -1)
    y = mamba_chunk_scan_combined(
        x.unflatten(-1, by_head),
        dt,
        A,
        writes.unflatten(-1, by_group),
        reads.unflatten(-1, by_group),
        chunk_size,
        D,
        z=z.unflatten(-1, by_head),
        dt_bias=dt_bias,
    )
    out: Tensor = y.flatten(2)
    return out


class GroupedNorm(nn.Module):
    """RMSNorm of every group of channels, after a multiplication by ``silu(z)`` if there is a gate ``z``."""

    def __init__(self, size: int, eps: float, group_size: int, device: Any, dtype: torch.dtype, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, device=device, dtype=dtype))
        self._eps, self._group_size = eps, group_size
        self.tp_group: Any = None

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalise ``[..., channels]``."""
        x = x if z is None else x * F.silu(z)
        groups = x.unflatten(-1, (-1, self._group_size))
        return (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self._eps)).flatten(-2) * self.weight

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """The sharded state, with channels divided over TP ranks."""
        own, group = self.state_dict(prefix="", keep_vars=True), metadata["dp_cp_group"]
        return make_sharded_tensors_for_checkpoint(
            own, prefix, {"weight": 0}, sharded_offsets, tp_group=self.tp_group, dp_cp_group=group
        )


class LocalNorm(nn.Module):
    """Makes the local norm of a configuration; a class, because Megatron's gated delta net builds only classes."""

    def __new__(cls, **keywords: Any) -> Any:
        """Returns the norm, not an instance of this class."""
        return norm(**keywords)


def _install() -> None:
    """Set the replacements in Megatron's modules."""
    mixer: Any = mamba_mixer
    mixer.HAVE_MAMBA_SSM = mixer.HAVE_EINOPS = True
    mixer.rearrange, mixer.ExtendedRMSNorm, mixer.causal_conv1d_fn = rearrange, GroupedNorm, causal_conv1d_fn
    mixer.mamba_split_conv1d_scan_combined = mamba_split_conv1d_scan_combined
    mixer.mamba_chunk_scan_combined = mamba_chunk_scan_combined
    parallel: Any = mamba_context_parallel
    parallel.HAVE_EINOPS = True
    for module in (common, gdn):
        delta: Any = module
        delta.HAVE_FLA, delta.l2norm = True, l2norm
        delta.causal_conv1d, delta.chunk_gated_delta_rule = causal_conv1d, gated_delta_rule


_install()
_column, _row = _LOCAL.column_parallel_linear(), _LOCAL.row_parallel_linear()
_delta_net = ModuleSpec(
    module=gdn.GatedDeltaNet,
    submodules=common.GatedDeltaNetSubmodules(in_proj=_column, out_norm=LocalNorm, out_proj=_row),
)
_mamba = ModuleSpec(
    module=mamba_mixer.MambaMixer, submodules=mamba_mixer.MambaMixerSubmodules(in_proj=_column, out_proj=_row)
)
stack_spec = ModuleSpec(
    module=local_stack_spec.module,
    submodules=replace(
        local_stack_spec.submodules,
        gdn_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=norm, self_attention=_delta_net, self_attn_bda=get_bias_dropout_add
            ),
        ),
        mamba_layer=ModuleSpec(
            module=MambaLayer, submodules=MambaLayerSubmodules(norm=norm, mixer=_mamba, mamba_bda=get_bias_dropout_add)
        ),
    ),
)
"""The layers of ``megatron_het.hybrid_layers``, with gated delta net (``G``) and Mamba (``M``)."""
