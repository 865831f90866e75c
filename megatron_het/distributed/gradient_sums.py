"""Finalising gradients under a plan: sums across classes of replicas, tied embeddings, one token count.

Gradients are sums over microbatches and ranks, divided once by the global number of tokens
(``--calculate-per-token-loss``), so any split of microbatches over replicas gives the same result
(Zorse, section 4.2; Poplar, section 4.4).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_het.distributed import PlanGroups
from megatron_het.lowering.ranks import expert_name
from megatron_het.plan import Placement

if TYPE_CHECKING:  # not needed for stages with one class of replicas and untied weights
    from megatron_het.distributed.resharding import ShardedParameter, ShardExchange


class GradientFinalizer:
    """Replaces ``config.finalize_model_grads_func``; ends in upstream's own function.

    Args:
        divisor: Number by which losses were divided (``Plan.loss_divisor``).
    """

    def __init__(self, groups: PlanGroups, tied_embeddings: bool, divisor: int = 1) -> None:
        self._divisor = divisor
        placement = groups.placement
        self._where = placement.locate(groups.rank)
        self._has_loss = self._where.stage == placement.last[0]
        self._has_both_ends = self._where.stage == placement.first[0] == placement.last[0]
        self._class_group, self._experts_class = groups["class"], groups.experts_class
        # All replicas of a class draw the same random weights if they are on one kind of device.
        replicas = placement.plan.stages[self._where.stage].replicas
        cut = replicas[self._where.replica].cut
        self._draws_alike = len({name for found in replicas if found.cut == cut for name in found.devices}) == 1
        self._stage_exchange = class_exchange(groups)
        self._tied_exchange = tied_exchange(groups) if tied_embeddings else None
        self._first_copy: torch.Tensor | None = None
        self._has_compared = False

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientFinalizer:
        """Returns this object: Megatron copies configurations, with their hooks, for layers of experts."""
        return self

    def __call__(
        self,
        model: list[torch.nn.Module],
        num_tokens: torch.Tensor | None = None,
        pg_collection: Any = None,
        force_all_reduce: bool = False,
    ) -> None:
        """Reduce, sum across classes and scale; the signature is upstream's.

        Args:
            model: DDP-wrapped chunks of this rank.
            num_tokens: Tokens in the losses of this rank's microbatches (stage of the last chunk).
        """
        from megatron.core.distributed import finalize_model_grads

        # With --overlap-grad-reduce gradients are reduced inside a class while backward passes still run.
        settings = [getattr(chunk, "ddp_config", None) for chunk in model]
        after = any(found is not None and found.overlap_grad_reduce for found in settings)
        if not after:
            self._sum_across_classes(model)
        # Without a token count upstream does not scale: its broadcast needs a pipeline group.
        finalize_model_grads(model, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce)
        if after:
            self._sum_reduced_across_classes(model, force_all_reduce)
        if num_tokens is not None:
            counts = self._has_loss and self._where.tp_rank == 0
            total = num_tokens.to(torch.int64) if counts else torch.zeros_like(num_tokens, dtype=torch.int64)
            dist.all_reduce(total)
            scale = self._divisor / torch.clamp(total, min=1)
            for chunk in model:
                scaled: Any = chunk
                scaled.scale_gradients(scale)
        if not self._has_compared:
            self._has_compared = True
            _compare_copies(model, {} if force_all_reduce else _held(model))

    def copy_initial_weights(self, model: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Make all replicas, and both copies of tied embeddings, start from the same weights.

        Random initialisation depends on TP size and stage, and on a GPU's number of multiprocessors.  This runs
        when all weights are on the device, because NCCL needs them there, and before the optimizer copies them.

        Args:
            model: Chunks of this rank, with or without DDP.

        Returns:
            ``model``, as Megatron expects from a hook.
        """
        if not self._draws_alike:
            for name, weight in (named for chunk in model for named in chunk.named_parameters()):
                group = self._class_group if expert_name(name) is None else self._experts_class
                values = initial_values(weight)
                dist.broadcast(values, dist.get_global_rank(group, 0), group=group)
                set_initial_values(weight, values)
        copies = self._tied_weights(model)
        for exchange, named, config in self._exchanges(model, copies):
            weights = list(named)
            begin = {weight: initial_values(weight) for _, weight in weights}
            exchange.copy_weights(exchange.described(iter(weights), begin.__getitem__, config))
            for weight in begin:
                set_initial_values(weight, begin[weight])
        for copy in copies:
            if self._first_copy is not None:
                copy.data.copy_(self._first_copy)
                self._first_copy = None
            elif self._has_both_ends:  # under a parameter window the first chunk is closed before the last one opens
                self._first_copy = copy.data.to("cpu", copy=True)
        return model

    def _sum_across_classes(self, model: list[torch.nn.Module]) -> None:
        copies = self._tied_weights(model)
        for copy in copies[1:]:
            copies[0].main_grad.add_(copy.main_grad)
        for exchange, named, config in self._exchanges(model, copies):
            exchange.sum_gradients(exchange.described(named, operator.attrgetter("main_grad"), config))
        for copy in copies[1:]:
            copy.main_grad.copy_(copies[0].main_grad)

    def _sum_reduced_across_classes(self, model: list[torch.nn.Module], are_whole: bool) -> None:
        """Add the sums across classes after upstream has reduced inside every class, and over TP ranks.

        Args:
            model: DDP-wrapped chunks of this rank.
            are_whole: Whether every rank has complete reduced gradients, also with the distributed optimizer.
        """
        held, gradient = {} if are_whole else _held(model), operator.attrgetter("main_grad")

        def gathered(exchange: ShardExchange, parameters: Sequence[ShardedParameter]) -> None:
            if held:
                gradients = (p.tensor for p in parameters)  # an expert of other ranks has no elements here
                spans = [held[_beginning(g)] if g.numel() else (0, 0) for g in gradients]
                exchange.gather_reduced(parameters, spans)

        copies = self._tied_weights(model)
        for exchange, named, _ in self._exchanges(model, copies):
            parameters = exchange.described(named, gradient)  # no config: TP ranks' summands are added up
            gathered(exchange, parameters)
            if exchange is self._tied_exchange:
                for copy in copies[1:]:
                    gathered(exchange, exchange.described(iter([("tied embedding", copy)]), gradient))
                    copies[0].main_grad.add_(copy.main_grad)
            exchange.sum_reduced(parameters)
        for copy in copies[1:]:
            copy.main_grad.copy_(copies[0].main_grad)

    def _tied_weights(self, model: list[torch.nn.Module]) -> list[Any]:
        """This rank's copies of tied weights: two if its stage has both ends of the model."""
        from megatron.core.utils import unwrap_model

        if self._tied_exchange is None:
            return []
        # Only of the chunks in ``model``: under a parameter window one at a time until training starts.
        mine = [chunk for chunk in unwrap_model(model) if chunk.pre_process or chunk.post_process]
        return [chunk.shared_embedding_or_output_weight() for chunk in mine]

    def _exchanges(
        self, model: list[torch.nn.Module], copies: Sequence[torch.nn.Parameter]
    ) -> Iterator[tuple[ShardExchange, Iterator[tuple[str, torch.nn.Parameter]], Any]]:
        """Yields (exchange, named parameters, model configuration): tied weights first, then the rest of the stage.

        Every rank passes only one copy of tied weights.
        """
        from megatron.core.utils import get_model_config, unwrap_model

        chunks = unwrap_model(model)
        config = get_model_config(chunks[0])
        if self._tied_exchange is not None and copies:
            yield self._tied_exchange, iter([("tied embedding", copies[0])]), config
        if self._stage_exchange is not None:
            tied = {id(copy) for copy in copies}
            rest = ((n, p) for chunk in chunks for n, p in chunk.named_parameters() if id(p) not in tied)
            yield self._stage_exchange, rest, config


