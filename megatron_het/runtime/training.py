"""The life of a session around ``megatron.training.pretrain``."""

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_het.checkpoint.choice import ChecksumWriter, save_folders, tracked
from megatron_het.checkpoint.loading import NOTHING_TO_LOAD, LoadHook
from megatron_het.checkpoint.state_dict import StateDictHook, abandon_saves
from megatron_het.device import guard_forks
from megatron_het.megatron_patches import torch_checkpoints
from megatron_het.plan import Plan
from megatron_het.runtime.data import routed_provider
from megatron_het.runtime.session import HetSession

# How ranks end: finding the ranks that have stopped when a transfer or a collective fails, and leaving after success.
#
# A failed collective names an address at best, and mostly that of a neighbour which left because of its own
# neighbour.  So the first rank that fails calls the roll over the rendezvous store: a thread on every
# rank answers, whatever its rank waits for at that moment.  A rank that has died, was stopped or is cut off does not
# answer and is named on all ranks.
#
# A rank that leaves after its last iteration has flushed its logs, and no peer loses a connection.


Step = Callable[..., Any]
_CALLED, _ENDED = "called", "ended"
_POLL_S = 0.05
_WHOLE_RUN = timedelta(days=3650)
_UNEXPECTED = "Unexpected result"  # in the error of Megatron's rerun machine


class RollCall:
    """Answers for this rank, and calls the roll.

    Args:
        store: Of ``torch.distributed``; cloned, because one connection serves one wait at a time.
        answer_s: How long the caller waits for answers.
    """

    def __init__(self, store: Any, rank: int, world_size: int, answer_s: float = 2.0) -> None:
        self._store, self._ears = store.clone(), store.clone()
        self._rank, self._world_size, self._answer_s = rank, world_size, answer_s
        self._verdict: str | None = None
        self._thread = threading.Thread(target=self._answer, name="roll call", daemon=True)
        self._thread.start()

    def verdict(self, cause: str = "") -> str:
        """The first caller's cause, or the ranks that do not answer, as text; bounded by twice ``answer_s``.

        Call it after a failure.  Only the first caller asks; the others get its result.
        """
        deadline_s = time.monotonic() + 2 * self._answer_s
        try:
            if self._verdict is None and self._store.add("het/callers", 1) == 1:
                self._call(cause)
            while self._verdict is None and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
        except RuntimeError:
            if self._verdict is None:
                return (
                    "the store that ranks meet at, which is on rank 0 unless a launcher keeps it, does not answer: "
                    "rank 0 has probably stopped"
                )
        return self._verdict or "nobody could find out who has stopped"

    def close(self) -> None:
        """End the thread; the store may no longer exist by then.  Further calls do nothing."""
        if not self._thread.is_alive():
            return
        with contextlib.suppress(RuntimeError):
            self._store.set(self._key(self._rank), _ENDED)
        self._thread.join(timeout=self._answer_s)

    @staticmethod
    def _key(rank: int) -> str:
        return f"het/call/{rank}"

    def _call(self, verdict: str) -> None:
        deadline_s = time.monotonic() + self._answer_s
        others = set(range(self._world_size)) - {self._rank}
        for rank in sorted(others):
            self._store.set(self._key(rank), _CALLED)
        silent, is_over = set(others), bool(verdict)
        while silent and not is_over:
            is_over = time.monotonic() > deadline_s  # one more check after it, for answers that came meanwhile
            silent = {rank for rank in silent if not self._store.check([f"het/here/{rank}"])}
            time.sleep(_POLL_S)
        names = ", ".join(f"rank {rank}" for rank in sorted(silent))
        gone = f"{names} does not answer: it has stopped, hangs or is cut off; its log says more"
        alone = "all ranks answer, so one of them has failed by itself; its log says why"
        verdict = verdict or (gone if names else alone)
        self._store.set("het/verdict", verdict)
        self._verdict = verdict
        self._store.set(self._key(self._rank), _ENDED)
        # The store lives as long as rank 0: all ranks get the time to read the result.
        time.sleep(10 * _POLL_S)

    def _answer(self) -> None:
        """Wait for a call or the end, on the thread."""
        with contextlib.suppress(RuntimeError):  # the store has gone: so has rank 0, or the run is over
            self._ears.wait([self._key(self._rank)], _WHOLE_RUN)
            if self._ears.get(self._key(self._rank)).decode() == _CALLED:
                self._ears.set(f"het/here/{self._rank}", "here")
                self._ears.wait(["het/verdict"], timedelta(seconds=4 * self._answer_s))
                self._verdict = self._ears.get("het/verdict").decode()


