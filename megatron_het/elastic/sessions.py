"""Sessions one after the other in one process: enter Megatron's training under a plan, leave it, enter it again.

At a boundary of iterations all ranks leave together; the next session takes over the state of an earlier generation.
"""

import contextlib
import functools
import gc
import operator
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_het.arguments.megatron_args import environment_of
from megatron_het.checkpoint.choice import tracked
from megatron_het.checkpoint.state_dict import abandon_saves, finish_saves, is_saving
from megatron_het.elastic.copies import Copies
from megatron_het.elastic.job import Generation
from megatron_het.elastic.links import Links, abort, communicators
from megatron_het.elastic.state import Restored, Snapshot, Trainee, restore, take
from megatron_het.features.watch.runtime import RankWatch
from megatron_het.megatron_patches import torch_checkpoints
from megatron_het.plan import Plan
from megatron_het.plan.run_config import without_flags
from megatron_het.runtime.training import Boundary, flush_logs
from megatron_het.safe_io import write_json
from megatron_het.store import Documents
from megatron_het.store.job import job_store, use_store
from megatron_het.store.torch_store import TorchStore

# Datasets outlive sessions, so that their indexes are not built again when a plan changes.

Kept = dict[tuple[tuple[int | None, ...], bool, bool], Any]
"""Datasets of a provider, by the numbers of samples, whether this rank reads them, and whether they have masks."""


def remembered(provider: Callable[..., Any], kept: Kept) -> Callable[..., Any]:
    """A datasets provider that reuses the datasets of an earlier session if every rank has them.

    Building is collective, so either all ranks build or none does.

    Args:
        provider: The script's provider.
        kept: The datasets of this process; new ones are added.
    """

    @functools.wraps(provider)
    def provide(num_samples: Sequence[int | None], **keywords: Any) -> Any:
        from megatron.core import mpu
        from megatron.training import get_args
        from megatron.training.utils import is_first_or_last_pipeline_stage

        reads = mpu.get_tensor_model_parallel_rank() == 0 and is_first_or_last_pipeline_stage(keywords.get("vp_stage"))
        key = tuple(num_samples), bool(reads), bool(get_args().create_attention_mask_in_dataloader)
        everybody_has = torch.tensor([int(key in kept)], device="cuda")
        dist.all_reduce(everybody_has, op=dist.ReduceOp.MIN)
        if not everybody_has.item():
            kept[key] = provider(num_samples, **keywords)
        return kept[key]

    return provide


LeavesAt = Callable[[int], bool]


