"""A training session under a plan: everything that depends on the plan, built once and torn down again.

``open`` creates groups, stage-local state, channels and executor from the plan; ``close`` undoes it
in the opposite order.  There is no other owner of these objects, so that a session can be replaced
by one for another plan.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_het.config import HetConfig
from megatron_het.layers import make_norms_thrifty
from megatron_het.plan import Placement, PlanError, plan_hash
from megatron_het.plan.shares import rank_shares
from megatron_het.plan.slices import (
    cuts_sequences,
    exchange_of,
    is_sliced,
    offload_ratio,
    slices_of,
    splits_vocabulary,
)
from megatron_het.platform import Platform
from megatron_het.runtime.activation_offload import ActivationOffload
from megatron_het.runtime.channels import Channels
from megatron_het.runtime.executor import Call, Executor, iterators_per_chunk
from megatron_het.runtime.gradient_sync import check_overlap
from megatron_het.runtime.gradients import GradientFinalizer, mark_duplicates
from megatron_het.runtime.lowering import BoundaryMap, RankProgram, edges, exchange_edges, lower
from megatron_het.runtime.programs import build_programs
from megatron_het.runtime.report import RunReport
from megatron_het.runtime.slicing import Sequences, SlicedSequences, WholeSequences
from megatron_het.runtime.timeline import Timeline
from megatron_het.runtime.transport import choose_transport, posted_for
from megatron_het.runtime.window_options import split_parameters
from megatron_het.schedule.ir import Program
from megatron_het.topology import PlanGroups, build_groups, install_stage_state, remove_stage_state

if TYPE_CHECKING:  # it imports Megatron
    from megatron_het.runtime.exchange import ContextExchange
    from megatron_het.runtime.window import ParameterWindow
    from megatron_het.vocab.team import SplitVocabulary

_PENDING_SLICES = 4
_NOTE = "het: "


def _checked_programs(placement: Placement) -> dict[bool, Program]:
    """The plan's programs; built before any process group exists, so that a bad schedule ends there."""
    try:
        return build_programs(placement)
    except (ValueError, TypeError) as error:
        name = placement.plan.schedule.name
        raise PlanError(
            "schedule", name, str(error), "Choose another schedule or other parameters"
        ) from error