def flush_logs() -> None:
    """Flush the queue of Megatron's TensorBoard writer.

    Its thread ends with the process.  Without a flush the events since its last write, up to two minutes ago, are
    lost.
    """
    module = sys.modules.get("megatron.training.global_vars")
    if (writer := getattr(module, "_GLOBAL_TENSORBOARD_WRITER", None)) is not None:
        writer.flush()


@contextlib.contextmanager
def leaving_together(over_gloo: bool) -> Iterator[None]:
    """Around a training without a plan over gloo: after success, destroy all groups before the ranks exit.

    Gloo's threads abort a process that still has a connection to a peer that has ended.  NCCL has no such threads,
    so there Megatron's own end is kept.  The wait for the other ranks ends with ``--distributed-timeout-minutes``.

    Args:
        over_gloo: Whether the groups of this process are gloo's.
    """
    try:
        yield
    except SystemExit as stop:
        if stop.code in (None, 0):  # a planned stop, e.g. --exit-interval
            _leave(over_gloo)
        raise
    _leave(over_gloo)


def _leave(over_gloo: bool) -> None:
    with contextlib.suppress(OSError):  # a full disk loses the log, not the training
        flush_logs()
    if over_gloo and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


# Hooks between two iterations of a session; elastic training implements them.


class Boundary:
    """Hooks that a run with a plan calls where the plan may change; this base class does nothing."""

    restores = False  # whether ``load`` is to be called where no checkpoint is to be loaded
    store: Any = None  # where the ranks meet; None for where ``torch.distributed`` finds it by itself
    # whether the process goes on after a session, however it ended; then it makes no roll call at a failure
    outlives_sessions = False
    plans: tuple[Plan, ...] = ()  # all plans of a job that alternates between plans

    def prepare(self, args: Any) -> None:
        """Called when Megatron's arguments are parsed and not validated yet."""

    def remember(self, provider: Step) -> Step:
        """Returns the datasets provider to call in place of the script's."""
        return provider

    def load(
        self, session: Any, args: Any, models: Sequence[torch.nn.Module], optimizer: Any, scheduler: Any
    ) -> tuple[int, float] | None:
        """Load a state into the model and the optimizer, which have just been built.

        Returns:
            Iterations done and floating-point operations so far, where a state was put into them; None for Megatron's
            own loading.
        """
        return None

    def failed(self, session: Any) -> None:
        """Called when the session ends with an error, while it is still open."""

    def saves(self) -> None:
        """Called before a checkpoint is written, at the end of an iteration."""

    def reached(self, session: Any, iteration: int) -> None:
        """Called before each iteration of training."""


def complete_model_config(model_config: Any, args: Any) -> None:
    """Set the fields of a ``GPTModelConfig`` that Megatron does not take from its arguments."""
    # gpt_config_from_args ignores the flag and leaves the field at 8.
    model_config.rope_scaling_factor = args.rope_scaling_factor
    # Delayed scaling in fp8 reduces the largest values after every pass.  TP ranks of a replica run the same passes;
    # replicas of a plan do not, and would wait for each other.
    model_config.transformer.tp_only_amax_red = True


def _unexpected_result(args: Any, error: BaseException) -> str:
    """Say what Megatron's rerun machine has ended all ranks for; empty for other errors.

    Without --save it is a TypeError, and with --rerun-mode disabled a RuntimeError on each rank that has the value.
    """
    from megatron.core import rerun_state_machine as rerun

    saved = f"The newest checkpoint in {args.save} is of before" if args.save else "Nothing is saved without --save"
    if args.save and tracked(Path(args.save)) is None:
        saved = f"{args.save} has no checkpoint yet"
    if isinstance(error, RuntimeError):
        return f"{error}. {saved}" if _UNEXPECTED in str(error) else ""
    codes = (rerun.EXIT_CODE_RESUME_TO_DISAMBIGUATE, rerun.EXIT_CODE_FAILED_ON_RESULT_VALIDATION)
    ends = rerun.get_rerun_state_machine().state is rerun.RerunState.WILL_RERUN_FROM_CHECKPOINT
    if getattr(error, "code", None) not in codes and not (ends and args.save is None):
        return ""
    return f"iteration {args.curr_iteration + 1} gave NaN or the like; lines with 'Unexpected result' say it. {saved}"