class Leave(BaseException):
    """Ends ``pretrain`` at an iteration boundary, with this rank's state; not an ``Exception``: it is no error."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__(f"leaves after iteration {snapshot.iteration}")
        self.snapshot = snapshot


@dataclass(eq=False)
class ElasticBoundary(Boundary):
    """The boundary of one generation in one process."""

    generation: Generation
    process: int
    job_store: Documents  # store at which all processes of the job meet
    timeout_s: float  # bound on every wait of the change, in seconds
    copies: Copies  # in-memory copies of earlier generations and of this one
    leaves_at: LeavesAt  # whether all ranks leave at a boundary; equal on all ranks
    padded_vocab_size: int | None  # vocabulary size of the first generation; None in the first
    datasets: Kept  # datasets of earlier sessions of this process

    restores = True
    outlives_sessions = True

    def __post_init__(self) -> None:
        use_store(self.job_store.under(str(self.generation.number)))
        self.store = meeting_of(self.generation, "world", self.job_store, self.timeout_s)
        self.trainee: Trainee | None = None
        self.restored: Restored | None = None
        self.iteration: int | None = None
        """Number of iterations that are done."""
        self.began: int | None = None
        """Number of iterations that were done when training began under this plan; None before that."""
        self.saving: int | None = None
        """Iteration whose checkpoint is being written; None if there is none."""
        self._save_every: int | None = None
        self._saved_in: str | None = None
        self.times: dict[str, float] = {}
        """Wall-clock times of the phases of a change."""
        self.leaving: Callable[[], None] = lambda: None
        """Called when this rank's state is taken, just before it leaves."""
        self.has_aborted: Callable[[], bool] = lambda: False
        """Returns whether communicators of this generation were aborted, so that results of the device may be wrong."""
        self.drift: dict[str, Any] | None = None
        """The watch's measurements, on the rank that compares, once after a drift was found."""

    def prepare(self, args: Any) -> None:
        """Fix the padded vocabulary for all generations: padding depends on TP, and padded rows affect the loss."""
        if self.padded_vocab_size is not None and args.padded_vocab_size is None:
            args.padded_vocab_size = self.padded_vocab_size
        self._save_every, self._saved_in = args.save_interval, args.save
        last = args.train_iters or (args.train_samples or 0) // (args.global_batch_size or 1)
        if last in self.generation.unsaved:
            args.save = None

    def remember(self, provider: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a provider that reuses datasets (:func:`remembered`)."""
        return remembered(provider, self.datasets)

    def load(self, session: Any, args: Any, models: Any, optimizer: Any, scheduler: Any) -> tuple[int, float] | None:
        """Load the state of the earlier generation, if there is one."""
        self.times["built"] = time.time()
        self.padded_vocab_size = args.padded_vocab_size
        rank = self.generation.ranks.index(self.process)
        self.trainee = Trainee(self.generation.plan, rank, models, optimizer, scheduler, args)
        links = None
        if self.generation.loads:
            session.materialise_parameters()
            links = open_links(self.generation, self.process, self.job_store, self.timeout_s)
            try:
                self.restored = restore(links, self.copies.snapshots, self.trainee)
            except BaseException:
                links.close()
                raise
        self.times["loaded"] = time.time()
        self._open_copies(rank, links)
        if self.restored is not None:
            self.copies.restored(self.restored.iteration)
            return self.restored.iteration, self.restored.flops
        if self.generation.loads:
            _load_newest_checkpoint(args, [self._saved_in or "", self.generation.fallback])
        return None

    def saves(self) -> None:
        """Mark errors from here to the next boundary as failures of this checkpoint."""
        self.saving = (self.iteration or 0) + 1

    def reached(self, session: Any, iteration: int) -> None:
        """Raise :class:`Leave` if all ranks leave at this boundary; otherwise copy the state if a copy is due."""
        self.check()
        if not is_saving():
            self.saving = None
        if self.began is None:
            self.began = iteration
        else:
            self.times.setdefault("first_step", time.time())
        self.iteration = iteration
        watch = session.feature("watch")
        self.drift = watch.news() if isinstance(watch, RankWatch) else None
        if self.leaves_at(iteration):
            session.materialise_parameters()
            assert self.trainee is not None
            self.copies.wait()
            finish_saves()
            snapshot = take(self.trainee, iteration)
            self.check()
            self.leaving()
            raise Leave(snapshot)
        assert self.trainee is not None
        self._choose_folder(self.trainee.args, iteration + 1)
        self.copies.keep(session, self.trainee, iteration, self.check)

    def check(self) -> None:
        """Raises RuntimeError if communicators were aborted: they leave wrong values without an error."""
        if self.has_aborted():
            raise RuntimeError("a process of this generation is lost")

    def failed(self, session: Any) -> None:
        """End waits on the device, and drop the report of the iteration that was not completed."""
        abort(communicators())
        if session.report is not None and self.has_aborted():
            session.report.forget_after(self.iteration or 0)

    def _choose_folder(self, args: Any, iteration: int) -> None:
        """Set the folder for the checkpoint of an iteration, if one is written."""
        if self.generation.unsaved:
            args.save_interval = None if iteration in self.generation.unsaved else self._save_every
        if self.generation.elsewhere and args.save is not None:
            args.save = self.generation.fallback if iteration in self.generation.elsewhere else self._saved_in

    @property
    def iterations_left(self) -> int:
        """Returns the number of remaining iterations of the training."""
        assert self.trainee is not None
        args, done = self.trainee.args, self.iteration or 0
        if args.train_iters:
            return int(args.train_iters) - done
        return max(0, (args.train_samples or 0) - args.consumed_train_samples) // max(1, args.global_batch_size)

    def closed(self) -> None:
        """Close the copies and links after the session, however it ended."""
        self.copies.close()
        self.trainee = None

    def _open_copies(self, rank: int, links: Links | None) -> None:
        """Open the copies; they reuse the connections of the change if all its members are ranks, to save time."""
        every, size = self.copies.pace.every, len(self.generation.ranks)
        if links is not None and not (every and links.size == size):
            links.close()
            links = None
        if every:
            if links is None:
                meeting = meeting_of(self.generation, "copies", self.job_store, self.timeout_s)
                links = Links(meeting, rank, size, self.timeout_s)
            self.copies.open(self.generation, rank, links)


def open_links(generation: Generation, process: int, store: Documents, timeout_s: float) -> Links:
    """Opens the connections over which the state of a generation moves.  Collective over its movers."""
    movers = generation.movers
    return Links(meeting_of(generation, "movers", store, timeout_s), movers.index(process), len(movers), timeout_s)


def meeting_of(generation: Generation, what_for: str, store: Documents, timeout_s: float) -> TorchStore:
    """The part of the job's store at which processes of a generation meet for a purpose."""
    return TorchStore(store, timeout_s, name=f"{generation.number}/{what_for}", lost=generation.lost_key)


def _load_newest_checkpoint(args: Any, folders: Sequence[str]) -> None:
    """Without a complete state in memory: load the job's newest checkpoint, else start by Megatron's flags."""
    from megatron.training import checkpointing

    def saved(folder: str) -> int:
        iteration = tracked(Path(folder))
        return iteration if isinstance(iteration, int) else -1

    found = [folder for folder in folders if folder and checkpointing.checkpoint_exists(folder)]
    if found:
        args.load = max(found, key=saved)
        args.finetune, args.no_load_optim, args.no_load_rng = False, False, False
        args.ckpt_step = None


_CACHING = "megatron.core.models.common.embeddings."
"""Modules of Megatron with classes whose methods have caches; the caches hold references to the objects."""


@dataclass(frozen=True)
class Outcome:
    """How a session ended."""

    # ``finished`` (the training is over), ``left`` (at a boundary, as agreed) or ``failed`` (by the loss of a peer or
    # another error)
    how: str
    snapshot: Snapshot | None = None  # this rank's state if it left
    error: str = ""  # text of the error
    unsaved: int | None = None  # iteration whose checkpoint this rank failed to write, if that was the error
    is_refused: bool = False  # whether the training's flags were refused under the plan


def run_session(
    boundary: ElasticBoundary, flags: Sequence[str], folder: Path, entry: Callable[[ElasticBoundary], None]
) -> Outcome:
    """Train under the plan of a generation until it ends, leaves or fails.

    Args:
        flags: Command line of the training, without a plan.
        folder: Folder in which this process may write the plan.
        entry: Runs the training, with the flags in ``sys.argv``.

    Returns:
        The outcome; nothing of the session is left in the process then.

    Raises:
        SystemExit: The flags are wrong, and no earlier plan was accepted with them.
    """
    generation = boundary.generation
    plan = _written(generation, folder)
    rank = generation.ranks.index(boundary.process)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(len(generation.ranks)))
    sys.argv = [
        "megatron_het.elastic",
        *with_own_folders(flags, f"generation-{generation.number}"),
        "--het-plan",
        str(plan),
    ]
    try:
        entry(boundary)
    except Leave as leave:
        traceback.clear_frames(leave.__traceback__)
        return Outcome("left", leave.snapshot)
    except SystemExit as stop:
        if stop.code not in (None, 0):
            if not generation.loads or boundary.began is not None:
                raise
            # The flags worked with an earlier plan: its state stays in this process, and the job can return to it.
            return Outcome("failed", error="the plan is refused; the worker's log says why", is_refused=True)
    except RuntimeError as error:  # torch.distributed raises it when a peer is lost
        return Outcome("failed", error=_error_text(error))
    except (OSError, CheckpointException) as error:
        if boundary.saving is None:  # a failure of this node: the others go on without it
            raise
        # A full disk: training goes on without this checkpoint.
        return Outcome("failed", error=_error_text(error), unsaved=boundary.saving)
    finally:
        boundary.closed()
        end_session()
    return Outcome("finished")