class HetSession:
    """Runs Megatron under a plan.

    Args:
        config: The ``--het-*`` configuration; must be active.
        platform: What this process computes on.
    """

    def __init__(self, config: HetConfig, platform: Platform) -> None:
        assert config.plan is not None
        self.config = config
        self.plan = config.plan
        self.placement = Placement(config.plan)
        self._programs = _checked_programs(self.placement)
        self._platform = platform
        self._groups: PlanGroups | None = None
        self._channels: Channels | None = None
        self._executor: Executor | None = None
        self._finalizer: GradientFinalizer | None = None
        self._window: ParameterWindow | None = None
        self._vocabulary: SplitVocabulary | None = None
        self._offload: ActivationOffload | None = None
        self._timeline = Timeline(
            platform.is_cuda, device_events=bool(config.report_dir or config.trace_dir)
        )
        self._models: list[torch.nn.Module] = []
        self._slicing: SlicedSequences | None = None
        self._exchange: ContextExchange | None = None
        self.report: RunReport | None = None

    @property
    def groups(self) -> PlanGroups:
        """This rank's groups; the session must be open."""
        assert self._groups is not None, "the session is not open"
        return self._groups

    @property
    def tied_copies(self) -> bool:
        """Whether the first and the last stage hold a copy of the same weights.

        With a split vocabulary every row is held once, by one stage.
        """
        return self.plan.model.tied_embeddings and not splits_vocabulary(self.plan)

    def check(self, args: Any) -> None:
        """Compare Megatron's parsed arguments with what the programs do.

        Raises:
            PlanError: What does not fit.
        """
        check_overlap(self.plan, self._programs[False], args)

    # -- life --------------------------------------------------------------------------------

    def open(self, args: Any) -> None:
        """Create everything that depends on the plan.  Collective; ``torch.distributed`` is up."""
        timeout_s = args.distributed_timeout_minutes * 60
        tied = self.tied_copies
        self._groups = build_groups(
            self.placement,
            tied_embeddings=tied,
            timeout_s=timeout_s,
            use_gloo_groups=args.use_gloo_process_groups,
        )
        install_stage_state(self._groups)
        rank = dist.get_rank()
        where = self.placement.locate(rank)
        programs = self._programs
        cp = self.plan.context_parallel
        length = (args.decoder_seq_length or args.seq_length) // slices_of(self.plan) // cp
        parts = [
            BoundaryMap(self.placement, length, self.plan.training.sequence_parallel, part)
            for part in range(cp)
        ]
        boundaries = parts[where.cp_rank]
        choice = choose_transport(
            self.config.transport, dist.get_backend(), self._platform.is_cuda, programs.values()
        )
        transport = choice.transport
        self._channels = Channels(
            edges(list(programs.values()), parts), transport, timeout_s, rank,
            pending_per_edge=_PENDING_SLICES if is_sliced(self.plan) else None,
        )  # fmt: skip
        device = programs[False].shape.device(where.stage, where.replica)
        self._local_seq_length = boundaries.local_length(device, where.tp_rank)
        self._num_chunks = len(self.plan.stages[where.stage].layers)
        self._is_last = where.stage == self.placement.num_stages - 1
        lowered = {
            forward_only: lower(posted_for(transport, program), boundaries, device, where.tp_rank, rank)
            for forward_only, program in programs.items()
        }
        sequences = self._open_sequences(args, lowered, parts, transport, timeout_s)
        _, window_options = split_parameters(self.plan.schedule)
        if window_options is not None:
            from megatron_het.runtime.window import ParameterWindow

            self._window = ParameterWindow(
                window_options, self._groups["tp"], self._groups["stage"],
                self._is_last and where.tp_rank == 0,
            )
        if splits_vocabulary(self.plan):
            from megatron_het.vocab.team import SplitVocabulary

            self._vocabulary = SplitVocabulary(
                self.placement, rank, transport, timeout_s, self._groups["tp"], self._timeline, sequences
            )
        if offload_ratio(self.plan):
            self._offload = ActivationOffload(offload_ratio(self.plan), self._platform)
        self._executor = Executor(
            lowered,
            self._channels,
            is_last=self._is_last,
            num_chunks=self._num_chunks,
            timeline=self._timeline,
            sequences=sequences,
            window=self._window,
            vocabulary=self._vocabulary,
            offload=self._offload,
            exchange=self._exchange,
        )
        self._finalizer = GradientFinalizer(self._groups, tied)
        self.report = RunReport(
            self.config, self.placement, rank, plan_hash(self.plan), choice, self._platform
        )

    def _open_sequences(
        self,
        args: Any,
        lowered: Mapping[bool, RankProgram],
        parts: Sequence[BoundaryMap],
        transport: str,
        timeout_s: float,
    ) -> Sequences:
        """What runs the plan's forwards: over whole sequences, or over slices and parts of them."""
        options, rank = exchange_of(self.plan), self.groups.rank
        if options is not None:
            from megatron_het.runtime.exchange import ContextExchange

            assert self._channels is not None
            length = self.plan.model.seq_length // slices_of(self.plan) // self.plan.context_parallel
            pairs = exchange_edges(list(self._programs.values()), parts)
            self._exchange = ContextExchange(
                lowered,
                length // options.units,
                self.plan.stages[0].layers[0],
                self._channels,
                Channels(pairs, transport, timeout_s, rank, pending_per_edge=_PENDING_SLICES),
                self._timeline,
                self._platform.device,
                options.keep,
            )
        if cuts_sequences(self.plan):
            self._slicing = SlicedSequences(
                args, slices_of(self.plan), lowered, self._platform.device,
                self._exchange, self.groups.get("cp"),
            )  # fmt: skip
        return self._slicing or WholeSequences()

    def finish_report(self) -> None:
        """Write the report, if one was asked for; the session must still be open."""
        if self.report is None:
            return
        if self._models:
            from megatron.core.utils import get_model_config

            self.report.add_state_memory(
                self._models, _optimizer_of(get_model_config(self._models[0]))
            )
        self.report.write()

    def materialise_parameters(self) -> None:
        """Make whatever is due and show whole parameters, until the next iteration starts."""
        if self._window is not None:
            self._window.open_all()

    def close(self) -> None:
        """Destroy channels and groups and forget the stage-local state."""
        if self._vocabulary is not None:
            self._vocabulary.close()
        if self._exchange is not None:
            self._exchange.close()
        if self._channels is not None:
            self._channels.close()
        if self._groups is not None:
            remove_stage_state()
            self._groups.close()
        self._channels = self._groups = self._executor = self._finalizer = self._slicing = None
        self._vocabulary = self._offload = None
        self._exchange = None
        self._models = []

    # -- what Megatron gets --------------------------------------------------------------------

    def prepare_model_config(self, model_config: Any) -> None:
        """Hang this session into Megatron's model configuration (public hooks).

        Args:
            model_config: ``GPTModelConfig`` with its transformer configuration.
        """
        assert self._finalizer is not None
        finalize = self._finalizer if self._window is None else self._window.finalize
        model_config.transformer.finalize_model_grads_func = finalize
        model_config.pre_wrap_hooks.append(self._prepare_model)
        # Before wrapping, weights without a device of their own in Megatron are still on the CPU.
        model_config.post_wrap_hooks.append(self._finalizer.copy_initial_weights)
        if self._window is not None or self._num_chunks > 1:
            from megatron_het.runtime import building
            from megatron_het.runtime.window_shards import set_shares

            shares = rank_shares(self.placement, self.groups.rank)
            model_config.post_wrap_hooks.append(functools.partial(set_shares, shares=shares))
            if self._window is not None:
                model_config.post_wrap_hooks.append(self._window.adopt)
            model_config.builder = building.BUILDER if self._window is None else building.WINDOW_BUILDER

    def _prepare_model(self, model: list[torch.nn.Module]) -> list[torch.nn.Module]:
        from megatron_het.recompute import recompute_up_projections

        if self.config.thrifty_layers:
            make_norms_thrifty(model)
        recompute_up_projections(model)
        if self._vocabulary is not None:
            self._vocabulary.attach(model)
        if self._slicing is not None:
            self._slicing.attach(model)
        mark_duplicates(model, self.groups, self.plan.training.distributed_optimizer)
        return model

    def forward_backward(
        self,
        *,
        forward_step_func: Any,
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        force_all_reduce: bool = False,
        **_unused: Any,
    ) -> list[Any]:
        """One iteration; the signature is that of Megatron's forward-backward functions."""
        from megatron.core.utils import get_model_config

        assert self._executor is not None and self.report is not None
        models = model if isinstance(model, list) else [model]
        config = get_model_config(models[0])
        self._models = models
        if self._window is not None and not forward_only:
            self._window.attach(models, _optimizer_of(config))
        elif self._window is not None and not self._window.is_attached:
            self._window.open_all()
        call = Call(
            forward_step_func,
            iterators_per_chunk(data_iterator, self._num_chunks),
            models,
            config,
            num_microbatches,
            (self._local_seq_length, micro_batch_size, config.hidden_size),
            config.pipeline_dtype or config.params_dtype,
            self._platform.device,
            forward_only,
            collect_non_loss_data,
        )
        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
        self._timeline.start()
        with self.report.measure(forward_only, self._timeline) as measured:
            with self.explained(lambda: self._executor.current, "tp", "cp"):
                state = self._executor.run(call)
            measured.schedule_ended()
            if not forward_only:
                with self.explained(lambda: "gradient reduction", "stage"):
                    config.finalize_model_grads_func(
                        models,
                        state.num_tokens if config.calculate_per_token_loss else None,
                        force_all_reduce=force_all_reduce,
                    )
            reports = state.reports
            if self._is_last and not collect_non_loss_data:
                with self.explained(lambda: "loss reduction", "stage"):
                    reports = self._reduce_reports(reports)
                measured.add_losses(reports)
            if self._offload is not None:
                self.report.set_host(self._offload.pool.peak_bytes)
            if self._window is not None and not forward_only:
                self.report.set_window(self._window.use.as_json())
        if config.timers is not None:
            config.timers("forward-backward").stop()
        return reports

    @contextlib.contextmanager
    def explained(self, operation: Callable[[], str], *roles: str) -> Iterator[None]:
        """Add to a failed collective, which names an address at best, what ran and with whom.

        Args:
            operation: Called on failure; what was going on.
            roles: Groups that collectives inside go over, as far as there are such; none for all ranks.
        """
        try:
            yield
        except RuntimeError as error:
            if not any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ())):
                me = self.groups.rank
                groups = [group for group in map(self.groups.get, roles) if group is not None]
                ranks = {rank for group in groups for rank in dist.get_process_group_ranks(group)}
                peers = [f"rank {rank}" for rank in sorted(ranks - {me})]
                error.add_note(
                    f"{_NOTE}rank {me}: {operation()} failed; in collectives it works with "
                    f"{'all ranks' if not roles else ', '.join(peers) or 'nobody'}. "
                    "If one of them has stopped, its log says why"
                )
            raise

    def _reduce_reports(self, reports: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        """One entry for the whole last stage when its replicas have unequal work or TP, or share sequences.

        Megatron sums entries over the data-parallel group, which here is one TP class only.
        """
        where = self.placement.locate(self.groups.rank)
        if len(self.plan.stages[where.stage].replicas) == 1 and self.plan.context_parallel == 1:
            return reports
        summed = {}
        for name in reports[0]:
            total = torch.stack([entry[name].view(-1) for entry in reports]).sum(dim=0)
            if total.numel() == 1:  # a mean per microbatch instead of (sum, tokens)
                total /= self.plan.num_microbatches
            if where.tp_rank > 0:
                total.zero_()
            dist.all_reduce(total, group=self.groups["stage"])
            summed[name] = total
        return [summed]


def _optimizer_of(model_config: Any) -> Any:
    """Megatron's optimizer, known here only by the method that Megatron puts into the configuration."""
    return getattr(getattr(model_config, "grad_scale_func", None), "__self__", None)