class PretrainHook:
    """Builds the replacements for the functions of Megatron that run under a session.

    Args:
        session: The session to open when training starts.
        boundary: What happens between iterations.
    """

    def __init__(self, session: HetSession, boundary: Boundary) -> None:
        self._session = session
        self._boundary = boundary
        self._checksums: ChecksumWriter | None = None
        self._roll_call: RollCall | None = None

    def wrap(self, original: Step) -> Step:
        """``pretrain`` with the plan's groups, schedule, data routing and report."""

        @functools.wraps(original)
        def pretrain(config: Any, provider: Step, *positional: Any, **keywords: Any) -> Any:
            guard_forks()
            args = _initialize_distributed(self._boundary.store or keywords.get("store"))
            if not self._boundary.outlives_sessions:
                store = dist.distributed_c10d._get_default_store()
                self._roll_call = RollCall(store, args.rank, args.world_size)
            try:
                return self._run(original, args, config, provider, *positional, **keywords)
            except BaseException as error:
                unexpected, code = "", 1
                if isinstance(error, KeyboardInterrupt):
                    unexpected, code = f"rank {args.rank} was interrupted", 130
                elif isinstance(error, RuntimeError):
                    unexpected = _unexpected_result(args, error)
                    if self._roll_call is not None:
                        said = self._roll_call.verdict(unexpected)
                        error.add_note(f"het: rank {args.rank}: {said}")
                        unexpected = unexpected or (said if _UNEXPECTED in said else "")
                    self._boundary.failed(self._session)
                if self._roll_call is not None:
                    # A process that ends while a thread waits in the store is aborted, whatever its exit code.
                    self._roll_call.close()
                if self._boundary.outlives_sessions:
                    # The process goes on: keep the measurements, and close all connections.
                    with contextlib.suppress(RuntimeError, OSError):
                        self._session.finish_report()
                    with contextlib.suppress(RuntimeError):
                        self._session.close()
                    raise
                abandon_saves(ends=True)
                if unexpected:
                    sys.stderr.write(f"megatron_het: {unexpected}\n")
                    raise SystemExit(code) from None
                raise

        return pretrain

    def _run(self, original: Step, args: Any, config: Any, provider: Step, *positional: Any, **keywords: Any) -> Any:
        """``pretrain`` once ``torch.distributed`` is up."""
        session = self._session
        # The tokenizer has padded the vocabulary.  With --vocab-file Megatron compares this flag with a checkpoint's.
        args.make_vocab_size_divisible_by = vars(args).pop("het_given_multiple", args.make_vocab_size_divisible_by)
        session.open(args)
        complete_model_config(config.model, args)
        if args.dsa_indexer_loss_coeff:
            sum_indexer_losses(args.num_layers, counts=session.placement.locate(args.rank).tp_rank == 0)
        session.prepare_model_config(config.model)
        provider = self._route_data(args, self._boundary.remember(provider))
        keywords["skip_model_parallel_init"] = True
        if self._boundary.restores and args.load is None and args.pretrained_checkpoint is None:
            args.load = NOTHING_TO_LOAD
        assert session.report is not None
        if args.rank == 0:
            print(session.report.opening(), flush=True)  # noqa: T201 - as Megatron does
        try:
            with session.explained(lambda: "a step outside of the schedule"):
                result = original(config, provider, *positional, **keywords)
        except (SystemExit, TypeError) as stop:
            code, unexpected = getattr(stop, "code", 1), _unexpected_result(args, stop)
            if unexpected or code in (None, 0):
                self._finish()  # a planned stop, e.g. --exit-interval
            if not unexpected:
                raise
            if args.rank == 0 or self._boundary.outlives_sessions:
                sys.stderr.write(f"megatron_het: {unexpected}\n")
            raise SystemExit(code) from None
        except (RuntimeError, CheckpointException) as error:
            _add_failed_write(error)
            raise
        self._finish()
        return result

    def _route_data(self, args: Any, provider: Step) -> Step:
        placement = self._session.placement
        where = placement.locate(args.rank)
        replica = placement.replica(where.stage, where.replica)
        loader_type, args.dataloader_type = args.dataloader_type, "external"
        return routed_provider(
            provider,
            replica.microbatches,
            self._session.plan.training.batches_of_microbatches,
            loader_type,
            lambda: self._session.is_running,
            self._session.plan.most_chunks - len(self._session.plan.stages[where.stage].layers),
        )

    def wrap_schedule_getter(self, original: Step) -> Step:
        """``get_forward_backward_func``: the session's executor."""

        @functools.wraps(original)
        def get_forward_backward_func(*_positional: Any, **_keywords: Any) -> Step:
            return self._step

        return get_forward_backward_func

    def wrap_generate_state_dict(self, original: Step) -> Step:
        """``generate_state_dict``; groups exist only once the session is open."""

        @functools.wraps(original)
        def generate_state_dict(*positional: Any, **keywords: Any) -> Any:
            session = self._session
            if not (keywords.get("optim_sd_kwargs") or {}).get("is_loading", False):
                session.settle()
                self._note_save(positional[0] if positional else keywords["args"], keywords.get("iteration"))
            hook = StateDictHook(session.groups, session.tied_copies, session.copies)
            return hook.wrap(original)(*positional, **keywords)

        return generate_state_dict

    def _step(self, *positional: Any, **keywords: Any) -> list[Any]:
        """One call of the forward-backward function."""
        if self._checksums is not None:
            self._checksums.poll()
        if not keywords.get("forward_only"):
            self._boundary.reached(self._session, _get_args().curr_iteration)
        return self._session.forward_backward(*positional, **keywords)

    def wrap_load(self, original: Callable[..., tuple[int, float]]) -> Callable[..., tuple[int, float]]:
        """``load_checkpoint``, replaced by the boundary's ``load`` where that has a state for the new model."""

        @functools.wraps(original)
        def load_checkpoint(*positional: Any, **keywords: Any) -> tuple[int, float]:
            restore = functools.partial(self._boundary.load, self._session, _get_args())
            hook = LoadHook(self._session.plan, restore, self._session.before_loading)
            return hook.wrap(original)(*positional, **keywords)

        return load_checkpoint

    def _note_save(self, args: Any, iteration: int | None) -> None:
        """Called before a checkpoint of an iteration is written."""
        if iteration is None:
            return
        self._boundary.saves()
        torch_checkpoints.guard_writes()
        torch_checkpoints.forget_failed_writes()
        if self._checksums is None:
            self._checksums = ChecksumWriter(dist.get_rank())
        self._checksums.begin(save_folders(args), iteration)

    def _finish(self) -> None:
        if self._checksums is not None:
            self._checksums.finish()
            self._checksums.poll()
            self._checksums.finish()
        if (report := self._session.report) is not None:
            self._session.finish_report()
            print(report.closing(), flush=True)  # noqa: T201 - one line per rank, as Megatron does
        # All ranks leave together, and with no group left: a process that ends while its peers still
        # use their connections to it can abort in the threads behind them.
        dist.barrier()
        if self._roll_call is not None:
            self._roll_call.close()
        dist.barrier()  # the store is on rank 0
        self._session.close()
        dist.destroy_process_group()