def _written(generation: Generation, folder: Path) -> Path:
    """Writes the plan's file, in another folder if the disk is full; files of earlier generations are deleted."""
    failures = []
    for place in (folder, Path(tempfile.gettempdir()), Path("/dev/shm")):
        name = f"plan-{generation.number}.json" if place == folder else f"het-{os.getpid()}.json"
        try:
            # Only this generation reads the file, and it checks the plan: no wait for the disk, and no check here.
            write_json(place / name, generation.plan.to_json(), durable=False)
            for older in folder.glob("plan-[0-9]*.json"):
                if older != place / name:
                    older.unlink(missing_ok=True)
            return place / name
        except (OSError, ValueError) as error:
            failures.append(str(error))
    raise OSError("; ".join(failures))


def _error_text(error: BaseException) -> str:
    """The text of an error in one line; the references of the error to objects are released."""
    causes = [failure[0] for failure in getattr(error, "failures", {}).values()]
    text = "".join(traceback.format_exception_only(causes[0] if causes else error))
    for one in (error, *causes):
        traceback.clear_frames(one.__traceback__)
    return " ".join((torch_checkpoints.failed_write() or text).split())


def with_own_folders(flags: Sequence[str], name: str) -> list[str]:
    """A training's flags with a folder per plan for reports and traces, because rank numbers change their meaning."""
    found = list(flags)
    for i, word in enumerate(found):
        flag, equals, value = word.partition("=")
        if flag not in ("--het-report", "--het-trace"):
            continue
        if equals:
            found[i] = f"{flag}={Path(value) / name}"
        elif i + 1 < len(found):
            found[i + 1] = str(Path(found[i + 1]) / name)
    return found


