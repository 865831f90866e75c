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

# Datasets outlive sessions: their indexes are not built again when a plan changes.

Kept = dict[tuple[tuple[int | None, ...], bool, bool], Any]
"""What a provider returned, by the numbers of samples, whether this rank read them, and whether with masks."""


def remembered(provider: Callable[..., Any], kept: Kept) -> Callable[..., Any]:
    """A datasets provider that builds nothing where every rank has its datasets from an earlier session.

    Building is collective, so either all ranks build or none does.

    Args:
        provider: The script's.
        kept: Of this process; filled.
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
    """Ends ``pretrain`` at an iteration boundary, with this rank's state; no error, hence no ``Exception``."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__(f"leaves after iteration {snapshot.iteration}")
        self.snapshot = snapshot


@dataclass(eq=False)
class ElasticBoundary(Boundary):
    """The boundary of one generation in one process."""

    generation: Generation
    process: int
    job_store: Documents  # where everybody meets; its keys are those of the job
    timeout_s: float  # bound on every wait of the change, in seconds
    copies: Copies  # what this process holds of earlier generations and is to hold of this one
    leaves_at: LeavesAt  # whether all ranks leave at a boundary; the same answer on all ranks
    padded_vocab_size: int | None  # of the first generation; None in it
    datasets: Kept  # of earlier sessions of this process

    restores = True
    outlives_sessions = True

    def __post_init__(self) -> None:
        use_store(self.job_store.under(str(self.generation.number)))
        self.store = meeting_of(self.generation, "world", self.job_store, self.timeout_s)
        self.trainee: Trainee | None = None
        self.restored: Restored | None = None
        self.iteration: int | None = None
        """Iterations that are done, as far as this session knows."""
        self.began: int | None = None
        """Iterations that were done when training began under this plan; None before that."""
        self.saving: int | None = None
        """Iteration whose checkpoint is being written; None where none is."""
        self._save_every: int | None = None
        self._saved_in: str | None = None
        self.times: dict[str, float] = {}
        """Wall-clock times of what a change waits for."""
        self.leaving: Callable[[], None] = lambda: None
        """Called once this rank's state is taken and it is about to leave."""
        self.has_aborted: Callable[[], bool] = lambda: False
        """Whether communicators of this generation were aborted, so that results of the device may be wrong."""
        self.drift: dict[str, Any] | None = None
        """What the watch has measured, on the rank that compares, once after something has begun to drift."""

    def prepare(self, args: Any) -> None:
        """All generations have one vocabulary: its padding depends on TP, and padded rows take part in the loss."""
        if self.padded_vocab_size is not None and args.padded_vocab_size is None:
            args.padded_vocab_size = self.padded_vocab_size
        self._save_every, self._saved_in = args.save_interval, args.save
        last = args.train_iters or (args.train_samples or 0) // (args.global_batch_size or 1)
        if last in self.generation.unsaved:
            args.save = None

    def remember(self, provider: Callable[..., Any]) -> Callable[..., Any]:
        """Datasets stay."""
        return remembered(provider, self.datasets)

    def load(self, session: Any, args: Any, models: Any, optimizer: Any, scheduler: Any) -> tuple[int, float] | None:
        """Take over the state, if there is one."""
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
        """Notes that what fails from here to the next boundary is this checkpoint."""
        self.saving = (self.iteration or 0) + 1

    def reached(self, session: Any, iteration: int) -> None:
        """Leave, if it is time."""
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
        """Raises RuntimeError where a process is lost: an aborted communicator gives wrong values without an error."""
        if self.has_aborted():
            raise RuntimeError("a process of this generation is lost")

    def failed(self, session: Any) -> None:
        """Nothing waits on the device any more, and an iteration that was not ended is not reported."""
        abort(communicators())
        if session.report is not None and self.has_aborted():
            session.report.forget_after(self.iteration or 0)

    def _choose_folder(self, args: Any, iteration: int) -> None:
        """Where the checkpoint of an iteration goes, if it is one."""
        if self.generation.unsaved:
            args.save_interval = None if iteration in self.generation.unsaved else self._save_every
        if self.generation.elsewhere and args.save is not None:
            args.save = self.generation.fallback if iteration in self.generation.elsewhere else self._saved_in

    @property
    def iterations_left(self) -> int:
        """Returns the iterations of the training that are left."""
        assert self.trainee is not None
        args, done = self.trainee.args, self.iteration or 0
        if args.train_iters:
            return int(args.train_iters) - done
        return max(0, (args.train_samples or 0) - args.consumed_train_samples) // max(1, args.global_batch_size)

    def closed(self) -> None:
        """The session is over, however it ended."""
        self.copies.close()
        self.trainee = None

    def _open_copies(self, rank: int, links: Links | None) -> None:
        """Over the connections of the change where all members are ranks; others would cost time once more."""
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
    """The connections over which the state of a generation moves.  Collective over its movers."""
    movers = generation.movers
    return Links(meeting_of(generation, "movers", store, timeout_s), movers.index(process), len(movers), timeout_s)