def single_iterations(original: Callable[..., bool]) -> Callable[..., bool]:
    """Megatron's ``training_log``, changed so that the second logged loss does not include the first iteration."""

    @functools.wraps(original)
    def training_log(
        loss_dict: Any, total_loss_dict: dict[str, Any], learning_rate: Any, iteration: int, *rest: Any, **keywords: Any
    ) -> bool:
        result = original(loss_dict, total_loss_dict, learning_rate, iteration, *rest, **keywords)
        if keywords.get("is_first_iteration") and iteration % _get_args().log_interval == 0:
            from megatron.training import get_timers

            total_loss_dict.clear()
            get_timers()("interval-time").elapsed(reset=True, barrier=False)
        return result

    return training_log


def sum_indexer_losses(layers: int, *, counts: bool) -> None:
    """Make the logged loss of sparse attention's indexers equal to that of a single process.

    Megatron sums it over a pipeline group, which a plan does not have, and takes the mean of replicas.

    Args:
        counts: Whether this rank's record counts; False where another rank of its TP group records the same.
    """
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper as Log

    def reduce_loss_in_tracker() -> None:
        values = Log.tracker.setdefault("values", torch.zeros(layers, device="cuda"))
        values.mul_(counts)
        dist.all_reduce(values)

    Log.reduce_loss_in_tracker = staticmethod(reduce_loss_in_tracker)


def _initialize_distributed(store: Any) -> Any:
    """Start ``torch.distributed`` as Megatron does it, leaving model-parallel groups to the plan."""
    from megatron.training import initialize

    initialize._initialize_distributed(None, None, store, skip_model_parallel_init=True)
    return _get_args()


def _get_args() -> Any:
    from megatron.training import get_args

    return get_args()


def _add_failed_write(error: BaseException) -> None:
    """Add the failed write to the error of a checkpoint; upstream only says that something failed."""
    elsewhere = "what wrote it, on this rank or another, says why" if isinstance(error, CheckpointException) else ""
    if failed := torch_checkpoints.failed_write() or elsewhere:
        error.add_note(f"het: the checkpoint is not complete: {failed}. Free space there, or give another --save")
