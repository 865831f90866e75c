"""A training session under a plan: it owns everything that depends on the plan.

``open`` creates groups, stage-local state, channels and executor from the plan; ``close`` destroys them
in the opposite order.  These objects have no other owner, so that a session can be replaced
by one for another plan.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_het import distributed
from megatron_het.device import Platform
from megatron_het.distributed.gradient_sums import (
    GradientFinalizer,
    count_once_in_params_norm,
    mark_duplicates,
    mark_sharded,
)
from megatron_het.families import family_for, family_of_config
from megatron_het.features import features_of, tied_copies
from megatron_het.lowering.programs import Choice, build, choose_transport, posted_for, program_of
from megatron_het.lowering.ranks import boundary_map, edges, lower
from megatron_het.plan import Placement, Plan, PlanError, plan_hash
from megatron_het.plan.run_config import HetConfig
from megatron_het.report import Measurement, RunReport, Timeline
from megatron_het.runtime.channels import Channels
from megatron_het.runtime.data import Reports, judged_at_the_end, of_whole_stage, passed_on
from megatron_het.runtime.executor import Executor, StallWatch, add_all_gradients, iterators_per_chunk
from megatron_het.runtime.feature import Call, Iteration, OpenContext, RuntimeFeature, open_features, optimizer_of

# A closed session leaves nothing in its process: no weights, no optimizer state, no connection.
#
# Models with DDP form a reference cycle through autograd's nodes, which Python's garbage collector cannot see: the
# model holds a parameter, the node of its gradient holds a hook, and the hook holds the model.  The cycle keeps alive
# the buffers, the optimizer (its shards are views of the parameters) and the process groups with their open
# connections: a rank of a failed session that still waits for this one would not notice that it has left.


def let_go(models: Iterable[torch.nn.Module]) -> None:
    """Break the reference cycles of models, wrapped by Megatron, that are no longer used."""
    from megatron.core.distributed import DistributedDataParallel

    for chunk in models:
        for module in list(chunk.modules()):
            if isinstance(module, DistributedDataParallel):
                # Modules with a cache of their own, such as rotary embeddings, outlive the model, with their hooks.
                for handle in getattr(module, "remove_forward_pre_hook_handles", {}).values():
                    handle.remove()
                # A node's hook can only be removed by its handle, and nothing keeps the handles: the object that the
                # hooks hold is emptied instead.
                vars(module).clear()
            elif (dispatcher := getattr(module, "token_dispatcher", None)) is not None:
                # Tensors of its last pass refer to earlier layers that are recomputed, and so to the model.
                vars(dispatcher).clear()


_NOTE = "het: "
_PENDING_SLICES = 4
_STALLED_SHARE = 0.8  # share of the timeout after which an operation counts as stalled and is reported


def check_programs(plan: Plan, args: Any) -> None:
    """Compare Megatron's parsed arguments with what the programs of a plan do; raises PlanError."""
    for feature, options in features_of(plan):
        feature.check_program(lambda: program_of(plan), options, args)