def end_session() -> None:
    """Remove a closed session's globals from the process; connections are closed, so that other ranks notice."""
    from megatron_het import megatron_patches as upstream

    with contextlib.suppress(OSError):
        flush_logs()  # the next session has a writer of its own
    abandon_saves()
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
        if dist.is_initialized():  # a communicator may have failed
            with contextlib.suppress(RuntimeError):
                dist.distributed_c10d._abort_process_group()
    # Groups are numbered, and all members must use the same number.  A world that was not completed, because a
    # member died meanwhile, has used a number; processes that joined later have not.
    if not dist.is_initialized():
        dist.distributed_c10d._world.group_count = 0
    if "megatron.training.training" in sys.modules:
        sys.modules["megatron.training.training"].destroy_global_state()
    upstream.uninstall()
    _clear_method_caches()
    # Transformer Engine scales, and reduces over groups, for all layers that the process has ever had.
    for name, forget in (("fp8", "FP8GlobalStateManager.reset"), ("module.base", "destroy_ub")):
        if (engine := sys.modules.get(f"transformer_engine.pytorch.{name}")) is not None:
            operator.attrgetter(forget)(engine)()
    gc.collect()
    if torch.cuda.is_initialized():  # NCCL allocates beside torch, and the next plan needs host memory of other sizes
        torch.cuda.empty_cache()
        getattr(torch.accelerator, "empty_host_cache", lambda: None)()


def _clear_method_caches() -> None:
    """Clear method caches of Megatron, such as of rotary embeddings, which keep modules with their groups alive."""
    for name, module in list(sys.modules.items()):
        if not name.startswith(_CACHING):
            continue
        for kind in vars(module).values():
            for method in vars(kind).values() if isinstance(kind, type) else ():
                if hasattr(method, "cache_clear"):
                    method.cache_clear()


# Alternating plans in one job, one for each global batch size of ``--step-batch-size-schedule``, because a plan routes
# a fixed number of microbatches.  When the batch size changes, all ranks leave the training with their state in host
# memory and enter it again under the next plan, as an elastic job's workers do.  No process ends.

_TIMEOUT_S = 600.0  # bound on every wait of a change; ranks build models and datasets between waits
_FLAG = "--het-plan"

Enter = Callable[[list[str], Boundary], None]  # runs the training with a command line


