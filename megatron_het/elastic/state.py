"""The state of a training, taken at an iteration boundary and given to the ranks of any next plan.

A *snapshot* is what one rank held after an iteration: its pieces of parameters and optimizer state, and what all ranks
have in common (iteration, samples, schedules).  The members of a change offer their snapshots, own ones and copies of
others', and the newest iteration that is complete among them is taken.  No file is read or written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_het.elastic import random_state
from megatron_het.elastic.links import Links
from megatron_het.elastic.moving import Held, Holdings, move
from megatron_het.elastic.pieces import Blocks, LocalState, blocks_of, collect, forget, prepare, set_numbers
from megatron_het.elastic.ranges import Piece
from megatron_het.plan import Plan, topology_hash


@dataclass
class Snapshot:
    """Holds what one rank held after an iteration; JSON values but for the pieces.

    Attributes:
        iteration: Iterations that were done.
        rank: Of the plan under which it was taken.
        topology: Hash of that plan's topology.
        common: What is the same on all ranks.
        numbers: Of the optimizer, by parameter name.
        random: Random-number states of the rank.
        pieces: Parameters and optimizer state, in host memory.
    """

    iteration: int
    rank: int
    topology: str
    common: dict[str, Any]
    numbers: dict[str, dict[str, float]]
    random: dict[str, Any]
    pieces: list[tuple[Piece, torch.Tensor]] = field(default_factory=list)

    def header(self) -> dict[str, Any]:
        """Returns what others have to know about it."""
        return {
            "iteration": self.iteration,
            "rank": self.rank,
            "topology": self.topology,
            "pieces": [piece.to_json() for piece, _ in self.pieces],
        }


@dataclass(frozen=True)
class Trainee:
    """Holds what is trained in this process, as Megatron made it.

    Attributes:
        plan: The plan of the session.
        rank: This process's rank in it.
        models: Chunks as Megatron trains them.
        optimizer: Megatron's.
        scheduler: Of learning rate and weight decay.
        args: Megatron's arguments.
    """

    plan: Plan
    rank: int
    models: Sequence[torch.nn.Module]
    optimizer: Any
    scheduler: Any
    args: Any


@dataclass(frozen=True)
class Restored:
    """Holds what a rank has to know to go on.

    Attributes:
        iteration: Iterations that are done.
        flops: Floating-point operations so far, as Megatron counts them.
        sent_bytes: What this member gave to others.
    """

    iteration: int
    flops: float
    sent_bytes: int


def take(trainee: Trainee, iteration: int) -> Snapshot:
    """A snapshot of this rank in host memory.

    Args:
        trainee: What is trained; whole parameters are shown.
        iteration: Iterations that are done.
    """
    state = collect(trainee.models, trainee.optimizer, trainee.args, is_updated=True)
    return described(trainee, iteration, state, [(p, t.detach().to("cpu", copy=True)) for p, t in state.pieces])


def described(trainee: Trainee, iteration: int, state: LocalState, pieces: Held) -> Snapshot:
    """A snapshot whose pieces are in host memory already."""
    return Snapshot(
        iteration,
        trainee.rank,
        topology_hash(trainee.plan),
        _common(trainee, iteration),
        state.numbers,
        random_state.collect(),
        list(pieces),
    )


def give(links: Links, snapshots: Sequence[Snapshot]) -> int | None:
    """Take part in a change as a member that is no rank of the next plan.  Collective over the members.

    Returns:
        The iteration that the others go on from; None where nothing was complete.
    """
    version, _ = _change(links, snapshots, None, {})
    return version


def restore(links: Links, snapshots: Sequence[Snapshot], trainee: Trainee) -> Restored | None:
    """Take over the newest complete state.  Collective over the members.

    Args:
        links: Between the members of the change: all who hold something and all ranks of the next plan.
        snapshots: What this member holds; may be empty.
        trainee: What is to be filled.

    Returns:
        Where to go on; None where the members do not hold a complete state.

    Raises:
        StateError: An optimizer whose state cannot be moved.
    """
    blocks = blocks_of(trainee.models, trainee.args)
    version, found = _change(links, snapshots, trainee, blocks)
    if version is None:
        return None
    common, numbers, states, sent = found
    set_numbers(trainee.optimizer, blocks, numbers)
    _set_common(trainee, common)
    if states is None:
        random_state.move_on(trainee.args, version)
    else:
        random_state.restore(states)
    return Restored(version, common["flops"], sent)


def _change(
    links: Links, snapshots: Sequence[Snapshot], trainee: Trainee | None, blocks: Blocks
) -> tuple[int | None, Any]:
    """Offer, choose and move; the second value is common state, numbers, random states and bytes sent."""
    offers = links.gather([snapshot.header() for snapshot in snapshots])
    versions = sorted({offer["iteration"] for member in offers for offer in member}, reverse=True)
    possible: list[int] = []
    local = LocalState()
    by_version = {version: _holdings(offers, version) for version in versions}
    for version, holdings in by_version.items():
        if trainee is None:
            possible.append(version)
            continue
        local = _room(trainee, holdings, blocks)
        # Optimizers have state of all parameters or of none: what nobody speaks of was with those who are lost.
        is_whole = not local.stateless or not holdings.kinds()
        if is_whole and not holdings.moves(links.rank, [piece for piece, _ in local.pieces])[1]:
            possible.append(version)
    agreed = set(versions).intersection(*links.gather(possible))
    if not agreed:
        if trainee is not None:
            forget(trainee.optimizer)
        return None, None
    version = max(agreed)
    if trainee is not None and version != versions[-1]:
        local = _room(trainee, by_version[version], blocks)
    chosen = [snapshot for snapshot in snapshots if snapshot.iteration == version]
    held = [entry for snapshot in chosen for entry in snapshot.pieces]
    needs = links.gather([piece.to_json() for piece, _ in local.pieces])
    sent = move(links, held, local.pieces, by_version[version], [_pieces(member) for member in needs])
    rest = _everybody_elses(links, chosen)
    return version, (*_own_part(rest, trainee), sent)


def _room(trainee: Trainee, holdings: Holdings, blocks: Blocks) -> LocalState:
    return prepare(trainee.models, trainee.optimizer, trainee.args, holdings.kinds(), blocks)


def _holdings(offers: Sequence[Sequence[dict[str, Any]]], version: int) -> Holdings:
    """Returns what every member holds of an iteration; the pieces of its snapshots one after the other."""
    return Holdings(
        [
            [piece for offer in member if offer["iteration"] == version for piece in _pieces(offer["pieces"])]
            for member in offers
        ]
    )


def _pieces(documents: Sequence[dict[str, Any]]) -> list[Piece]:
    return [Piece.from_json(document) for document in documents]


def _everybody_elses(links: Links, chosen: Sequence[Snapshot]) -> list[dict[str, Any]]:
    """Of every snapshot of the chosen iteration what is not tensors."""
    own = [{"rank": s.rank, "topology": s.topology, "numbers": s.numbers, "random": s.random} for s in chosen]
    for document, snapshot in zip(own[:1], chosen, strict=False):
        document["common"] = snapshot.common  # once per member
    return [document for member in links.gather(own) for document in member]


def _own_part(
    documents: Sequence[Mapping[str, Any]], trainee: Trainee | None
) -> tuple[dict[str, Any], dict[str, dict[str, float]], dict[str, Any] | None]:
    """Common state, numbers, and random states where this rank has the same place as one of the old ranks."""
    common = next(document["common"] for document in documents if "common" in document)
    numbers = {key: values for document in documents for key, values in document["numbers"].items()}
    if trainee is None:
        return common, numbers, None
    topology = topology_hash(trainee.plan)
    states = (d["random"] for d in documents if d["topology"] == topology and d["rank"] == trainee.rank)
    return common, numbers, next(states, None)


def _common(trainee: Trainee, iteration: int) -> dict[str, Any]:
    from megatron.training.training import num_floating_point_operations

    args = trainee.args
    done = iteration - (args.iteration or 0)
    flops = args.num_floating_point_operations_so_far
    if done > 0:
        flops += done * num_floating_point_operations(args, args.global_batch_size)
    scalers = [
        {name: float(value) for name, value in scaler.state_dict().items()} for scaler in _scalers(trainee.optimizer)
    ]
    return {
        "flops": float(flops),
        "consumed_train_samples": args.consumed_train_samples,
        "skipped_train_samples": args.skipped_train_samples,
        "consumed_valid_samples": args.consumed_valid_samples,
        "scheduler": trainee.scheduler.state_dict(),
        "scalers": scalers,
    }


def _set_common(trainee: Trainee, common: Mapping[str, Any]) -> None:
    from megatron.core.num_microbatches_calculator import update_num_microbatches

    args = trainee.args
    for name in ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples"):
        setattr(args, name, common[name])
    update_num_microbatches(consumed_samples=args.consumed_train_samples, verbose=False)
    trainee.scheduler.load_state_dict(dict(common["scheduler"]))
    for scaler, values in zip(_scalers(trainee.optimizer), common["scalers"], strict=True):
        whole = {name: int(value) for name, value in values.items() if name != "scale"}
        scaler.load_state_dict({"scale": torch.tensor([values["scale"]], dtype=torch.float32), **whole})


def _scalers(optimizer: Any) -> list[Any]:
    """Loss scalers that have a state."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    found = [getattr(part, "grad_scaler", None) for part in parts]
    return [scaler for scaler in found if scaler is not None and scaler.state_dict()]