class HetSession:
    """Runs Megatron under a plan.

    Args:
        config: The ``--het-*`` configuration; must be active.
        rank: This process's rank, so that only its part of the programs is built; None if not known yet.
    """

    def __init__(self, config: HetConfig, platform: Platform, rank: int | None = None) -> None:
        assert config.plan is not None
        self.config = config
        self.plan = config.plan
        self.placement = Placement(config.plan)
        self._built_for = rank if rank is not None and 0 <= rank < config.plan.world_size else None
        self._programs = build(config.plan, self._built_for)
        self._platform = platform
        reports = bool(config.report_dir or config.trace_dir)
        self._timeline = Timeline(platform.is_cuda, device_events=reports, synchronises=reports)
        self._groups: distributed.PlanGroups | None = None
        self._channels: Channels | None = None
        self._features: tuple[RuntimeFeature, ...] = ()
        self._executor: Executor | None = None
        self._stalls: StallWatch | None = None
        self._finalizer: GradientFinalizer | None = None
        self._models: list[torch.nn.Module] = []
        self._marks_params_norm = config.plan.training.distributed_optimizer
        self._owed = 0  # sequences that evaluation has asked for and no program has run yet; less than a batch
        self.is_running = False
        """Whether the schedule runs, as opposed to Megatron's own code."""
        self.report: RunReport | None = None

    @property
    def groups(self) -> distributed.PlanGroups:
        """This rank's groups; the session must be open."""
        assert self._groups is not None, "the session is not open"
        return self._groups

    @property
    def tied_copies(self) -> bool:
        """Whether the first and the last stage hold a copy of the same weights."""
        return tied_copies(self.plan)

    def feature(self, name: str) -> Any:
        """The open feature with this name, None if the plan does not have it; for measurements."""
        return next((feature for feature in self._features if feature.name == name), None)

    def check(self, args: Any) -> None:
        """Compare Megatron's parsed arguments with what the programs do; raises PlanError."""
        check_programs(self.plan, args)

    # -- life --------------------------------------------------------------------------------

    def open(self, args: Any) -> None:
        """Create everything that depends on the plan.  Collective; ``torch.distributed`` is up."""
        if self._built_for not in (None, dist.get_rank()):  # a launcher may number ranks in another way
            self._programs = build(self.plan)
        self._groups = distributed.build_groups(
            self.placement,
            tied_embeddings=self.tied_copies,
            timeout_s=args.distributed_timeout_minutes * 60,
            use_gloo_groups=args.use_gloo_process_groups,
        )
        distributed.install_stage_state(self._groups)
        where = self.placement.locate(self.groups.rank)
        self._num_chunks = len(self.plan.stages[where.stage].layers)
        loss_stage, loss_chunk = self.placement.last
        self._has_loss = where.stage == loss_stage
        # The programs have been validated: none of them can have a cycle of transfers.
        choice = choose_transport(self.config.transport, dist.get_backend(), self._platform.has_nccl)
        context = self._open_context(args, choice)
        self._features = open_features(context)
        self._executor = Executor(
            context.lowered,
            context.channels,
            loss_chunk=loss_chunk if self._has_loss else None,
            num_chunks=self._num_chunks,
            tells_chunk=self.plan.most_chunks > 1,
            timeline=self._timeline,
            features=self._features,
            batches=context.batches,
        )
        limit_s = _STALLED_SHARE * context.timeout_s
        self._stalls = StallWatch(self._executor, [context.channels, *context.opened], limit_s, self.groups.rank)
        self._batches = context.batches
        self._finalizer = GradientFinalizer(self.groups, self.tied_copies, self.plan.loss_divisor)
        self.report = RunReport(
            self.config, self.placement, self.groups.rank, plan_hash(self.plan), choice, self._platform
        )

    def _open_context(self, args: Any, choice: Choice) -> OpenContext:
        """Open the channels and lower this rank's programs; returns the context in which features are opened."""
        rank = self.groups.rank
        where = self.placement.locate(rank)
        timeout_s = args.distributed_timeout_minutes * 60
        programs = self._programs
        slices = programs[False].shape.slices
        boundaries = boundary_map(self.placement)
        device = programs[False].shape.device(where.stage, where.replica)
        self._local_seq_length = boundaries.local_length(device, rank)
        self._channels = Channels.open(
            self.groups.pairs,
            "transfers",
            edges(list(programs.values()), boundaries),
            choice.transport,
            timeout_s,
            rank,
            pending_per_edge=_PENDING_SLICES if slices > 1 else None,
            # Validated: every rank's list is a projection of one global order.  With the context exchange that is true
            # only of the transfers in each direction; keys and values are waited for inside passes.
            one_order=not any(program.attention_units for program in programs.values()),
        )
        return OpenContext(
            config=self.config,
            placement=self.placement,
            rank=rank,
            args=args,
            groups=self.groups,
            transport=choice.transport,
            timeout_s=timeout_s,
            channels=self._channels,
            programs=programs,
            lowered={
                mode: lower(posted_for(choice.transport, program), boundaries, device, rank)
                for mode, program in programs.items()
            },
            boundaries=boundaries,
            platform=self._platform,
            timeline=self._timeline,
        )

    def finish_report(self) -> None:
        """Write the report, if one was asked for; the session must still be open."""
        if self.report is None:
            return
        if self._models:
            from megatron.core.utils import get_model_config

            self.report.add_state_memory(self._models, optimizer_of(get_model_config(self._models[0])))
        self.report.write()

    def materialise_parameters(self) -> None:
        """Apply pending updates and gather all parameters, until the next iteration starts."""
        for feature in self._features:
            feature.materialise()

    def before_loading(self, models: Sequence[torch.nn.Module], optimizer: Any) -> None:
        """Called before a checkpoint is loaded into Megatron's model and optimizer; see :class:`RuntimeFeature`."""
        for feature in self._features:
            feature.before_loading(models, optimizer)

    def settle(self) -> None:
        """Apply pending updates before a checkpoint is saved."""
        for feature in self._features:
            feature.settle()

    def copies(self, parameters: Sequence[torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
        """Copies in host memory of those parameters that are not gathered; see :class:`RuntimeFeature`."""
        return {tensor: copy for f in self._features for tensor, copy in f.copies(parameters).items()}

    def close(self) -> None:
        """Destroy everything that ``open`` created, in the opposite order."""
        if self._stalls is not None:
            self._stalls.close()
        self._executor = self._finalizer = self._stalls = None
        for feature in reversed(self._features):
            feature.close()
        let_go(self._models)
        self._models = []
        self._features = ()
        if self._channels is not None:
            self._channels.close()
        if self._groups is not None:
            distributed.remove_stage_state()
            self._groups.close()
        self._channels = self._groups = None

    # -- what Megatron gets --------------------------------------------------------------------

    def prepare_model_config(self, model_config: Any) -> None:
        """Connect this session to Megatron's model configuration through public hooks.

        Args:
            model_config: ``GPTModelConfig`` or ``HybridModelConfig`` with its transformer configuration.

        Raises:
            PlanError: The script makes a model of another class than the plan is for.
        """
        assert self._finalizer is not None
        family = family_of_config(model_config)
        if family is not family_for(self.plan):
            problem = f"the script trains a {family.model}, and the plan is for a {family_for(self.plan).model}"
            hint = "Start the script that trains the plan's model: pretrain_gpt.py or pretrain_hybrid.py"
            raise PlanError("model.pattern", self.plan.model.pattern, problem, hint)
        model_config.transformer.finalize_model_grads_func = self._finalizer
        if not (model_config.transformer.hidden_dropout or model_config.transformer.add_bias_linear):
            # A residual alone is added by one operator; the compiled one took the host 0.2 to 0.3 ms in a profile.
            model_config.transformer.bias_dropout_fusion = False
        positions = self.placement.positions(self.placement.locate(self.groups.rank).stage)
        model_config.pre_wrap_hooks.append(self._prepare_model)
        # Before wrapping, weights that Megatron does not place on a device are still on the CPU.
        model_config.post_wrap_hooks.append(self._finalizer.copy_initial_weights)
        model_config.post_wrap_hooks.append(self._remember)
        if family.needs_builder(self.plan.most_chunks):
            from megatron_het.runtime.building import know_positions

            model_config.builder = family.builder
            know_positions(model_config.transformer, positions)
        for feature in self._features:
            feature.prepare_config(model_config)

    def _remember(self, model: list[torch.nn.Module]) -> list[torch.nn.Module]:
        self._models += model  # chunks may come one by one
        return model

    def _prepare_model(self, model: list[torch.nn.Module]) -> list[torch.nn.Module]:
        from megatron.training import get_args

        from megatron_het.runtime.building import recompute_first_layers, recompute_up_projections

        where = self.placement.locate(self.groups.rank)
        if counts := self.placement.replica(where.stage, where.replica).recompute_layers:
            recompute_first_layers(model, counts)
        recompute_up_projections(model, get_args().overlap_grad_reduce)
        add_all_gradients(model)
        mark_sharded(model)
        for feature in self._features:
            feature.attach(model)
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
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        force_all_reduce: bool = False,
        **_unused: Any,
    ) -> list[Any]:
        """One iteration; the signature is that of Megatron's forward-backward functions."""
        from megatron.core.utils import get_model_config
        from megatron.training import get_args

        assert self.report is not None, "the session is not open"
        models = model if isinstance(model, list) else [model]
        config = get_model_config(models[0])
        rounds, training = 1, self.plan.training
        if forward_only:  # Megatron counts single sequences (``apply_plan``), and the program runs a whole batch
            rounds, self._owed = divmod(self._owed + num_microbatches, training.global_batch_size)
        as_planned = forward_only or num_microbatches * training.reading_unit == training.global_batch_size
        if not forward_only and self._marks_params_norm:
            self._marks_params_norm = False
            count_once_in_params_norm(models, self.groups)
        call = Call(
            forward_step_func=forward_step_func,
            data_iterators=iterators_per_chunk(data_iterator, self._num_chunks),
            models=models,
            config=config,
            num_microbatches=training.num_microbatches if as_planned else num_microbatches,
            length=self._local_seq_length,
            hidden_size=config.hidden_size,
            sequences=training.sequences,
            args=get_args(),
            dtype=config.pipeline_dtype or config.params_dtype,
            device=self._platform.device,
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            batches=self._batches,
        )
        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
        self._timeline.start()
        with self.report.measure(forward_only, self._timeline) as measured, judged_at_the_end(call.args):
            reports = [entry for _ in range(rounds) for entry in self._run(call, measured, force_all_reduce)]
        if config.timers is not None:
            config.timers("forward-backward").stop()
        return reports

    def _run(self, call: Call, measured: Measurement, force_all_reduce: bool) -> list[Any]:
        """Run the program, then sum gradients and losses over ranks; returns loss entries where Megatron wants them."""
        executor = self._executor
        assert executor is not None and self.report is not None
        roles = ("tp", *(role for feature in self._features for role in feature.roles))
        explained = self.explained(lambda: executor.current, *roles)
        with self._running(), self._divided(call.config), explained, distributed.sparing_groups_of_one():
            state = executor.run(call)
        measured.schedule_stop_s = time.perf_counter()  # gradient reduction follows
        if not call.forward_only:
            with self.explained(lambda: "gradient reduction", "stage"):
                self._finalize(call, state, force_all_reduce)
        reports = state.reports
        if not call.collect_non_loss_data:
            if self._has_loss:
                with self.explained(lambda: "loss reduction", "stage"):
                    reports = of_whole_stage(reports, self.placement, self.groups)
                measured.losses += reports
            with self.explained(lambda: "passing on the loss", "loss"):
                reports = self._passed_on(reports)
        if not call.forward_only:
            for feature in self._features:
                self.report.add_figures(feature.figures())
        return reports

    def _passed_on(self, reports: Reports) -> Reports:
        """Loss entries where Megatron logs them."""
        return passed_on(reports, self.placement, self.groups, self._platform.device)

    def _finalize(self, call: Call, state: Iteration, force_all_reduce: bool) -> None:
        num_tokens = state.num_tokens if call.config.calculate_per_token_loss else None
        call.config.finalize_model_grads_func(call.models, num_tokens, force_all_reduce=force_all_reduce)

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        self.is_running = True
        try:
            yield
        finally:
            self.is_running = False
            if self._executor is not None:
                self._executor.since_s = None

    @contextlib.contextmanager
    def _divided(self, config: Any) -> Iterator[None]:
        """Divide losses in Megatron's ``grad_scale_func``; keeps its ``__self__``, by which ``optimizer_of`` works."""
        original, divisor = config.grad_scale_func, self.plan.loss_divisor
        if divisor == 1 or original is None:
            yield
            return

        def scaled(loss: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = original(loss) / divisor
            return found

        vars(scaled)["__self__"] = getattr(original, "__self__", None)
        config.grad_scale_func = scaled
        try:
            yield
        finally:
            config.grad_scale_func = original

    @contextlib.contextmanager
    def explained(self, operation: Callable[[], str], *roles: str) -> Iterator[None]:
        """Add the operation and the peers to the error of a failed collective, which names an address at best.

        Args:
            operation: Called on failure; returns a description of the operation.
            roles: Groups of the collectives inside the block, those that exist; none for all ranks.
        """
        try:
            yield
        except RuntimeError as error:
            if not any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ())):
                me = self.groups.rank
                groups = [group for group in map(self.groups.get, roles) if group is not None]
                ranks = {rank for group in groups for rank in dist.get_process_group_ranks(group)}
                peers = "all ranks" if not roles else ", ".join(f"rank {rank}" for rank in sorted(ranks - {me}))
                note = f"{_NOTE}rank {me}: {operation()} failed"
                # Errors of communication only: not a rank's own error, as of memory, nor that of a rank without peers.
                if peers and (type(error) is RuntimeError or isinstance(error, dist.DistError)):
                    note += f"; in collectives it works with {peers}. If one of them has stopped, its log says why"
                error.add_note(note)
            raise
