"""Builds a rank's model chunks in the cases that Megatron's builder does not support.

Upstream builds several chunks per rank only in pipelines of two or more stages, because its
interleaved schedule needs them.  Ministages make sense on a single stage too: they bound how many
parameters are materialised.  Upstream's builder also assumes one pipeline position per rank and one number of chunks.
In a V-shaped placement every chunk of a rank has its own position, and stages may have different numbers of chunks.
"""

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.training.models.base import compose_hooks
from megatron.training.models.dist_utils import prepare_existing_model_chunks_for_distributed_training
from megatron.training.models.gpt import GPTModelBuilder
from megatron.training.models.hybrid import HybridModelBuilder

from megatron_het.distributed import Axis, at_chunk

# Selective recomputation of the up projection and SwiGLU (SlimPipe, section 6.4).
#
# With ``--recompute-granularity selective --recompute-modules mlp`` Megatron recomputes the whole MLP.  No gradient
# needs the down projection's output.  So here only the up projection and SwiGLU are recomputed, when the backward of
# the down projection asks for its input.  Only the MLP's input is kept from the forward.


class _Recomputed(torch.autograd.Function):
    """Runs a function without an autograd graph, and again with a graph when the backward needs its output."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, promise: "_Promise") -> torch.Tensor:
        with torch.no_grad():
            output = promise.run(source)
        ctx.save_for_backward(source)
        ctx.promise = promise
        promise.context = ctx
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        source, output = ctx.promise.keep()
        ctx.promise.kept = None
        torch.autograd.backward(output, grad)
        return source.grad, None


@dataclass(slots=True, eq=False)
class _Promise:
    """The output of a function that is recomputed on demand."""

    run: Callable[[torch.Tensor], torch.Tensor]
    context: Any = None
    kept: tuple[torch.Tensor, torch.Tensor] | None = None

    def keep(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(input, output) of the second run, which happens at the first call."""
        if self.kept is None:
            (source,) = self.context.saved_tensors
            self.context = None  # it refers to this
            source = source.detach().requires_grad_()
            with torch.enable_grad():
                self.kept = source, self.run(source)
        return self.kept


@dataclass(frozen=True, slots=True)
class _Reference:
    """Stands for the promised output among saved tensors."""

    promise: _Promise
    size: torch.Size