def _held(model: list[torch.nn.Module]) -> dict[tuple[int, int], tuple[int, int]]:
    """Elements ``[start, stop)`` of each flat gradient in which this rank has the class's sum, by ``_beginning``."""
    wrapped: list[Any] = list(model)
    divided = [chunk for chunk in wrapped if chunk.ddp_config.use_distributed_optimizer]
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for buffer in (buffer for chunk in divided for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)):
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            length = bucket.grad_data.numel() // group.size()
            first = bucket.offset + group.rank() * length
            for parameter in bucket.params_list:
                start, stop, _ = buffer.param_index_map[parameter]
                mine = min(max(first, start), stop) - start, max(min(first + length, stop), start) - start
                found[_beginning(parameter.main_grad)] = mine
    return found


def _beginning(tensor: torch.Tensor) -> tuple[int, int]:
    """A tensor's storage and offset, as a key that also works for fake tensors, which have no address."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def is_tied_copy(parameter: torch.Tensor) -> bool:
    """Whether Megatron holds these weights twice, in the first and in the last chunk of the model."""
    return bool(getattr(parameter, "shared_embedding", False))


def _compare_copies(model: list[torch.nn.Module], held: dict[tuple[int, int], tuple[int, int]]) -> None:
    """Raise RuntimeError if this rank's copies of tied weights have different gradients."""
    copies: list[Any] = [p for chunk in model for p in chunk.parameters() if is_tied_copy(p)]
    if not copies:
        return
    from megatron_het.distributed.resharding import CopiesCheck

    check = CopiesCheck(len(copies))
    for copy in copies:
        start, stop = held.get(_beginning(copy.main_grad), (0, copy.numel()))
        check.see(start, copy.main_grad.view(-1)[start:stop])


