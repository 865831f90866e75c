"""The state of a training, taken at an iteration boundary and given to the ranks of any next plan.

A *snapshot* is the state of one rank after an iteration: its pieces of parameters and optimizer state, and the values
that all ranks share (iteration, samples, schedules).  The members of a change offer their snapshots, their own and
copies of others'; the newest iteration that is complete among them is used.  No file is read or written.
"""

import base64
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from megatron_het.checkpoint import state_dict
from megatron_het.checkpoint.loading import KIND, SCHEDULED, match_groups
from megatron_het.elastic.links import Links
from megatron_het.elastic.pieces import (
    PARAMETER,
    Blocks,
    LocalState,
    Piece,
    Runs,
    StateError,
    blocks_of,
    collect,
    common,
    forget,
    prepare,
    set_numbers,
)
from megatron_het.plan import Plan, topology_hash

# Moving state between ranks of any two plans: computing the messages, and sending them.
#
# Every member announces its pieces and its needs.  From these all members compute the same messages: a needed range
# comes from the rank itself if it holds it, else from a holder, and different receivers begin with different holders.

_MESSAGE_BYTES = 64 * 2**20  # bounds the extra memory of the exchange
_FEW_RUNS = 32  # up to this number of runs slices are copied one by one

Held = Sequence[tuple[Piece, torch.Tensor]]


@dataclass
class _Move:
    """Elements to copy from a piece of one rank to a piece of another (or the same) rank."""

    sender: int
    receiver: int
    source: int
    target: int
    taken: Runs
    put: Runs

    @property
    def size(self) -> int:
        return int(self.taken[:, 2].sum())


