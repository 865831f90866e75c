"""Slice attention in Megatron's layers: the ``core_attention`` module and how it learns which slice runs.

The slice is an argument of the call, ``packed_seq_params``: Megatron passes it from the model
to every core attention, and both kinds of activation recomputation keep it in their closures.  So
a recomputed forward, on whichever thread, gets its own slice.  Its ``qkv_format`` is ``sbhd``, which
attention treats as no packing at all.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from torch import Tensor

from megatron_het.attention.calls import Reach
from megatron_het.attention.kernel_choice import choose_kernel
from megatron_het.attention.kernels import Kernel, Setting
from megatron_het.attention.kv_cache import KVCache
from megatron_het.attention.latent import Expansion, LatentCache, attend_by_latents, widths_of
from megatron_het.attention.places import (
    NO_EXCHANGE,
    LayerExchange,
    Rotation,
    Rotations,
    Sharing,
    SliceContext,
    held_before,
    take_blocks,
)
from megatron_het.attention.slice_attention import slice_attention
from megatron_het.families import family_of_model
from megatron_het.plan.placement import Blocks, Placed, part_tokens
from megatron_het.schedule.cutting import Bounds, Span, Starts

_ANY_TOKENS = 128


@dataclass
class SliceParams(PackedSeqParams):
    """The slice that a forward pass runs."""

    microbatch: int = 0
    index: int = 0
    blocks: Blocks = ()  # tokens of the slice on this context-parallel rank, as blocks of the sequence
    span: Span = (0, 0)  # tokens of the slice on all context-parallel ranks together
    parts: tuple[int, ...] = ()  # number of tokens of the slice on each context-parallel rank
    placed: Placed | None = None  # tokens of each slice on each context-parallel rank, if placed by documents
    # where the documents of each sequence begin; None if documents do not matter
    starts: tuple[Starts, ...] | None = None
    # the same for recurrent layers that reset their state at every document; otherwise None
    state_starts: tuple[Starts, ...] | None = None
    rotation: Rotation | None = None  # rotary positions that slice attention applies; None if none, or the layers do
    run: int = 0  # index of the layer's run in the pass; above 0 only in a layer that runs several times

    @classmethod
    def make(cls, microbatch: int, index: int, blocks: Blocks, seq_length: int, **others: Any) -> "SliceParams":
        """The parameters of one slice of a sequence of ``seq_length`` tokens."""
        # Megatron makes rotary embeddings for as many positions as these lengths: for the whole
        # sequence, once; each slice then takes its part.
        others.setdefault("span", (blocks[0][0], blocks[-1][1]))
        return cls(
            qkv_format="sbhd",
            max_seqlen_q=seq_length,
            max_seqlen_kv=seq_length,
            microbatch=microbatch,
            index=index,
            blocks=blocks,
            **others,
        )


class SliceCoreAttention(torch.nn.Module):
    """Replaces a layer's core attention.  Its only parameter is the softmax offset, if the layer learns one.

    Args:
        slots: Chunks of keys and values that the schedule holds at once.
        softmax_scale: Factor of the scores, None for ``d ** -0.5``.
        kernels: Names of the attention kernels to choose from; nothing for all.
        batch: Sequences of the largest microbatch; None if all have the same number.
        in_line: Whether the kernel needs a slice's keys after those of earlier slices, in one view.
        window_tokens: How many earlier tokens a query sees at most; None for all.
        softmax_offset: The layer's own parameter ``[heads]`` of this TP rank; None without.
        tp_group: Group over which the heads are divided.
        expansion: Expands latents to keys and values; None if the layer passes keys and values.
        rotates: Whether the layer's queries and keys have rotary positions.
        runs: How often the layer runs in a pass.
    """

    def __init__(
        self,
        slots: int,
        softmax_scale: float | None = None,
        kernels: Sequence[str] = (),
        batch: int | None = None,
        *,
        in_line: bool = False,
        window_tokens: int | None = None,
        softmax_offset: Tensor | None = None,
        tp_group: Any = None,
        expansion: Expansion | None = None,
        rotates: bool = True,
        runs: int = 1,
    ) -> None:
        super().__init__()
        self.caches = [
            KVCache(slots, batch, in_line=in_line) if expansion is None else LatentCache(slots, batch, expansion)
            for _ in range(runs)
        ]
        self._value_width = None if expansion is None else expansion.widths.value
        self.exchange: LayerExchange = NO_EXCHANGE
        self.sharing: Callable[[tuple[int, ...]], Sharing] | None = None
        """Returns the ranks that share a slice, from the number of its tokens on each; None if no rank shares one."""
        self.softmax_offset = softmax_offset
        self.window_tokens = window_tokens
        self._scale = softmax_scale
        self._kernels = kernels
        self._kernel: Kernel | None = None
        self._tp_group = tp_group
        self._rotates = rotates

    @property
    def cache(self) -> KVCache:
        """Returns the key-value cache of the layer's first run; most layers run once per pass."""
        return self.caches[0]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_unused: Any,
    ) -> Tensor:
        """Attention of the slice of ``packed_seq_params``.

        Args:
            query: ``[s, b, heads, d]``, not rotated if ``packed_seq_params`` has a rotation.
            key: ``[s, b, groups, d]``, or latents.
            value: ``[s, b, groups, d]``, or an empty tensor beside latents.
            attention_mask: Ignored: slices are causal, and ``packed_seq_params`` has the starts of documents.
            attn_mask_type: Ignored, likewise.
            packed_seq_params: A :class:`SliceParams`.

        Returns:
            ``[s, b, heads * d]``, where ``d`` is the width of a value.
        """
        if not isinstance(packed_seq_params, SliceParams):
            raise RuntimeError("slice attention was called without a slice: the model runs outside of the schedule")
        if attention_bias is not None:
            raise RuntimeError("slice attention has no attention bias")
        if self._kernel is None:
            self._kernel = choose_kernel(Setting.of(query), self._kernels)
        out = slice_attention(
            query,
            key,
            value,
            SliceContext(
                cache=self.caches[packed_seq_params.run],
                kernel=self._kernel,
                microbatch=packed_seq_params.microbatch,
                index=packed_seq_params.index,
                scale=query.shape[-1] ** -0.5 if self._scale is None else self._scale,
                exchange=self.exchange,
                parallel=None if self.sharing is None else self.sharing(packed_seq_params.parts),
                reach=Reach(
                    packed_seq_params.starts,
                    self.window_tokens,
                    packed_seq_params.max_seqlen_q,
                    packed_seq_params.placed,
                ),
                rotation=packed_seq_params.rotation if self._rotates else None,
            ),
            self.softmax_offset,
        )
        return out[..., : self._value_width].reshape(*out.shape[:2], -1)

    def held_tokens(
        self, bounds: Bounds, starts: tuple[Starts, ...] | None, own: Callable[[int], Blocks]
    ) -> tuple[int, ...]:
        """Returns how many tokens of every slice the cache holds.

        Args:
            bounds: First tokens of the slices of a microbatch, and the end of the last one.
            starts: Where the documents of each of its sequences begin; None if documents do not matter.
            own: Returns this rank's blocks of a slice, from its index.
        """
        reach, found = Reach(starts, self.window_tokens, bounds[-1]), []
        for index, (first, end) in enumerate(itertools.pairwise(bounds)):
            unread, blocks = reach.unread(first, end) if reach.is_limited else 0, own(index)
            found.append(part_tokens(blocks) - held_before(blocks, unread))
        return tuple(found)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The softmax offset in the form in which Megatron's own attention saves it."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        own = self.state_dict(prefix="", keep_vars=True)
        if not own:
            return {}
        group = (metadata or {})["dp_cp_group"]
        return make_sharded_tensors_for_checkpoint(
            own, prefix, {"softmax_offset": 0}, sharded_offsets, tp_group=self._tp_group, dp_cp_group=group
        )