def meeting_of(generation: Generation, what_for: str, store: Documents, timeout_s: float) -> TorchStore:
    """Where the processes of a generation meet, in the job's store."""
    return TorchStore(store, timeout_s, name=f"{generation.number}/{what_for}", lost=generation.lost_key)


def _load_newest_checkpoint(args: Any, folders: Sequence[str]) -> None:
    """Nobody holds a complete state: go on from what this job has saved, else as the flags say."""
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
"""Modules of Megatron whose classes have methods with caches, which hold the object whose method it is."""


@dataclass(frozen=True)
class Outcome:
    """How a session ended."""

    # ``finished`` (the training is over), ``left`` (at a boundary, as agreed) or ``failed`` (something that it needed
    # broke)
    how: str
    snapshot: Snapshot | None = None  # this rank's state where it left
    error: str = ""  # what failed
    unsaved: int | None = None  # iteration whose checkpoint this rank could not write, where that is what failed
    is_refused: bool = False  # whether the training's flags do not go with the plan


def run_session(
    boundary: ElasticBoundary, flags: Sequence[str], folder: Path, entry: Callable[[ElasticBoundary], None]
) -> Outcome:
    """Train under the plan of a generation until it ends, leaves or fails.

    Args:
        flags: Command line of the training, without a plan.
        folder: Where this process may write the plan.
        entry: Runs the training, with the flags in ``sys.argv``.

    Returns:
        How it ended; nothing of the session is left in the process then.

    Raises:
        SystemExit: The flags are wrong, and there is no earlier plan with which they were right.
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
            # The plan before this one went well: its state stays here, and the others can go back to it.
            return Outcome("failed", error="the plan is refused; the worker's log says why", is_refused=True)
    except RuntimeError as error:  # what torch.distributed raises when a peer has gone
        return Outcome("failed", error=_error_text(error))
    except (OSError, CheckpointException) as error:
        if boundary.saving is None:  # this node's own trouble: the others go on without it
            raise
        # A full disk: training goes on without this checkpoint.
        return Outcome("failed", error=_error_text(error), unsaved=boundary.saving)
    finally:
        boundary.closed()
        end_session()
    return Outcome("finished")


def _written(generation: Generation, folder: Path) -> Path:
    """File with the plan, in another folder where the disk is full; those of earlier generations go."""
    failures = []
    for place in (folder, Path(tempfile.gettempdir()), Path("/dev/shm")):
        name = f"plan-{generation.number}.json" if place == folder else f"het-{os.getpid()}.json"
        try:
            # For this generation only, which checks it: a change waits neither for the disk nor for another check.
            write_json(place / name, generation.plan.to_json(), durable=False)
            for older in folder.glob("plan-[0-9]*.json"):
                if older != place / name:
                    older.unlink(missing_ok=True)
            return place / name
        except (OSError, ValueError) as error:
            failures.append(str(error))
    raise OSError("; ".join(failures))


def _error_text(error: BaseException) -> str:
    """An error in words; what it refers to is let go."""
    causes = [failure[0] for failure in getattr(error, "failures", {}).values()]
    text = "".join(traceback.format_exception_only(causes[0] if causes else error)).strip()
    for one in (error, *causes):
        traceback.clear_frames(one.__traceback__)
    return torch_checkpoints.failed_write() or text


def with_own_folders(flags: Sequence[str], name: str) -> list[str]:
    """A training's flags with reports and traces of every plan in an own folder: ranks change their meaning."""
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
    """Take out of the process what a closed session leaves in it; all connections are closed, so that others notice."""
    from megatron_het import megatron_patches as upstream

    with contextlib.suppress(OSError):
        flush_logs()  # the next session has a writer of its own
    abandon_saves()
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
        if dist.is_initialized():  # a communicator that has failed is in the way
            with contextlib.suppress(RuntimeError):
                dist.distributed_c10d._abort_process_group()
    # Groups are numbered, and members of one must have the same number.  A world that could not be made, because a
    # member died meanwhile, has used one up; processes that came later have not.
    if not dist.is_initialized():
        dist.distributed_c10d._world.group_count = 0
    if "megatron.training.training" in sys.modules:
        sys.modules["megatron.training.training"].destroy_global_state()
    upstream.uninstall()
    _clear_method_caches()
    # Transformer Engine scales, and reduces over groups, for all layers of the process that it has ever seen.
    for name, forget in (("fp8", "FP8GlobalStateManager.reset"), ("module.base", "destroy_ub")):
        if (engine := sys.modules.get(f"transformer_engine.pytorch.{name}")) is not None:
            operator.attrgetter(forget)(engine)()
    gc.collect()
    if torch.cuda.is_initialized():  # NCCL allocates beside torch, and the next plan needs host memory of other sizes
        torch.cuda.empty_cache()
        getattr(torch.accelerator, "empty_host_cache", lambda: None)()