def class_exchange(groups: PlanGroups) -> ShardExchange | None:
    """The exchange between the classes of replicas of this rank's stage; None if there is only one class."""
    stage = groups.placement.locate(groups.rank).stage
    return _exchange(groups, [stage], "leaders") if groups.placement.is_mixed(stage) else None


def tied_exchange(groups: PlanGroups) -> ShardExchange | None:
    """The exchange of tied weights between the stages of the model's first and last chunk.

    None if this rank's stage is neither, or both ends are in one chunk.
    """
    placement = groups.placement
    ends = sorted({placement.first[0], placement.last[0]})
    if placement.first == placement.last or placement.locate(groups.rank).stage not in ends:
        return None
    return _exchange(groups, ends, "ends")


def _exchange(groups: PlanGroups, stages: list[int], role: str) -> ShardExchange:
    from megatron_het.distributed.resharding import ReplicaClass, ShardExchange

    placement: Placement = groups.placement
    where = placement.locate(groups.rank)
    own = placement.replica(where.stage, where.replica).cut
    classes: list[ReplicaClass] = []
    mine = -1
    for stage in stages:
        for cut in placement.classes(stage):
            if stage == where.stage and cut == own:
                mine = len(classes)
            leaders = tuple(placement.class_ranks(stage, cut, t)[0] for t in range(cut.tp))
            classes.append(ReplicaClass(cut, leaders))
    return ShardExchange(classes, mine, where.tp_rank, groups["class"], groups["tp"], groups.get(role))