class Holdings:
    """Pieces of all members, and the choice of senders for each receiver."""

    def __init__(self, held: Sequence[Sequence[Piece]]) -> None:
        self._held = held
        self._by_name: dict[tuple[str, str], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for member, pieces in enumerate(held):
            for i, piece in enumerate(pieces):
                self._by_name[piece.name][member].append(i)
        self._runs: dict[tuple[int, int], Runs] = {}
        self._moves: dict[int, tuple[list[_Move], list[Piece]]] = {}

    def moves(self, receiver: int, needed: Sequence[Piece]) -> tuple[list[_Move], list[Piece]]:
        """Returns the moves to a member, in an order that is equal on all members, and the pieces that no member has.

        The result is cached: a member always needs the same pieces.
        """
        if receiver not in self._moves:
            self._moves[receiver] = self._find_moves(receiver, needed)
        return self._moves[receiver]

    def _find_moves(self, receiver: int, needed: Sequence[Piece]) -> tuple[list[_Move], list[Piece]]:
        found: list[_Move] = []
        missing: list[Piece] = []
        for target, piece in enumerate(needed):
            left = piece.runs()
            for sender, source in self._holders(piece, receiver):
                if not len(left):
                    break
                if (sender, source) not in self._runs:
                    self._runs[sender, source] = self._held[sender][source].runs()
                put, taken, left = common(left, self._runs[sender, source])
                if len(put):
                    found.append(_Move(sender, receiver, source, target, taken, put))
            if len(left):
                missing.append(piece)
        return found, missing

    def _holders(self, piece: Piece, receiver: int) -> Iterator[tuple[int, int]]:
        """Yields (member, index of its piece of the same tensor): the receiver first, then the others in rotation."""
        by_member = self._by_name.get(piece.name, {})
        members = sorted(by_member)
        turned = members[receiver % len(members) :] + members[: receiver % len(members)] if members else []
        for member in sorted(turned, key=lambda m: m != receiver):
            for index in by_member[member]:
                if self._held[member][index].shape == piece.shape and self._held[member][index].dtype == piece.dtype:
                    yield member, index

    def kinds(self) -> dict[str, list[str]]:
        """Kinds of optimizer state with their data types, by parameter name."""
        found: dict[str, set[str]] = defaultdict(set)
        for pieces in self._held:
            for piece in pieces:
                if piece.kind not in (PARAMETER, "main"):
                    found[piece.key].add(f"{piece.kind}:{piece.dtype}")
        return {key: sorted(names) for key, names in found.items()}


@torch.no_grad()
def move(links: Links, held: Held, needed: Held, holdings: Holdings, needs: Sequence[Sequence[Piece]]) -> int:
    """Fill the needed tensors; returns the bytes that this member sent to others.  Collective over the members.

    Args:
        links: Links between the members.
        held: Pieces that this member holds.
        needed: Pieces that it needs, with the tensors to fill.
        needs: Pieces that each member needs.

    Raises:
        StateError: No member holds a piece that is needed.
    """
    mine: list[_Move] = []
    for receiver, pieces in enumerate(needs):
        if receiver == links.rank:
            found, missing = holdings.moves(receiver, pieces)
            if missing:
                names = sorted({f"{piece.key} ({piece.kind})" for piece in missing})
                more = f" and {len(names) - 4} more" if len(names) > 4 else ""
                raise StateError(f"no rank that is left holds {', '.join(names[:4])}{more}")
            mine.extend(found)
        else:
            own_names = {piece.name for piece, _ in held}
            if any(piece.name in own_names for piece in pieces):
                mine.extend(m for m in holdings.moves(receiver, pieces)[0] if m.sender == links.rank)
    for local in (m for m in mine if m.sender == m.receiver):
        _write(needed[local.target][1], local.put, _read(held[local.source][1], local.taken))
    sent = 0
    outgoing = _batches([m for m in mine if m.sender == links.rank != m.receiver], lambda m: held[m.source][0])
    incoming = _batches([m for m in mine if m.receiver == links.rank != m.sender], lambda m: needed[m.target][0])
    turns = links.gather(max(len(outgoing), len(incoming)))
    for turn in range(max(map(int, turns))):  # as many turns as the busiest member needs
        messages = [
            (peer, torch.cat([_read(held[m.source][1], m.taken) for m in batch]).cpu())
            for (_, peer), batch in (outgoing[turn] if turn < len(outgoing) else {}).items()
        ]
        arriving = incoming[turn] if turn < len(incoming) else {}
        buffers = {
            pair: torch.empty(sum(m.size for m in batch), dtype=needed[batch[0].target][1].dtype)
            for pair, batch in arriving.items()
        }
        links.swap(messages, [(peer, buffers[peer, me]) for peer, me in arriving])
        sent += sum(tensor.nbytes for _, tensor in messages)
        for pair, batch in arriving.items():
            at = 0
            for m in batch:
                _write(needed[m.target][1], m.put, buffers[pair][at : at + m.size])
                at += m.size
    return sent


def _batches(moves: Sequence[_Move], piece_of: Any) -> list[dict[tuple[int, int], list[_Move]]]:
    """Moves in turns of bounded size; in a turn one message of one data type per pair of members.

    Both ends of a pair have the same moves in the same order, so they divide them in the same way.
    """
    turns: list[dict[tuple[int, int], list[_Move]]] = []
    place: dict[tuple[int, int], tuple[int, int, str]] = {}
    for m in moves:
        pair, piece = (m.sender, m.receiver), piece_of(m)
        size = m.size * getattr(torch, piece.dtype).itemsize
        turn, filled, dtype = place.get(pair, (0, 0, piece.dtype))
        if dtype != piece.dtype or (filled and filled + size > _MESSAGE_BYTES):
            turn, filled = turn + 1, 0
        place[pair] = turn, filled + size, piece.dtype
        while len(turns) <= turn:
            turns.append({})
        turns[turn].setdefault(pair, []).append(m)
    return turns


def _read(tensor: torch.Tensor, runs: Runs) -> torch.Tensor:
    """Elements of a flat tensor, one run after the other."""
    if len(runs) <= _FEW_RUNS:
        parts = [tensor[first : first + length] for _, first, length in runs.tolist()]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    return tensor[_index(runs).to(tensor.device)]


def _write(tensor: torch.Tensor, runs: Runs, values: torch.Tensor) -> None:
    """Put values into a flat tensor, one run after the other."""
    values = values.to(tensor.device)
    if len(runs) > _FEW_RUNS:
        tensor[_index(runs).to(tensor.device)] = values
        return
    at = 0
    for _, first, length in runs.tolist():
        tensor[first : first + length] = values[at : at + length]
        at += length


def _index(runs: Runs) -> torch.Tensor:
    """Indices of all elements of the runs."""
    lengths = runs[:, 2]
    begins = np.repeat(runs[:, 1] - np.concatenate([[0], np.cumsum(lengths)[:-1]]), lengths)
    return torch.from_numpy(begins + np.arange(int(lengths.sum())))


@dataclass
class Snapshot:
    """State of one rank after an iteration; JSON values except for the pieces."""

    iteration: int
    rank: int  # rank in the plan under which it was taken
    topology: str  # hash of that plan's topology
    common: dict[str, Any]  # values that are equal on all ranks
    numbers: dict[str, dict[str, float]]  # numbers of the optimizer's state, by parameter name
    random: dict[str, Any]  # random-number states of the rank
    # parameters and optimizer state, in host memory
    pieces: list[tuple[Piece, torch.Tensor]] = field(default_factory=list)

    def document(self, *names: str, pieces: int | None = None) -> dict[str, Any]:
        """Returns some fields and the first ``pieces`` pieces, by default all of them, as JSON values."""
        described = [piece.to_json() for piece, _ in self.pieces[:pieces]]
        return {name: getattr(self, name) for name in names} | {"pieces": described}


@dataclass(frozen=True)
class Trainee:
    """Model, optimizer and scheduler of this process, as made by Megatron."""

    plan: Plan  # the plan of the session
    rank: int  # this process's rank in the plan
    models: Sequence[torch.nn.Module]  # model chunks with Megatron's wrappers
    optimizer: Any
    scheduler: Any  # of learning rate and weight decay
    args: Any


@dataclass(frozen=True)
class Restored:
    """Values with which a rank resumes the training."""

    iteration: int
    flops: float  # floating-point operations so far, by Megatron's count
    sent_bytes: int  # bytes that this member sent to others


def take(trainee: Trainee, iteration: int) -> Snapshot:
    """Takes a snapshot of this rank in host memory, with complete parameters."""
    state = collect(trainee.models, trainee.optimizer, trainee.args, is_updated=True)
    return described(trainee, iteration, state, [(p, t.detach().to("cpu", copy=True)) for p, t in state.pieces])


def described(trainee: Trainee, iteration: int, state: LocalState, pieces: Held) -> Snapshot:
    """A snapshot whose pieces are in host memory already."""
    return Snapshot(
        iteration=iteration,
        rank=trainee.rank,
        topology=topology_hash(trainee.plan),
        common=_common(trainee, iteration),
        numbers=state.numbers,
        random=random_states(),
        pieces=list(pieces),
    )


def give(links: Links, snapshots: Sequence[Snapshot]) -> int | None:
    """Take part in a change as a member that is no rank of the next plan.  Collective over the members.

    Returns:
        The iteration from which the ranks resume; None if none was complete.
    """
    version, _ = _change(links, snapshots, None, {})
    return version


def restore(links: Links, snapshots: Sequence[Snapshot], trainee: Trainee) -> Restored | None:
    """Load the newest complete state.  Collective over the members.

    Args:
        links: Links between the members of the change: all holders of state and all ranks of the next plan.
        snapshots: Snapshots of this member; may be empty.
        trainee: Model and optimizer to fill.

    Returns:
        The values to resume with; None if the members do not hold a complete state.

    Raises:
        StateError: The optimizer's state cannot be moved.
    """
    blocks = blocks_of(trainee.models, trainee.args)
    version, found = _change(links, snapshots, trainee, blocks)
    if version is None:
        return None
    common, numbers, states, sent = found
    set_numbers(trainee.optimizer, blocks, numbers)
    _set_common(trainee, common)
    if states is None:
        new_random_states(trainee.args, version)
    else:
        set_random_states(states)
    return Restored(version, common["flops"], sent)


def _change(
    links: Links, snapshots: Sequence[Snapshot], trainee: Trainee | None, blocks: Blocks
) -> tuple[int | None, Any]:
    """Offer, choose and move state; returns the iteration, and (common state, numbers, random states, bytes sent)."""
    offers = links.gather([snapshot.document("iteration", "rank", "topology") for snapshot in snapshots])
    versions = sorted({offer["iteration"] for member in offers for offer in member}, reverse=True)
    possible: list[int] = []
    local = LocalState()
    by_version = {version: _holdings(offers, version) for version in versions}
    for version, holdings in by_version.items():
        if trainee is None:
            possible.append(version)
            continue
        local = _room(trainee, holdings, blocks)
        # Optimizers have state for all parameters or for none: missing state was on lost members only.
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
    """Returns the pieces of an iteration by member; those of a member's snapshots are concatenated."""
    return Holdings(
        [
            [piece for offer in member if offer["iteration"] == version for piece in _pieces(offer["pieces"])]
            for member in offers
        ]
    )


def _pieces(documents: Sequence[dict[str, Any]]) -> list[Piece]:
    return [Piece.from_json(document) for document in documents]


def _everybody_elses(links: Links, chosen: Sequence[Snapshot]) -> list[dict[str, Any]]:
    """Gathers the fields other than tensors of every snapshot of the chosen iteration."""
    own = [{"rank": s.rank, "topology": s.topology, "numbers": s.numbers, "random": s.random} for s in chosen]
    for document, snapshot in zip(own[:1], chosen, strict=False):
        document["common"] = snapshot.common  # only once per member
    return [document for member in links.gather(own) for document in member]


def _own_part(
    documents: Sequence[Mapping[str, Any]], trainee: Trainee | None
) -> tuple[dict[str, Any], dict[str, dict[str, float]], dict[str, Any] | None]:
    """Common state, numbers, and the random states if this rank has the same place as one of the old ranks."""
    commons = [document["common"] for document in documents if "common" in document]
    common = {**commons[0], "groups": [group for one in commons for group in one["groups"]]}
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
    groups = trainee.optimizer.param_groups
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
        # If training continues with a checkpoint's learning rates, they are not those of the flags.
        "groups": [{key: group[key] for key in (*KIND, *SCHEDULED) if key in group} for group in groups],
    }