def replace_core_attention(
    model: torch.nn.Module,
    slots: int,
    device: torch.device,
    kernels: Sequence[str] = (),
    batch: int | None = None,
    runs: int = 1,
) -> list[SliceCoreAttention]:
    """Put slice attention into every self-attention of a chunk, of local or TE specs; returns it in layer order.

    Args:
        model: A model chunk without wrappers.
        slots: Chunks of keys and values per layer.
        device: Device of the computation; the weights may still be on another one.
        kernels: Names of the attention kernels to choose from; nothing for all.
        batch: Sequences of the largest microbatch; None if all have the same number.
        runs: How often a layer for multi-token prediction runs in a pass.

    Raises:
        ValueError: A kind of attention that slices cannot replace, or no kernel for this device and type.
    """
    chunk: Any = model
    placed = []
    for layer, is_later in family_of_model(chunk).attention_layers(chunk):
        attention = layer.self_attention
        if not hasattr(attention, "core_attention") or not (_is_latent(attention) or hasattr(attention, "linear_qkv")):
            raise ValueError(f"slices: {type(attention).__name__} has no core attention to replace")
        # Kernels are chosen here, so that an unsupported setting fails before training.
        setting = Setting.on(device, next(attention.parameters()).dtype, head_width(attention))
        kernel, window_tokens = choose_kernel(setting, kernels), _window_of(attention)
        replaced = attention.core_attention
        unrotated = getattr(attention.config, "no_rope_freq", None)  # by layer, or None
        attention.core_attention = SliceCoreAttention(
            slots,
            score_scale(attention),
            kernels,
            batch,
            in_line=window_tokens is None and kernel.takes_prefix(_ANY_TOKENS, 2 * _ANY_TOKENS),
            window_tokens=window_tokens,
            softmax_offset=getattr(replaced, "softmax_offset", None),
            tp_group=getattr(getattr(attention, "pg_collection", None), "tp", None),
            expansion=attend_by_latents(attention) if _is_latent(attention) else None,
            rotates=not (unrotated and unrotated[attention.layer_number - 1]),
            runs=runs if is_later else 1,
        )
        placed.append(attention.core_attention)
    return placed