def mark_sharded(model: list[torch.nn.Module]) -> None:
    """Set the attributes of TP-sharded parameters that Megatron's own layers leave unset.

    The learnable softmax offset has one number per attention head of its rank.  Without the attributes it
    would be treated as replicated: in the exchange between classes, and in norms.  Transformer Engine's layers of
    experts do not declare that their gated projection has two halves, and gated delta nets do not declare the parts of
    their projection and convolution.
    """
    from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
    from megatron.core.utils import get_model_config

    for chunk in model:
        for name, parameter in chunk.named_parameters():
            if name.endswith(".softmax_offset") and not hasattr(parameter, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(parameter, True, 0, 1)
            gated = ".experts." in name and ".linear_fc1." in name and get_model_config(chunk).gated_linear_unit
            if gated and getattr(parameter, "tensor_model_parallel", False):
                parameter.partition_stride = 2  # type: ignore[attr-defined]
        for module in chunk.modules():
            if hasattr(module, "in_proj_split_sections"):
                parts: Any = module
                parts.in_proj.weight.partition_sizes = list(parts.in_proj_split_sections)
                query_or_key, value = parts.qk_dim_local_tp, parts.v_dim_local_tp
                parts.conv1d.weight.partition_sizes = [query_or_key, query_or_key, value]


def count_once_in_params_norm(model: list[torch.nn.Module], groups: PlanGroups) -> None:
    """Make ``--log-params-norm`` count every parameter once under the distributed optimizer.

    Upstream sums over the WORLD (see ``distributed/stage_state.py``), in which replicas of a class hold copies of
    the parameters.  For 16-bit parameters it uses the main parameters, whose shards are disjoint, but sums
    them over the replicas before.  Call this once the optimizer has its shards: later nothing else reads
    these attributes.
    """
    for name, parameter in _parameters(model):
        if getattr(parameter, "main_param_sharded", False):
            parameter.main_param_sharded = False
        elif not _is_first_copy(name, groups):
            parameter.shared = True


def _parameters(model: list[torch.nn.Module]) -> Iterator[tuple[str, Any]]:
    return (named for chunk in model for named in chunk.named_parameters())


def _is_first_copy(name: str, groups: PlanGroups) -> bool:
    """Whether this rank holds a parameter's first copy in its class."""
    return (groups["class"] if expert_name(name) is None else groups.experts_class).rank() == 0


def mark_duplicates(model: list[torch.nn.Module], groups: PlanGroups, distributed_optimizer: bool) -> None:
    """Count every parameter once in the global gradient norm and in the count of zeros.

    Upstream sums over the WORLD (see ``distributed/stage_state.py``) and skips ``shared`` parameters.
    With the distributed optimizer the replicas of a class hold disjoint shards; without it they
    hold copies, of which one counts.  If there are several classes, only the first one counts.
    """
    placement = groups.placement
    where = placement.locate(groups.rank)
    counts = placement.replica(where.stage, where.replica).cut == placement.classes(where.stage)[0]
    for name, parameter in _parameters(model):
        if not counts or not (distributed_optimizer or _is_first_copy(name, groups)):
            parameter.shared = True


# Weights in fp8 (``--fp8-param-gather``) have two initial values.
#
# Transformer Engine quantises such a weight when it creates it.  It keeps the unquantised values in host memory until
# Megatron's optimizer has copied them.  Code that sets a weight before that has to set both.

_CLOSE = 0.25
"""Bound on the largest difference over the largest value: measured 0.06 with a scale from the values, 0.12 without."""


def initial_values(weight: torch.Tensor) -> torch.Tensor:
    """A weight's initial values on its device: its own memory, or for fp8 a copy of the unquantised values."""
    kept = getattr(weight, "get_high_precision_init_val", None)
    return weight.data if kept is None else kept().to(weight.device)


def set_initial_values(weight: torch.Tensor, values: torch.Tensor) -> None:
    """Set a weight to ``values``, which :func:`initial_values` has returned and the caller has changed.

    Raises:
        RuntimeError: The quantised weight does not hold them.
    """
    kept = getattr(weight, "get_high_precision_init_val", None)
    if kept is None:
        return
    with torch.no_grad():
        kept().copy_(values)
        weight.copy_(values)  # quantises
        found = weight.detach().dequantize().to(values.dtype)
        if not (found - values).abs().max() <= _CLOSE * values.abs().max():
            raise RuntimeError("a weight in fp8 does not hold what was written into it; leave out --fp8-param-gather")