class _PassOn(torch.nn.Module):
    """Identity in place of a down projection."""

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Returns what it is given, and no bias."""
        return hidden, None


class RecomputingMLP(MLP):
    """Megatron's MLP, keeping its input only."""

    def forward(self, hidden_states: torch.Tensor, per_token_scale: Any = None, **keywords: Any) -> Any:
        """See Megatron; ``[s, b, h]`` in and out, and the bias of the down projection."""
        if per_token_scale is not None or not torch.is_grad_enabled():
            return super().forward(hidden_states, per_token_scale, **keywords)
        promise = _Promise(self._up)
        up = _Recomputed.apply(hidden_states, promise)
        storage, numel = up.untyped_storage()._cdata, up.numel()  # dry runs have no addresses

        def pack(tensor: torch.Tensor) -> torch.Tensor | _Reference:
            is_up = tensor.untyped_storage()._cdata == storage and tensor.numel() == numel
            return _Reference(promise, tensor.size()) if is_up else tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            return self.linear_fc2(up)

    def _up(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The MLP up to its down projection: ``[s, b, h]`` to ``[s, b, ffn / tp]``."""
        front = copy.copy(self)  # shares the layers, not the list of them
        front._modules = {**self._modules, "linear_fc2": _PassOn()}
        return MLP.forward(front, hidden_states)[0]


def _unpack(saved: torch.Tensor | _Reference) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    return saved.promise.keep()[1].detach().view(saved.size)


def recompute_up_projections(models: Iterable[torch.nn.Module], reduces_early: bool = False) -> int:
    """Make MLPs of unwrapped GPTModels that Megatron would recompute :class:`RecomputingMLP`; returns their number.

    Args:
        reduces_early: Whether gradient reductions test a flag on the weight object.  Hooks for saved tensors return
            another object than the weight, on which the flag would not be set.
    """
    count = 0
    for model in models:
        for layer in model.decoder.layers:  # type: ignore[union-attr]
            if not getattr(layer, "recompute_mlp", False) or type(layer.mlp) is not MLP:
                continue
            # In fp8 a recomputed tensor is quantised again, and the down projection keeps another input.
            config = layer.mlp.config
            if not (config.fp8 or (reduces_early and config.gradient_accumulation_fusion)):
                layer.recompute_mlp = False
                layer.mlp.__class__ = RecomputingMLP
                count += 1
    return count


def recompute_first_layers(models: Iterable[torch.nn.Module], counts: Sequence[int]) -> None:
    """Restrict full recomputation to the first ``counts[i]`` layers of chunk i of this rank; chunks are not wrapped."""
    for model in models:
        block: Any = model.decoder
        count = counts[getattr(model, "vp_stage", None) or 0]
        block.config = copy.copy(block.config)  # layers, and what follows them, keep their own
        block.config.recompute_granularity = "full" if count else None
        block.config.recompute_method, block.config.recompute_num_layers = "block", count


class PositionedLayout(PipelineParallelLayerLayout):
    """Megatron's layout on a rank whose chunks have different pipeline positions.

    Megatron calls these methods without a pipeline rank for its own rank; the chunk's position is used then.

    Args:
        layout: Megatron's own.
        positions: Pipeline rank for each chunk of this rank.
    """

    def __init__(self, layout: PipelineParallelLayerLayout, positions: tuple[int, ...]) -> None:
        self.__dict__.update(layout.__dict__)
        self._positions = positions

    def _rank(self, vp_stage: int | None, pp_rank: int | None) -> int | None:
        return self._positions[vp_stage or 0] if pp_rank is None else pp_rank

    def get_num_layers_to_build(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        return super().get_num_layers_to_build(layer_type, vp_stage, self._rank(vp_stage, pp_rank))

    def get_layer_offset(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        return super().get_layer_offset(layer_type, vp_stage, self._rank(vp_stage, pp_rank))

    def get_layer_id_list(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> list[int]:
        return super().get_layer_id_list(layer_type, vp_stage, self._rank(vp_stage, pp_rank))


def know_positions(transformer: Any, positions: tuple[int, ...]) -> None:
    """Put a :class:`PositionedLayout` into a transformer configuration where this rank's chunks differ in position.

    A hybrid model has no layout: its builder is given the chunk's position.
    """
    layout = transformer.pipeline_model_parallel_layout
    if layout is not None and len(set(positions)) > 1:
        transformer.pipeline_model_parallel_layout = PositionedLayout(layout, positions)


class ChunkedBuilder:
    """Mixin before one of Megatron's builders.

    It builds all chunks of the only stage of a pipeline, or of a stage whose chunks have several positions.
    """

    wraps_with_upstream = True  # whether upstream wraps them with DDP; else ``_wrap`` does
    _model_config: Any
    build_model: Callable[..., Any]

    def build_distributed_models(
        self,
        pg_collection: ProcessGroupCollection,
        ddp_config: DistributedDataParallelConfig | None = None,
        *,
        data_parallel_random_init: bool = True,
        mixed_precision_wrapper: Callable[[Any, Any], Any] | None = Float16Module,
        model_type: ModelType = ModelType.encoder_or_decoder,
        **options: Any,
    ) -> list[Any]:
        """Builds chunks as upstream does; chunks that upstream cannot build are built one after the other.

        ``options``, which differ between releases, only concern the steps after building.
        """
        options |= {
            "ddp_config": ddp_config,
            "data_parallel_random_init": data_parallel_random_init,
            "mixed_precision_wrapper": mixed_precision_wrapper,
        }
        config = self._model_config
        chunks = config.transformer.virtual_pipeline_model_parallel_size or 1
        if not self._builds(pg_collection.pp, chunks):
            return super().build_distributed_models(  # type: ignore[misc]
                pg_collection, model_type=model_type, **options
            )
        built = self._build_chunks(pg_collection, chunks, model_type)
        finish = functools.partial(self._finish, pg_collection=pg_collection, **options)
        return self._finish_all(built, finish)

    def _builds(self, pipeline: Axis, chunks: int) -> bool:
        """Whether the chunks are built here, and not by upstream."""
        return chunks > 1 and (pipeline.size() == 1 or bool(pipeline.by_chunk))

    def _finish_all(self, chunks: Iterator[Any], finish: Callable[[list[Any]], list[Any]]) -> list[Any]:
        return finish(list(chunks))

    def _finish(
        self,
        models: list[Any],
        *,
        pg_collection: ProcessGroupCollection,
        ddp_config: DistributedDataParallelConfig | None,
        wrap_with_ddp: bool = True,
        **options: Any,
    ) -> list[Any]:
        """Run upstream's steps after building (hooks, device, wrappers); returns the finished chunks."""
        config = self._model_config
        models = compose_hooks(config.pre_wrap_hooks)(models)
        models = prepare_existing_model_chunks_for_distributed_training(
            models,
            config.transformer,
            pg_collection,
            ddp_config=ddp_config,
            wrap_with_ddp=wrap_with_ddp and self.wraps_with_upstream,
            **options,
        )
        if wrap_with_ddp and not self.wraps_with_upstream:
            assert ddp_config is not None
            models = self._wrap(models, ddp_config, pg_collection)
        return compose_hooks(config.post_wrap_hooks)(models)

    def _wrap(
        self, models: list[Any], ddp_config: DistributedDataParallelConfig, pg_collection: ProcessGroupCollection
    ) -> list[Any]:
        """Wrap chunks with DDP, where upstream does not."""
        raise NotImplementedError

    def _build_chunks(self, pg_collection: ProcessGroupCollection, chunks: int, model_type: ModelType) -> Iterator[Any]:
        """The chunks of this rank, each one built when it is asked for."""
        transformer = self._model_config.transformer
        axis: Axis = pg_collection.pp
        if axis.size() == 1 and chunks > 1:
            # Upstream numbers layers by the layout only where the configuration, as opposed to the
            # process group, says that there is more than one stage.
            transformer.pipeline_model_parallel_size = max(2, transformer.pipeline_model_parallel_size)
        for chunk in range(len(axis.by_chunk) or chunks):
            shown = axis.of_chunk(chunk)
            groups = copy.copy(pg_collection)
            groups.pp = shown
            with at_chunk(chunk):
                model = self.build_model(
                    groups,
                    pre_process=shown.rank() == 0 and chunk == 0,
                    post_process=shown.rank() == shown.size() - 1 and chunk == chunks - 1,
                    vp_stage=chunk if chunks > 1 else None,
                )
            model.model_type = model_type
            yield model


class ChunkedGPTModelBuilder(ChunkedBuilder, GPTModelBuilder):
    """Builds the chunks of a GPTModel."""


class PlacedHybridModelBuilder(HybridModelBuilder):
    """Builds hybrid models, which look up their part of the pattern by the pipeline group's torch rank."""

    def build_model(self, pg_collection: ProcessGroupCollection, *positional: Any, **keywords: Any) -> Any:
        axis: Axis = pg_collection.pp
        with axis.known_to_torch():
            model = super().build_model(pg_collection, *positional, **keywords)
        if not (model.decoder.layers or model.pre_process or model.post_process):
            # The output of a chunk without layers must be another tensor than its input, because both are freed at
            # different times; a GPTModel does that itself.
            model.decoder.register_forward_hook(lambda _stack, _given, hidden: hidden.clone())
        return model


class ChunkedHybridModelBuilder(ChunkedBuilder, PlacedHybridModelBuilder):
    """Builds the chunks of a HybridModel."""