class TurnBoundary(ElasticBoundary):
    """The boundary of one turn of one rank.

    Args:
        turn: Number of the turn, from 0.
        store: Store at which all ranks meet, in all turns.
        copies: Holds this rank's state at the end of the turn before.
        padded_vocab_size: Vocabulary size of the first turn; None in the first.
    """

    outlives_sessions = False

    def __init__(
        self,
        turn: int,
        plan: Plan,
        plans: tuple[Plan, ...],
        rank: int,
        store: Documents,
        copies: Copies,
        padded_vocab_size: int | None,
        datasets: Kept,
    ) -> None:
        everybody = tuple(range(plan.world_size))
        generation = Generation(turn, plan, everybody, everybody, loads=turn > 0)
        super().__init__(generation, rank, store, _TIMEOUT_S, copies, self._is_over, padded_vocab_size, datasets)
        self.store = TorchStore(store, _TIMEOUT_S, name=f"turn-{turn}")
        self.plans = plans
        self.listened: Any = None  # the signal handler of the turn before (``--exit-signal-handler``)
        self.began_s: float | None = None  # start time of the job; the script that runs again has that of the turn

    def load(self, session: Any, args: Any, models: Any, optimizer: Any, scheduler: Any) -> tuple[int, float] | None:
        """Load the state of the turn before, including its batch size."""
        found = super().load(session, args, models, optimizer, scheduler)
        if found is not None:
            from megatron.core.num_microbatches_calculator import update_num_microbatches
            from megatron.training import training
            from megatron.training.global_vars import get_signal_handler

            training._TRAIN_START_TIME = self.began_s  # for ``--exit-duration-in-mins``
            if getattr(self.listened, "_signal_received", False):  # a signal since the last iteration
                get_signal_handler()._signal_received = True
            update_num_microbatches(args.consumed_train_samples, consistency_check=False)
            self.copies = Copies(0)  # the state in host memory is no longer needed
        return found

    def _is_over(self, _iteration: int) -> bool:
        """Whether Megatron's batch size now belongs to another plan."""
        self.outlives_sessions = batch_size() != self.generation.plan.training.global_batch_size
        return self.outlives_sessions


def batch_size() -> int:
    """Number of sequences in the next iteration, from Megatron's batch-size schedule."""
    from megatron.core.num_microbatches_calculator import get_current_global_batch_size

    return int(get_current_global_batch_size())


def take_turns(argv: Sequence[str], plans: Sequence[Plan], files: Sequence[str], enter: Enter) -> NoReturn:
    """Train under one plan after the other, in this process.

    Args:
        argv: The command line, with the program's name first.
        plans: One for each global batch size.
        enter: Runs the training under one plan.

    Raises:
        SystemExit: The training is over.
    """
    for plan in plans:
        for name, value in environment_of(plan).items():
            os.environ.setdefault(name, value)  # before anything asks for a device
    rank, words = int(os.environ["RANK"]), without_flags(argv[1:], _FLAG, several=True)
    store = job_store(rank, _TIMEOUT_S)
    by_size = {plan.training.global_batch_size: i for i, plan in enumerate(plans)}
    datasets: Kept = {}
    copies, vocabulary, which, turn, listened, began_s = Copies(0), None, 0, 0, None, None
    while True:
        boundary = TurnBoundary(
            turn=turn,
            plan=plans[which],
            plans=tuple(plans),
            rank=rank,
            store=store,
            copies=copies,
            padded_vocab_size=vocabulary,
            datasets=datasets,
        )
        boundary.listened, boundary.began_s, copies = listened, began_s, Copies(0)
        try:
            enter([argv[0], *with_own_folders(words, f"plan-{which}"), _FLAG, files[which]], boundary)
        except Leave as leave:
            traceback.clear_frames(leave.__traceback__)
            copies.add(leave.snapshot)
        else:
            raise SystemExit(0)
        which, turn, vocabulary = by_size[batch_size()], turn + 1, boundary.padded_vocab_size
        boundary.closed()
        listened = sys.modules["megatron.training.global_vars"]._GLOBAL_SIGNAL_HANDLER
        began_s = sys.modules["megatron.training.training"]._TRAIN_START_TIME
        end_session()
