"""The parameter window as a feature of a rank."""

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_het.device.memory import uncounted
from megatron_het.distributed.gradient_sums import class_exchange, tied_exchange
from megatron_het.families import family_of_config
from megatron_het.features import tied_copies
from megatron_het.features.window.chunk import ChunkWindow, WindowUse
from megatron_het.features.window.optimizer import ChunkedOptimizer
from megatron_het.features.window.shards import Shares, set_shares
from megatron_het.features.window.spec import WindowOptions
from megatron_het.features.window.state import StageSums
from megatron_het.lowering.ranks import RankOp
from megatron_het.plan.placement import rank_shares
from megatron_het.runtime.feature import BackwardPass, Call, Handler, Iteration, OpenContext, RuntimeFeature
from megatron_het.schedule.ir import Kind
from megatron_het.schedule.kinds import Direction, chunk_of, executed_by

# The parameter window of Zorse (sections 4.1.1 and 4.1.2): what parameter operations do.
#
# The Program decides when; this file holds no schedule.  PARAM_GATHER opens a ministage (after its
# pending update), PARAM_RELEASE closes it, GRAD_REDUCE reduces its gradients to shards,
# OPTIMIZER_STEP updates it at once, PARAM_PREFETCH and PARAM_OFFLOAD move its shards between host and
# device.