def _set_common(trainee: Trainee, common: Mapping[str, Any]) -> None:
    from megatron.core.num_microbatches_calculator import update_num_microbatches

    args = trainee.args
    for name in ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples"):
        setattr(args, name, common[name])
    update_num_microbatches(consumed_samples=args.consumed_train_samples, verbose=False)
    match_groups(trainee.optimizer.param_groups, common["groups"], keep_saved=True)
    trainee.scheduler.load_state_dict(dict(common["scheduler"]))
    # Experts that are replicated over other ranks than the other weights have an optimizer and a scaler of their own.
    for scaler, values in zip(_scalers(trainee.optimizer), itertools.cycle(common["scalers"]), strict=False):
        whole = {name: int(value) for name, value in values.items() if name != "scale"}
        scaler.load_state_dict({"scale": torch.tensor([values["scale"]], dtype=torch.float32), **whole})


def _scalers(optimizer: Any) -> list[Any]:
    """Loss scalers that have a state."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    found = [getattr(part, "grad_scaler", None) for part in parts]
    return [scaler for scaler in found if scaler is not None and scaler.state_dict()]


def random_states() -> dict[str, Any]:
    """This rank's states of all random generators of training, as JSON values."""
    states = state_dict.collect()
    version, words, gauss_next = states["random"]
    name, keys, position, has_gauss, gauss = states["numpy"]
    return {
        "random": [version, list(words), gauss_next],
        "numpy": [str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), float(gauss)],
        "torch": _text(states["torch"]),
        "device": _text(states["device"]),
        "tracker": {key: _text(state) for key, state in states["tracker"].items()},
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Set what :func:`random_states` returned."""
    version, words, gauss_next = states["random"]
    name, keys, *rest = states["numpy"]
    state_dict.restore(
        {
            "random": (version, tuple(words), gauss_next),
            "numpy": (name, np.array(keys, dtype=np.uint32), *rest),
            "torch": _tensor(states["torch"]),
            "device": _tensor(states["device"]),
            "tracker": {key: _tensor(text) for key, text in states["tracker"].items()},
        }
    )


def new_random_states(args: Any, iteration: int) -> None:
    """Set new random states under another topology: old ones do not fit, and the initial ones have been used."""
    from megatron.training import initialize

    initialize._set_random_seed(
        (args.seed + 1000003 * iteration) % 2**31,
        args.data_parallel_random_init,
        args.te_rng_tracker,
        args.inference_rng_tracker,
        use_cudagraphable_rng=args.cuda_graph_impl != "none",
    )


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