def head_width(attention: Any) -> int:
    """Channels per head of the queries, keys and values in a self-attention's kernel calls."""
    return widths_of(attention).head if _is_latent(attention) else int(attention.hidden_size_per_attention_head)


def score_scale(attention: Any) -> float:
    """Factor of the scores of a self-attention."""
    own = attention.softmax_scale if _is_latent(attention) else attention.config.softmax_scale
    return float(own or head_width(attention) ** -0.5)


def _is_latent(attention: Any) -> bool:
    return isinstance(attention, MultiLatentAttention)


def _window_of(attention: Any) -> int | None:
    """Number of earlier tokens that a query of a self-attention sees; None for all."""
    from megatron.core.transformer.utils import is_layer_window_attention

    config = attention.config
    size = getattr(config, "window_size", None)
    if not size or not is_layer_window_attention(size, config.window_attn_skip_freq, attention.layer_number):
        return None
    return int(size[0])


class CurrentSlice:
    """The slice that runs now on this rank; forward hooks pass it to the model as ``packed_seq_params``.

    Any training script can be used, because it calls the model as without slices.
    """

    def __init__(self) -> None:
        self.params: SliceParams | None = None

    def attach(self, models: Sequence[torch.nn.Module]) -> None:
        """Add the hooks to model chunks without wrappers."""
        for model in models:
            model.register_forward_pre_hook(self._add_params, with_kwargs=True)
            cut = functools.partial(_cut_positions, Rotations.of(model))
            for block in family_of_model(model).blocks(model):
                block.register_forward_pre_hook(cut, with_kwargs=True)

    def _add_params(
        self, _model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.params is None:
            raise RuntimeError("the model runs outside of the schedule, which cuts it into slices")
        return args, {**kwargs, "packed_seq_params": self.params}


def _cut_positions(
    rotations: Rotations | None, _decoder: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Takes the slice's rotary embeddings from those of the sequence (first dimension).

    If slice attention can rotate, it gets them, and the layers get none.
    """
    table, params = kwargs.get("rotary_pos_emb"), kwargs.get("packed_seq_params")
    if isinstance(table, Tensor) and isinstance(params, SliceParams):
        params.rotation = None if rotations is None else rotations.part(table, params.blocks)
        own = take_blocks(table, params.blocks, dim=0) if params.rotation is None else None
        kwargs = {**kwargs, "rotary_pos_emb": own}
    return args, kwargs


def slice_attentions(models: Sequence[torch.nn.Module]) -> Iterator[SliceCoreAttention]:
    """The slice attention of every layer of model chunks."""
    for model in models:
        for module in model.modules():
            if isinstance(module, SliceCoreAttention):
                yield module


def slice_caches(models: Sequence[torch.nn.Module]) -> Iterator[KVCache]:
    """The key-value caches of model chunks."""
    return (cache for module in slice_attentions(models) for cache in module.caches)