@dataclass(eq=False)
class ParameterWindow(RuntimeFeature):
    """All chunks of a rank, with the operations that open, close and update them.

    Chunks are closed as soon as they have been built (``adopt``).  ``take_over`` is called when a checkpoint is loaded
    or the first iteration of training begins.  Before that, operations do nothing: an evaluation without training
    opens all chunks (``materialise``).
    """

    options: WindowOptions  # from the plan
    tp_group: dist.ProcessGroup  # this rank's tensor-parallel group
    stage_group: dist.ProcessGroup  # all ranks of this rank's stage
    # whether this rank's token counts are part of the global one (one TP rank of every replica of the last stage)
    counts_tokens: bool
    sums: StageSums | None = None  # sums beyond the replicas that share shards
    divisor: int = 1  # divisor of the losses (``Plan.loss_divisor``)
    shares: tuple[Shares, Shares] = (None, None)  # of the state of this rank's stage, and of its experts
    of_experts: bool = False  # whether experts have other replicas than the other weights, on any stage

    roles = ("stage",)

    def __post_init__(self) -> None:
        self.use = WindowUse()
        self._sums = self.sums or StageSums()
        # The windows over each chunk: over experts with replicas of their own in a second one.
        self._chunks: list[tuple[ChunkWindow, ...]] = []
        self._optimizers: list[ChunkedOptimizer] = []  # of each kind of windows; none before ``take_over``
        self._config: Any = None
        self._reducing: set[int] = set()
        self._total_tokens: torch.Tensor | None = None
        self._counting: dist.Work | None = None
        self._scale: torch.Tensor | None = None
        self._ends_are_summed = False

    # -- life ----------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> "ParameterWindow":
        """Return the object itself: Megatron copies configurations, with their hooks, for layers of experts."""
        return self

    def handlers(self) -> Mapping[Kind, Handler]:
        return dict.fromkeys(executed_by("window"), lambda op, call, state: self.handle(op))

    def prepare_config(self, model_config: Any) -> None:
        """See :class:`RuntimeFeature`; the window finalises gradients itself."""
        model_config.transformer.finalize_model_grads_func = self.finalize
        model_config.post_wrap_hooks.append(
            functools.partial(set_shares, shares=self.shares[0], of_experts=self.shares[1])
        )
        model_config.post_wrap_hooks.append(self.adopt)
        model_config.builder = family_of_config(model_config).window_builder

    def adopt(self, models: list[Any]) -> list[Any]:
        """Take over chunks that Megatron's DDP has just wrapped, and close them.

        Args:
            models: Chunks in order, all at once or one per call.

        Returns:
            ``models``, as Megatron expects of a hook that runs after wrapping.
        """
        from megatron.core.distributed import DistributedDataParallel

        for model in models:
            if isinstance(model, DistributedDataParallel):
                kinds = (False, True) if self.of_experts else (False,)
                self._chunks.append(tuple(ChunkWindow(model, self.options.offload, self.use, kind) for kind in kinds))
                self._close(self._chunks[-1])
        return models

    def before_loading(self, models: Sequence[Any], optimizer: Any) -> None:
        """See :class:`RuntimeFeature`; from here on ministages are closed, with their state as between updates."""
        if optimizer is not None:
            self.take_over(models, optimizer)

    def take_over(self, models: Sequence[Any], optimizer: Any) -> None:
        """Take over the optimizer and the contents of open chunks (first call only), and close all chunks."""
        if self._optimizers:
            return
        from megatron.core.utils import get_model_config

        self._config = get_model_config(models[0])
        for window in self.windows():
            window.take_shards()
        kinds = list(zip(*self._chunks))
        found = getattr(optimizer, "chained_optimizers", [optimizer])
        if len(found) > len(kinds) or not all(isinstance(part, DistributedOptimizer) for part in found):
            names = ", ".join(type(part).__name__ for part in found)
            raise TypeError(f"the parameter window needs {len(kinds)} of DistributedOptimizer, found: {names}")
        self._optimizers = [ChunkedOptimizer(part, own, self.options) for part, own in zip(found, kinds)]
        for windows in self._chunks:
            self._close(windows)
        for part in self._optimizers:
            part.store_all()
        self.use.restart()

    def materialise(self) -> None:
        for c in range(len(self._chunks)):
            self._bring(c)
        for part in self._optimizers:
            part.fetch_all()

    def settle(self) -> None:
        """See :class:`RuntimeFeature`; before ``take_over`` all parameters are gathered."""
        if not self._optimizers:
            self.materialise()
            return
        for c, windows in enumerate(self._chunks):
            for window in windows:
                window.fetch()
            self._update(c)
            for window in windows:
                window.side.join()
                if not window.is_open:
                    window.store()

    @torch.no_grad()
    def copies(self, parameters: Iterable[torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
        """See :class:`RuntimeFeature`; closed ministages are gathered one at a time and copied."""
        wanted, found = set(parameters), dict[torch.Tensor, torch.Tensor]()
        for part in self._optimizers:
            part.give_back()
        for c, windows in enumerate(self._chunks):
            buckets = [bucket for window in windows for bucket in window.buckets]
            mine = [p for bucket in buckets for p in bucket.source.params_list if p in wanted]
            if windows[0].is_open or not mine:
                continue
            self._bring(c)
            with uncounted():
                found |= {parameter: parameter.detach().to("cpu", copy=True) for parameter in mine}
            for window in windows:
                window.close()
                window.store()
        return found

    def begin(self, call: Call, state: Iteration) -> None:
        """See :class:`RuntimeFeature`; before training all parameters are gathered."""
        if not call.forward_only:
            self.take_over(call.models, call.optimizer)
        elif not self._optimizers:
            self.materialise()
        self.restart()

    def restart(self) -> None:
        """Close the chunks that ``materialise`` left open, at the start of an iteration or evaluation."""
        for window in self.windows() if self._optimizers else ():
            window.close()
            window.store()
        for part in self._optimizers:
            part.begin()
            part.store_all()
        self._scale = self._total_tokens = self._counting = None
        self._ends_are_summed = False
        self.use.restart()

    def end_when_waited_for(self) -> None:
        """Free gradients at a fixed operation, whenever their reductions end."""
        self.use.ends_when_waited_for = True

    def figures(self) -> Mapping[str, Mapping[str, int]]:
        """Bytes and collectives in the latest iteration."""
        return {"window": self.use.as_json()}

    def kept(self) -> dict[str, list[torch.Tensor]]:
        """Shards of parameters and of reduced gradients, besides Megatron's buffers."""
        buckets = [bucket for window in self.windows() for bucket in window.buckets]
        gradients = [bucket.gradient for bucket in buckets if bucket.gradient is not None]
        return {"parameters": [bucket.shard for bucket in buckets], "gradients": gradients}

    def close(self) -> None:
        """Free every buffer and drop the references to Megatron's optimizer and models."""
        for part in self._optimizers:
            part.detach()
        for window in self.windows():
            window.dispose()
        self._chunks.clear()
        self._optimizers.clear()
        self._reducing.clear()
        self._config = None
        self._scale = self._total_tokens = self._counting = None

    # -- what the executor calls ---------------------------------------------------------------

    def losses_known(self, call: Call, state: Iteration) -> None:
        """Start the all-reduce of token counts, if updates inside the iteration divide gradients by the total.

        It cannot wait for the backwards: an update on one stage may come before backwards of another stage.
        """
        assert state.num_tokens is not None
        if self._optimizers and self.options.updates_early:
            self._total_tokens = self._own_tokens(state.num_tokens)
            self._counting = dist.all_reduce(self._total_tokens, async_op=True)

    def handle(self, op: RankOp) -> None:
        """Run one parameter operation."""
        if not self._optimizers:
            return
        windows = self._chunks[op.chunk]
        match op.kind:
            case Kind.PARAM_PREFETCH:
                for window in windows:
                    window.fetch()
                for part in self._optimizers:
                    part.fetch(op.chunk)
            case Kind.PARAM_GATHER:
                self._open(op.chunk)
                self._gather(op.chunk, op.start, op.stop)
            case Kind.PARAM_RELEASE:
                for window in windows:
                    window.close()
            case Kind.PARAM_OFFLOAD:
                for window in windows:
                    window.store()
            case Kind.GRAD_REDUCE:
                self._reduce(op.chunk, op.start, op.stop)
            case Kind.OPTIMIZER_STEP:
                self._step_at_once(op.chunk)

    @contextlib.contextmanager
    def around_backward(self, backward: BackwardPass, call: Call, state: Iteration) -> Iterator[None]:
        self.before_backward(backward.op.chunk)
        yield

    def before_part(self, op: RankOp, state: Iteration) -> None:
        """See :class:`RuntimeFeature`; the rows of a split vocabulary are in the first and the last chunk.

        A forward needs only the parameters.
        """
        if not self._optimizers:
            return
        chunk = chunk_of(op.kind, op.chunk, len(self._chunks))
        if op.kind.direction is Direction.BACKWARD:
            self.before_backward(chunk)
        else:
            self._wait(chunk)

    def before_backward(self, chunk: int) -> None:
        """Wait for the chunk's parameters and allocate its gradients."""
        if not self._optimizers:
            return
        for c in sorted(self._reducing):
            if c == chunk or not any(w.is_reducing() for w in self._chunks[c]):  # a pass must not add to these
                self._finish_reduction(c)
        self._wait(chunk)
        for window in self._chunks[chunk]:
            window.open_gradients()

    # -- what Megatron calls -------------------------------------------------------------------

    @torch.no_grad()
    def finalize(self, _model: Any, num_tokens: torch.Tensor | None = None, **_unused: Any) -> None:
        """Replaces ``finalize_model_grads``: finish reductions and divide by the global number of tokens."""
        for c in sorted(self._reducing):
            self._finish_reduction(c)
        if self.options.updates_early:
            return
        self._sums.over_ends(self._of_all_ranks())
        for window in self._of_all_ranks():
            self._sums.over_classes(window)
        if num_tokens is None:
            return
        total = self._own_tokens(num_tokens)
        dist.all_reduce(total)
        _scale_gradients(self.windows(), self.divisor / torch.clamp(total, min=1))

    # -- helpers -------------------------------------------------------------------------------

    def _own_tokens(self, num_tokens: torch.Tensor) -> torch.Tensor:
        own = num_tokens.to(torch.int64)
        return own if self.counts_tokens else torch.zeros_like(own)

    def windows(self) -> Iterator[ChunkWindow]:
        """All windows, chunk by chunk."""
        return itertools.chain.from_iterable(self._chunks)

    def _of_all_ranks(self) -> list[ChunkWindow]:
        """The windows over weights that all ranks have, as the copies of tied ones."""
        return [windows[0] for windows in self._chunks]

    @staticmethod
    def _close(windows: Sequence[ChunkWindow]) -> None:
        for window in windows:
            window.close()
            window.drop_gradients()
            window.store()

    def _open(self, c: int) -> None:
        if not self._chunks[c][0].is_open:
            self._update(c)
            for window in self._chunks[c]:
                window.open()

    def _bring(self, c: int) -> None:
        """Open a chunk with its complete parameters."""
        for window in self._chunks[c]:
            window.fetch()
        if not self._chunks[c][0].is_open:
            self._open(c)
            self._gather(c)
        for window in self._chunks[c]:
            window.wait()
            window.side.join()

    def _gather(self, c: int, start: int = -1, stop: int = -1) -> None:
        for window in self._chunks[c]:
            window.gather(start, stop)

    def _wait(self, c: int) -> None:
        for window in self._chunks[c]:
            window.wait()

    def _update(self, c: int) -> None:
        """Apply the pending update to the shards of a closed ministage."""
        if self._chunks[c][0].is_open:
            return
        with self._chunks[c][0].side.following():
            for bucket in (bucket for window in self._chunks[c] for bucket in window.buckets):
                if bucket.host is not None:
                    bucket.host.wait()
            for part in self._optimizers:
                part.apply_pending(c)

    def _reduce(self, c: int, start: int, stop: int) -> None:
        windows = self._chunks[c]
        if any(w.has_reduced(start, stop) for w in windows):  # by the previous pass; this replica lacks the current one
            self._finish_reduction(c)
        if c not in self._reducing:
            for other in sorted(self._reducing):
                self._finish_reduction(other)
            self._reducing.add(c)
            for window in windows:
                window.open_gradients()  # a rank without microbatches has zeros to add
            self._before_reduction(windows[0].ddp)
        for window in windows:
            window.reduce(start, stop)

    def _before_reduction(self, ddp: Any) -> None:
        """Apply upstream's steps to gradients before reduction: sums over the TP group, checks."""
        from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads

        _allreduce_non_tensor_model_parallel_grads([ddp], self._config, self.tp_group)
        if ddp.ddp_config.check_for_nan_in_grad or ddp.ddp_config.check_for_large_grads:
            for group in (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups):
                group.check_grads(
                    check_for_nan_or_inf=ddp.ddp_config.check_for_nan_in_grad,
                    check_for_large=ddp.ddp_config.check_for_large_grads,
                )

    def _finish_reduction(self, c: int) -> None:
        if c in self._reducing:
            self._reducing.discard(c)
            for window in self._chunks[c]:
                window.keep_gradient_shards()

    @torch.no_grad()
    def _step_at_once(self, c: int) -> None:
        assert self._optimizers and self._total_tokens is not None
        self._finish_reduction(c)
        for bucket in (bucket for window in self._chunks[c] for bucket in window.buckets):
            if bucket.host is not None:  # a shard that comes back for a late step
                bucket.host.wait()
        self._sum_over_ends(c)
        self._sums.over_classes(self._chunks[c][0])  # all replicas of a stage call this in one order
        if self._scale is None:
            if self._counting is not None:
                self._counting.wait()
            self._scale = self.divisor / torch.clamp(self._total_tokens, min=1)
        _scale_gradients(self._chunks[c], self._scale)
        counted = [gradient for part in self._optimizers for gradient in part.attach(c)]
        norm = None
        if self.options.update == "per-ministage" and self._optimizers[0].clip_grad > 0:
            norm = get_grad_norm_fp32(counted, grad_stats_parallel_group=self.stage_group)
        for part in self._optimizers:
            part.step_now(c, norm)

    def _sum_over_ends(self, c: int) -> None:
        """Sum the gradients of tied weights before the first update of a ministage with a copy of them.

        Ministages with copies are updated after all others, so that every reduction has been started.
        """
        if self._ends_are_summed or not self._sums.has_copy(self._chunks[c][0]):
            return
        for other in sorted(self._reducing):
            self._finish_reduction(other)
        self._sums.over_ends(self._of_all_ranks())
        self._ends_are_summed = True


def _scale_gradients(windows: Iterable[ChunkWindow], factor: torch.Tensor) -> None:
    for bucket in (bucket for window in windows for bucket in window.buckets):
        if bucket.gradient is not None:
            bucket.gradient *= factor


def open_feature(context: OpenContext) -> RuntimeFeature:
    """Open the parameter window on this rank."""
    counts_tokens = context.has_loss and context.placement.locate(context.rank).tp_rank == 0
    groups = context.groups
    tied = tied_exchange(groups) if tied_copies(context.plan) else None
    plan, of_rank = context.plan, (context.placement, context.rank)
    return ParameterWindow(
        options=context.options,
        tp_group=groups["tp"],
        stage_group=groups["stage"],
        counts_tokens=counts_tokens,
        sums=StageSums(class_exchange(groups), tied),
        divisor=plan.loss_divisor,
        shares=(rank_shares(*of_rank), rank_shares(*of_rank, of_experts=True)),
        of_experts=any(not replica.cut.divides_alike for stage in plan.stages for replica in stage.replicas),
    )
