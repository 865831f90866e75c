"""Checks of a plan: in itself, and against the arguments of the run that wants to use it."""

import hashlib
import itertools
import json
import math
import os
from collections.abc import Sequence

from megatron_het.plan.placement import Placement
from megatron_het.plan.schema import (
    CHUNK,
    PER_CHUNK,
    PER_DEVICE,
    Cut,
    DeviceCosts,
    ModelShape,
    Plan,
    PlanError,
    PlannedCosts,
    Replica,
    Stage,
    TrainingShape,
    _plain,
    problem_of,
    sizes_of,
)
from megatron_het.safe_io import MAX_PASSES, FileError, read_json, write_json
from megatron_het.schedule.ir import PLACEMENTS, placement_of

# Upper bounds on sizes, so that a mistyped number is an error and not a hang.

LARGEST = {
    "num_layers": 10_000,
    "hidden_size": 1 << 20,
    "ffn_hidden_size": 1 << 24,
    "num_attention_heads": 1 << 16,
    "num_query_groups": 1 << 16,
    "vocab_size": 1 << 26,
    "seq_length": 1 << 27,
    "micro_batch_size": 1 << 17,
    "global_batch_size": 1 << 17,
}
"""Largest values of a model's and a batch's sizes; the same as for model files."""
SLOWEST, FASTEST = 1e-6, 1e6  # range of relative speeds
LARGEST_SHARE = 1_000_000  # of a context-parallel rank, relative to the others
MAX_NAME, MAX_NOTES = 200, 20_000  # characters of a device's name and of the notes


def check_sizes(shape: ModelShape | TrainingShape, section: str) -> None:
    """Raise a PlanError for a size below 1 or above ``LARGEST``."""
    for name, most in LARGEST.items():
        value = getattr(shape, name, None)
        if value is not None and not 1 <= value <= most:
            raise PlanError(f"{section}.{name}", value, f"must be at least 1 and at most {most}")


def check_limits(plan: Plan) -> None:
    """Raise a PlanError for numbers and texts beyond the limits above."""
    for s, stage in enumerate(plan.stages):
        for q, replica in enumerate(stage.replicas):
            where = f"stages[{s}].replicas[{q}]"
            if not SLOWEST <= replica.speed <= FASTEST:
                problem = f"must be positive: {SLOWEST:g} to {FASTEST:g} (1 = as fast as the fastest)"
                raise PlanError(f"{where}.speed", replica.speed, problem)
            check_name(replica.device, f"{where}.device")
            for part, name in enumerate(replica.cp_devices):
                check_name(name, f"{where}.cp_devices[{part}]")
            check_name(replica.zone, f"{where}.zone")
    if len(plan.notes) > MAX_NOTES:
        raise PlanError("notes", plan.notes, f"longer than {MAX_NOTES} characters")
    _check_parameters(plan)
    _check_prediction(plan)
    check_passes(plan)


def check_name(name: str, where: str) -> None:
    """A device's name: one short line, because scripts and tables show it."""
    if len(name) > MAX_NAME or not name.isprintable():
        raise PlanError(where, name, f"a name has at most {MAX_NAME} characters, all printable")


def _check_parameters(plan: Plan) -> None:
    for name, value in plan.schedule.parameters.items():
        numbers = isinstance(value, list) and all(type(n) is int for n in value)
        if value is not None and not numbers and not isinstance(value, bool | int | float | str):
            raise PlanError(
                f"schedule.parameters.{name}", value, "must be a number, a text, true, false or a list of whole numbers"
            )


def most_chunks(microbatches: int, slices: int) -> int:
    """Largest number of chunks of all stages, given the limit on the passes of an iteration."""
    return MAX_PASSES // (2 * microbatches * slices)