def _clear_method_caches() -> None:
    """Let go of modules, and the groups and threads that they hold: Megatron caches what rotary embeddings return."""
    for name, module in list(sys.modules.items()):
        if not name.startswith(_CACHING):
            continue
        for kind in vars(module).values():
            for method in vars(kind).values() if isinstance(kind, type) else ():
                if hasattr(method, "cache_clear"):
                    method.cache_clear()


# Plans that take turns in one job, one for each global batch size of ``--step-batch-size-schedule``: a plan routes a
# fixed number of microbatches.  Where the batch size changes, all ranks leave the training with their state in host
# memory and enter it again under the next plan, as an elastic job's workers do.  No process ends.

_TIMEOUT_S = 600.0  # bound on every wait of a change: ranks build models and datasets between two of them
_FLAG = "--het-plan"

Enter = Callable[[list[str], Boundary], None]  # runs the training with a command line


class TurnBoundary(ElasticBoundary):
    """The boundary of one turn of one rank.

    Args:
        turn: Counted from 0.
        store: Where all ranks meet, in all turns.
        copies: Holds this rank's state at the end of the turn before.
        padded_vocab_size: Of the first turn; None in it.
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
        self.listened: Any = None  # what noted signals before this turn did (``--exit-signal-handler``)
        self.began_s: float | None = None  # when the job began; a script that is run again says when the turn did

    def load(self, session: Any, args: Any, models: Any, optimizer: Any, scheduler: Any) -> tuple[int, float] | None:
        """Take over the state of the turn before, and the batch size with it."""
        found = super().load(session, args, models, optimizer, scheduler)
        if found is not None:
            from megatron.core.num_microbatches_calculator import update_num_microbatches
            from megatron.training import training
            from megatron.training.global_vars import get_signal_handler

            training._TRAIN_START_TIME = self.began_s  # for ``--exit-duration-in-mins``
            if getattr(self.listened, "_signal_received", False):  # since the last iteration
                get_signal_handler()._signal_received = True
            update_num_microbatches(args.consumed_train_samples, consistency_check=False)
            self.copies = Copies(0)  # the state in host memory has done its duty
        return found

    def _is_over(self, _iteration: int) -> bool:
        """Whether Megatron's batch size is another plan's; the process goes on then."""
        self.outlives_sessions = batch_size() != self.generation.plan.training.global_batch_size
        return self.outlives_sessions


def batch_size() -> int:
    """Sequences of the iteration that is about to begin, as Megatron's schedule says."""
    from megatron.core.num_microbatches_calculator import get_current_global_batch_size

    return int(get_current_global_batch_size())


def take_turns(argv: Sequence[str], plans: Sequence[Plan], files: Sequence[str], enter: Enter) -> NoReturn:
    """Train under one plan after the other, in this process.

    Args:
        argv: The command line, with the program's name first.
        plans: One for each global batch size.
        enter: Runs the training under one of them.

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
