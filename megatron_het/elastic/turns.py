"""Plans that take turns in one job, one for each global batch size of ``--step-batch-size-schedule``.

A plan routes a fixed number of microbatches, so that another batch size needs another plan.  At the boundary where
Megatron's batch size changes, all ranks leave the training under one plan with their state in host memory, and enter
it again under the plan of the new size, as the workers of an elastic job do.  No process ends.  The plans have one
number of ranks; they may place layers and ranks in any way.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from megatron_het.arguments.megatron_args import environment_of
from megatron_het.elastic.copies import Copies
from megatron_het.elastic.job import Generation
from megatron_het.elastic.sessions import ElasticBoundary, Kept, Leave, end_session, with_own_folders
from megatron_het.plan import Plan
from megatron_het.runtime.training import Boundary
from megatron_het.store import Documents
from megatron_het.store.job import job_store
from megatron_het.store.torch_store import TorchStore

_TIMEOUT_S = 600.0
"""Bound on every wait of a change: ranks build models and datasets between two of them."""
_FLAG = "--het-plan"

Enter = Callable[[list[str], Boundary], None]
"""Runs the training with a command line."""


class TurnBoundary(ElasticBoundary):
    """The boundary of one turn of one rank.

    Args:
        turn: Counted from 0.
        plan: Of this turn.
        plans: Of all turns.
        rank: This rank.
        store: Where all ranks meet, in all turns.
        copies: Holds this rank's state at the end of the turn before.
        padded_vocab_size: Of the first turn; None in it.
        datasets: Of earlier turns.
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

    def load(self, session: Any, args: Any, models: Any, optimizer: Any, scheduler: Any) -> tuple[int, float] | None:
        """Take over the state of the turn before, and the batch size with it."""
        found = super().load(session, args, models, optimizer, scheduler)
        if found is not None:
            from megatron.core.num_microbatches_calculator import update_num_microbatches

            update_num_microbatches(args.consumed_train_samples, consistency_check=False)
            self._copies = Copies(0)  # the state in host memory has done its duty
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
        files: Where they are.
        enter: Runs the training under one of them.

    Raises:
        SystemExit: The training is over.
    """
    for plan in plans:
        for name, value in environment_of(plan).items():
            os.environ.setdefault(name, value)  # before anything asks for a device
    rank, words = int(os.environ["RANK"]), _without_plans(argv[1:])
    store = job_store(rank, _TIMEOUT_S)
    by_size = {plan.training.global_batch_size: i for i, plan in enumerate(plans)}
    datasets: Kept = {}
    copies, vocabulary, which, turn = Copies(0), None, 0, 0
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
        try:
            enter([argv[0], *with_own_folders(words, f"plan-{which}"), _FLAG, files[which]], boundary)
        except Leave as leave:
            traceback.clear_frames(leave.__traceback__)
            copies = Copies(0)
            copies.add(leave.snapshot)
        else:
            raise SystemExit(0)
        which, turn, vocabulary = by_size[batch_size()], turn + 1, boundary.padded_vocab_size
        boundary.closed()
        end_session()


def _without_plans(words: Sequence[str]) -> list[str]:
    """The command line without the plans."""
    found, skips = [], False
    for word in words:
        skips = word.split("=")[0] == _FLAG or (skips and not word.startswith("-"))
        if not skips:
            found.append(word)
    return found