def check_passes(plan: Plan) -> None:
    """Refuse an iteration of more passes than can be laid out in reasonable time."""
    slices = plan.schedule.parameters.get("slices", 1)
    slices = slices if isinstance(slices, int) and slices > 0 else 1
    chunks = sum(len(stage.layers) for stage in plan.stages)
    if chunks > most_chunks(plan.num_microbatches, slices):
        passes = 2 * chunks * plan.num_microbatches * slices
        raise PlanError(
            "training.global_batch_size",
            plan.training.global_batch_size,
            f"{plan.num_microbatches} microbatches of {slices} slices through {chunks} chunks are {passes} passes "
            f"per iteration, more than {MAX_PASSES}",
            "Use larger micro batches, fewer slices or fewer chunks",
        )


def _check_prediction(plan: Plan) -> None:
    """Predictions must be finite and not negative, with existing ranks, each at most once."""
    if plan.predicted is None:
        return
    for name in ("iteration_s", "bubble_fraction"):
        _check_amount(getattr(plan.predicted, name), f"predicted.{name}")
    seen: set[int] = set()
    ranks = plan.world_size
    for i, rank in enumerate(plan.predicted.per_rank):
        where = f"predicted.per_rank[{i}]"
        if not 0 <= rank.rank < ranks or rank.rank in seen:
            raise PlanError(f"{where}.rank", rank.rank, "no such rank, or a rank that was there before")
        seen.add(rank.rank)
        for name in ("compute_s", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes"):
            _check_amount(getattr(rank, name), f"{where}.{name}")
    if plan.predicted.costs is not None:
        _check_costs(plan.predicted.costs, [len(s.layers) for s in plan.stages for _ in s.replicas])


def _check_costs(costs: PlannedCosts, chunks: Sequence[int]) -> None:
    """Refuse costs that do not match a plan, whose devices have ``chunks`` chunks."""
    where = "predicted.costs"
    seen: set[int] = set()
    for i, row in enumerate(costs.devices):
        for device in row.devices:
            if not 0 <= device < len(chunks) or device in seen:
                raise PlanError(
                    f"{where}.devices[{i}].devices", device, "no such device, or a device that was there before"
                )
            seen.add(device)
            _check_row(row, chunks[device], f"{where}.devices[{i}]")
    if len(seen) != len(chunks):
        missing = next(d for d in range(len(chunks)) if d not in seen)
        raise PlanError(f"{where}.devices", sorted(seen), f"nothing is said of device {missing}", "Plan again")
    for i, link in enumerate(costs.links):
        for pair in link.pairs:
            if len(pair) != 2 or not all(0 <= d < len(chunks) for d in pair):
                raise PlanError(f"{where}.links[{i}].pairs", list(pair), "must be two devices of the plan")
        _check_amount(link.latency_s, f"{where}.links[{i}].latency_s")
        _check_amount(link.bytes_per_s, f"{where}.links[{i}].bytes_per_s")
        if not link.bytes_per_s:
            raise PlanError(f"{where}.links[{i}].bytes_per_s", link.bytes_per_s, "must be positive")
    for name in ("message_bytes", "weight_share", "diagonal", "operation_s", "post_s"):
        _check_amount(getattr(costs, name), f"{where}.{name}")


def _check_row(row: DeviceCosts, chunks: int, where: str) -> None:
    for name in PER_CHUNK:
        values = getattr(row, name)
        if len(values) != chunks and (values or name in ("forward_s", "backward_s")):
            raise PlanError(f"{where}.{name}", list(values), f"needs one figure for each of {chunks} chunks")
        for value in values:
            _check_amount(value, f"{where}.{name}")
    for name in PER_DEVICE:
        _check_amount(getattr(row, name), f"{where}.{name}")


def _check_amount(value: float, where: str) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise PlanError(where, value, "must be a finite number, not negative")


PRECISIONS = ("fp32", "bf16", "fp16")
PARTS = ("moe_act", "mlp")  # parts of a layer that can be recomputed alone (Megatron's ``--recompute-modules``)
RECOMPUTE = ("none", "selective", *PARTS, "full")


def check_plan(plan: Plan) -> None:
    """Raise a PlanError if the plan is inconsistent."""
    if not plan.stages:
        raise PlanError("stages", [], "a plan needs at least one stage")
    _check_numbers(plan)
    check_limits(plan)
    _check_ranks(plan)
    _check_layers(plan)
    for s, stage in enumerate(plan.stages):
        _check_microbatches(stage, s, plan.num_microbatches)
        _check_divisibility(stage, s, plan.model, plan.training)
        _check_state_shares(stage, s)
        _check_recomputed(stage, s, plan.training)
    placement = Placement(plan)
    for s in range(len(plan.stages)):
        _check_expert_groups(placement, s)


def _check_numbers(plan: Plan) -> None:
    model, training = plan.model, plan.training
    check_sizes(model, "model")
    _check_pattern(model)
    check_sizes(training, "training")
    if model.num_attention_heads % model.num_query_groups:
        problem = f"does not divide the {model.num_attention_heads} attention heads"
        raise PlanError("model.num_query_groups", model.num_query_groups, problem)
    if training.micro_batch_sizes:
        _check_sizes_of_microbatches(training)
    elif training.global_batch_size % training.micro_batch_size:
        problem = f"is not a multiple of micro_batch_size = {training.micro_batch_size}"
        hint = "Use another size, or give every microbatch its own with training.micro_batch_sizes"
        raise PlanError("training.global_batch_size", training.global_batch_size, problem, hint)
    if training.precision not in PRECISIONS:
        raise PlanError("training.precision", training.precision, f"must be one of {PRECISIONS}")
    if training.recompute not in RECOMPUTE:
        raise PlanError("training.recompute", training.recompute, f"must be one of {RECOMPUTE}")


def _check_pattern(model: ModelShape) -> None:
    """A hybrid model must have the layers of its pattern."""
    pattern, where = model.pattern, "model.pattern"
    if not pattern:
        return
    problem = "chunks are in stages[*].layers, so | has no place in it" if CHUNK in pattern else problem_of(pattern)
    if problem:
        raise PlanError(where, pattern, problem)
    for name, count in sizes_of(pattern).items():
        if getattr(model, name) != count:
            raise PlanError(where, pattern, f"has {count} layers where model.{name} is {getattr(model, name)}")


def _check_sizes_of_microbatches(training: TrainingShape) -> None:
    sizes, where = training.micro_batch_sizes, "training.micro_batch_sizes"
    for m, size in enumerate(sizes):
        if size < 1:
            raise PlanError(f"{where}[{m}]", size, "a microbatch needs at least one sequence")
    if sum(sizes) != training.global_batch_size:
        raise PlanError(
            where, sum(sizes), f"add up to another number than global_batch_size = {training.global_batch_size}"
        )
    if max(sizes) != training.micro_batch_size:
        problem = f"must be the largest of micro_batch_sizes, which is {max(sizes)}"
        raise PlanError("training.micro_batch_size", training.micro_batch_size, problem)


def _check_ranks(plan: Plan) -> None:
    seen: dict[int, str] = {}
    for s, stage in enumerate(plan.stages):
        if not stage.replicas:
            raise PlanError(f"stages[{s}].replicas", [], "a stage needs at least one replica")
        for q, replica in enumerate(stage.replicas):
            where = f"stages[{s}].replicas[{q}].ranks"
            if not replica.ranks:
                raise PlanError(where, [], "a replica needs at least one rank")
            _check_context_parallel(replica, f"stages[{s}].replicas[{q}]")
            _check_expert_parallel(replica, f"stages[{s}].replicas[{q}]")
            for rank in replica.ranks:
                if rank in seen:
                    problem = f"rank {rank} is already used by {seen[rank]}"
                    raise PlanError(where, list(replica.ranks), problem, "Every rank belongs to exactly one replica")
                seen[rank] = where
            if list(replica.ranks) != sorted(replica.ranks):
                raise PlanError(where, list(replica.ranks), "must be ascending (TP order is rank order)")
    missing = sorted(set(range(len(seen))) - set(seen))
    if missing:
        hint = f"Ranks must be 0 to {len(seen) - 1} without gaps"
        raise PlanError("stages[*].replicas[*].ranks", sorted(seen), f"rank {missing[0]} is missing", hint)
    for s, stage in enumerate(plan.stages):
        _check_crossing_ranks(stage, s)
    _check_special_ranks(plan)


def _check_context_parallel(replica: Replica, where: str) -> None:
    if replica.cp < 1 or len(replica.ranks) % replica.cp:
        raise PlanError(f"{where}.cp", replica.cp, f"must divide the {len(replica.ranks)} ranks of the replica")
    shares = replica.cp_shares
    if shares and (len(shares) != replica.cp or not all(1 <= share <= LARGEST_SHARE for share in shares)):
        raise PlanError(
            f"{where}.cp_shares",
            list(shares),
            f"must be {replica.cp} whole numbers of 1 to {LARGEST_SHARE}, one per context-parallel rank: how much of "
            "every sequence each holds, relative to the others",
            "Leave it out for equal parts",
        )
    if replica.cp_devices and len(replica.cp_devices) != replica.cp:
        problem = f"must be {replica.cp} names of devices, one per context-parallel rank"
        raise PlanError(f"{where}.cp_devices", list(replica.cp_devices), problem, "Leave it out where all are one kind")


def _check_expert_parallel(replica: Replica, where: str) -> None:
    for name, value, least in (("ep", replica.ep, 1), ("etp", replica.etp, 0)):
        if value < least:
            raise PlanError(f"{where}.{name}", value, f"must be at least {least}", "Leave it out")
    size = replica.cut.expert_ranks
    if size % replica.tp and replica.tp % size:
        raise PlanError(
            f"{where}.ep",
            replica.ep,
            f"EP x ETP makes {size} ranks, which must divide the TP size of the replica, which is {replica.tp}, or be "
            "a multiple of it",
            "Leave ep and etp out, or choose others",
        )


def _check_expert_groups(placement: Placement, s: int) -> None:
    """Replicas that share experts must fill whole expert groups, and run the same passes."""
    stage, classes = placement.plan.stages[s], placement.classes(s)
    for cut in (cut for cut in classes if not cut.divides_alike):
        first = next(q for q, r in enumerate(stage.replicas) if r.cut == cut)
        where = f"stages[{s}].replicas[{first}].ep"
        groups = placement.tp_groups(s, cut)
        if len(groups) * cut.tp % cut.expert_ranks:
            raise PlanError(
                where,
                cut.ep,
                f"{cut} divides experts over {cut.expert_ranks} ranks, and the stage has {len(groups) * cut.tp} ranks "
                "that cut weights so, which is no multiple of it",
                "Use an EP size that divides them",
            )
        if len(classes) > 1:
            raise PlanError(
                where,
                cut.ep,
                f"experts are divided beyond a TP group or within it ({cut}), and replicas of stage {s} cut weights in "
                "other ways too: the exchange between them takes whole experts from a TP group",
                "Give all replicas of the stage one TP, EP and ETP size, or divide the experts over TP groups",
            )
        for group in placement.expert_groups(s, cut):
            if list(group) != sorted(group):
                problem = "an expert group's TP groups cross: Megatron numbers its ranks in ascending order"
                hint = "Number the ranks replica by replica"
                raise PlanError(f"stages[{s}].replicas[{first}].ranks", list(group), problem, hint)
    for together in placement.companions(s):
        counts = {q: len(stage.replicas[q].microbatches) for q in together}
        if len(set(counts.values())) > 1:
            few, many = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
            raise PlanError(
                f"stages[{s}].replicas[{many}].microbatches",
                counts[many],
                f"replicas {few} and {many} share experts, so every pass of one is a pass of the other, and replica "
                f"{few} has {counts[few]} microbatches",
                "Give replicas that share experts equally many, or put replicas with equally many next to each other",
            )
        again = {stage.replicas[q].recompute_layers for q in together}
        if len(again) > 1:  # recomputed layers exchange tokens, too
            problem = f"replicas {', '.join(map(str, together))} share experts, and do not run the same layers again"
            where = f"stages[{s}].replicas[{together[0]}].recompute_layers"
            raise PlanError(where, [list(n) for n in again], problem, "Give all of them the same numbers")


def _check_crossing_ranks(stage: Stage, s: int) -> None:
    """Replicas that cut weights alike must come in one order at every TP rank.

    Megatron's distributed optimizer gives the n-th replica of a data-parallel group the n-th shard,
    and sums gradients of norms over TP groups shard by shard: both need the same n on all ranks of a replica.
    """
    classes: dict[Cut, list[tuple[tuple[int, ...], int]]] = {}
    for q, replica in enumerate(stage.replicas):
        groups = [(replica.tp_group(part), q) for part in range(replica.cp)]
        classes.setdefault(replica.cut, []).extend(groups)
    for members in classes.values():
        # In the order of their first ranks, comparing neighbours is enough: the order is transitive.
        for (first, p), (second, q) in itertools.pairwise(sorted(members)):
            if not all(a < b for a, b in zip(first, second, strict=True)):
                earlier, later = min(p, q), max(p, q)
                raise PlanError(
                    f"stages[{s}].replicas[{later}].ranks",
                    list(stage.replicas[later].ranks),
                    f"crosses replica {earlier} with ranks {list(stage.replicas[earlier].ranks)}: "
                    "one must come first at every position",
                    "Number the ranks replica by replica",
                )


def _check_special_ranks(plan: Plan) -> None:
    """Check ranks 0 and the last: Megatron reads data and decides about training on 0, and logs on the last."""
    if plan.stages[0].replicas[0].ranks[0] != 0:
        problem = "rank 0 must be the first rank of the first replica of the first stage (it reads the data)"
        hint = "Number the ranks stage by stage"
        raise PlanError("stages[0].replicas[0].ranks", list(plan.stages[0].replicas[0].ranks), problem, hint)
    last = plan.world_size - 1
    if all(last not in r.ranks for r in plan.stages[-1].replicas):
        raise PlanError(
            f"stages[{len(plan.stages) - 1}].replicas[*].ranks",
            [list(r.ranks) for r in plan.stages[-1].replicas],
            f"the last rank ({last}) must be in the last stage (it logs the loss)",
            "Number the ranks stage by stage",
        )


def _check_layers(plan: Plan) -> None:
    total = 0
    for s, stage in enumerate(plan.stages):
        if not stage.layers or any(n < 0 for n in stage.layers) or sum(stage.layers) < 1:
            raise PlanError(
                f"stages[{s}].layers", list(stage.layers), "a stage needs at least one layer, none negative"
            )
        total += sum(stage.layers)
    if total != plan.model.num_layers:
        problem = f"add up to {total}, but model.num_layers is {plan.model.num_layers}"
        raise PlanError("stages[*].layers", [list(s.layers) for s in plan.stages], problem)
    plan.model.check_later_layers()


def _check_microbatches(stage: Stage, s: int, num_microbatches: int) -> None:
    owner: dict[int, int] = {}
    for q, replica in enumerate(stage.replicas):
        where = f"stages[{s}].replicas[{q}].microbatches"
        if not replica.microbatches:
            raise PlanError(where, [], "a replica without microbatches", "Leave it out of the plan or give it work")
        if list(replica.microbatches) != sorted(set(replica.microbatches)):
            raise PlanError(where, list(replica.microbatches), "must be ascending, each id once")
        for m in replica.microbatches:
            if not 0 <= m < num_microbatches:
                raise PlanError(
                    where, m, f"microbatch ids are 0 to {num_microbatches - 1} ({num_microbatches} of them)"
                )
            if m in owner:
                raise PlanError(where, m, f"microbatch {m} already belongs to replica {owner[m]}")
            owner[m] = q
    if len(owner) != num_microbatches:  # counted, not listed: a wrong batch size may be huge
        missing = next(m for m in range(num_microbatches) if m not in owner)
        problem = f"microbatch {missing} belongs to no replica (there are {num_microbatches})"
        raise PlanError(f"stages[{s}].replicas[*].microbatches", sorted(owner), problem)


def _check_recomputed(stage: Stage, s: int, training: TrainingShape) -> None:
    for q, replica in enumerate(stage.replicas):
        where, given = f"stages[{s}].replicas[{q}].recompute_layers", replica.recompute_layers
        if given and training.recompute != "full":
            hint = "Leave it out, or use full"
            raise PlanError(where, list(given), f"training.recompute is {training.recompute!r}", hint)
        if given and not (len(given) == len(stage.layers) and all(0 <= k <= n for k, n in zip(given, stage.layers))):
            raise PlanError(where, list(given), f"must be a number of layers of each chunk: 0 to {list(stage.layers)}")


def _check_state_shares(stage: Stage, s: int) -> None:
    for q, replica in enumerate(stage.replicas):
        if not (math.isfinite(replica.state_share) and replica.state_share >= 0):
            raise PlanError(
                f"stages[{s}].replicas[{q}].state_share", replica.state_share, "must be 0 or a positive number"
            )
    if not any(replica.state_share for replica in stage.replicas):
        problem = "nobody keeps the state of this stage"
        hint = "Give at least one replica a share"
        raise PlanError(f"stages[{s}].replicas[*].state_share", [0.0] * len(stage.replicas), problem, hint)


def _check_divisibility(stage: Stage, s: int, model: ModelShape, training: TrainingShape) -> None:
    for q, replica in enumerate(stage.replicas):
        where, tp = f"stages[{s}].replicas[{q}].ranks", replica.tp
        for name in ("num_attention_heads", "num_query_groups", "hidden_size", "ffn_hidden_size"):
            size = getattr(model, name)
            if size is not None and size % tp:
                raise PlanError(where, list(replica.ranks), f"TP size {tp} does not divide model.{name} = {size}")
        if training.sequence_parallel and model.seq_length % tp:
            problem = f"with sequence parallel, TP size {tp} must divide model.seq_length = {model.seq_length}"
            raise PlanError(where, list(replica.ranks), problem)


# Reading and writing plan files, within the limits of ``megatron_het.safe_io``.

MOST_INDENTED = 10_000  # ranks of a plan file that is laid out in lines


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read and check a plan file.

    Raises:
        PlanError: The file is missing, truncated, not a plan, or inconsistent in itself.
    """
    try:
        document = read_json(path)
    except FileError as error:
        raise _plan_error(error) from None
    plan = Plan.from_json(document)
    check_plan(plan)
    return plan


def _plan_error(error: FileError) -> PlanError:
    where = f"{error.where}: " if error.where else ""
    return PlanError(
        "plan file", error.path, where + error.problem, error.hint or "Give the path of a plan.json (a run: --het-plan)"
    )


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Check a plan and write it; an existing file is replaced only by a complete one.

    A plan of more than ``MOST_INDENTED`` ranks is one line: to indent it takes as long as many a search.

    Raises:
        PlanError: The plan is inconsistent, or ``path`` cannot be written.
    """
    check_plan(plan)
    try:
        write_json(path, plan.to_json(), indent=2 if plan.world_size <= MOST_INDENTED else None)
    except FileError as error:
        raise _plan_error(error) from None


def plan_hash(plan: Plan) -> str:
    """Twelve hex digits over everything that determines what runs (not predictions or notes)."""
    body = plan.to_json()
    body.pop("predicted", None)
    body.pop("notes", None)
    return _digest(body)


def topology_hash(plan: Plan) -> str:
    """Twelve hex digits over the distribution of the model: stages, layers and ranks, not the routing.

    Two runs with the same topology hash have the same per-rank state, e.g. random-number states.
    """
    held = [[_plain(s.layers), [_ranks(r) for r in s.replicas]] for s in plan.stages]
    placement = placement_of(plan.schedule.name)
    return _digest(held if placement == PLACEMENTS[0] else [placement, *held])


def _ranks(replica: Replica) -> list[int]:
    parts = (-replica.ep, -replica.cut.etp) if replica.ep > 1 or replica.cut.etp else ()
    return [*replica.ranks, *((-replica.cp,) if replica.cp > 1 else ()), *parts]


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
