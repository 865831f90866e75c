"""A split vocabulary, and what it cannot be combined with (SlimPipe, section 4.3)."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from megatron_het.features.base import Feature, Figures, Option, Refusal, ViewFlag, check_reductions_meet, option
from megatron_het.plan import Plan, PlanError
from megatron_het.plan.placement import PARAMETER, stage_rows, tp_unit
from megatron_het.schedule import kinds
from megatron_het.schedule.cost import Costs, PerChunk
from megatron_het.schedule.deps import Dependencies, Need
from megatron_het.schedule.graph import Graph, collection_paused
from megatron_het.schedule.ir import COMPUTE, Kind, Op, Program
from megatron_het.schedule.joint import aligned_slots
from megatron_het.schedule.memory import LOGITS as LOGITS_BYTES
from megatron_het.schedule.memory import Holdings
from megatron_het.schedule.transfers import Inserts, Moment, Place, slot_inserts, timed_inserts, with_inserts

# Operations of the split vocabulary: each device's part of the word embeddings and of the output layer.


LOGITS, LOGITS_GRADIENT = kinds.Value("the vocabulary forward"), kinds.Value("the vocabulary backward")
EMBEDDING = kinds.Value("the part of the embeddings")
"""On the first stage: the tokens; on others: their part of the embeddings."""


def _team(value: kinds.Value, deps: Dependencies, microbatch: int, piece: int) -> list[Need]:
    """Returns the needs for one value of all devices that a microbatch visits."""
    return [(device, (value, microbatch, piece, 0)) for device in deps.team(microbatch)]


def _last_output(deps: Dependencies) -> kinds.Rule:
    stage, chunk = deps.shape.path[-1]
    return lambda device, op: [
        (deps.runner(stage, op.microbatch), (kinds.Value.OUTPUT, op.microbatch, op.slice, chunk))
    ]


def _loss(deps: Dependencies) -> kinds.Rule:
    """Rule by which other stages wait for the beginning of the last stage's VOCAB_BACKWARD.

    That operation computes the loss and sends its gradient before it computes its own part.  So the
    others wait for its dependencies, not for its end.
    """

    def begun(device: int, op: Op) -> list[Need]:
        last = deps.team(op.microbatch)[-1]
        return [] if last == device else [(last, (LOGITS_GRADIENT, op.microbatch, op.slice, 0))]

    return begun


def _tokens(deps: Dependencies) -> kinds.Rule:
    def needs(device: int, op: Op) -> list[Need]:
        first = deps.first(op.microbatch)
        return [] if device == first else [(first, (EMBEDDING, op.microbatch, op.slice, 0))]

    return needs


def _first_gradient(deps: Dependencies) -> kinds.Rule:
    """The gradient of the input of the model's first chunk."""
    chunk = deps.shape.path[0][1]
    return lambda device, op: [(deps.first(op.microbatch), (kinds.Value.GRADIENT, op.microbatch, op.slice, chunk))]


def _keep_logits(held: Holdings) -> Any:
    def change(node: int, op: Op) -> None:
        if held.logits:
            logits = held.logits * held.size(op)
            held.found.append((held.start[node], logits, LOGITS_BYTES))
            if held.program.forward_only:
                held.found.append((held.end[node], -logits, LOGITS_BYTES))

    return change


def _use_up_logits(held: Holdings) -> Any:
    def change(node: int, op: Op) -> None:
        if held.logits:
            held.found.append((held.end[node], -held.logits * held.size(op), LOGITS_BYTES))

    return change


_PART = kinds.NEITHER | {
    "executor": "vocabulary",
    "stream": kinds.Stream.COMPUTE,
    "role": kinds.Role.OTHER,
    "works": True,
    "meets": True,
    "fields": kinds.PASS_FIELDS,
    "effect": kinds.NO_EFFECT,
    "colour": (0.30, 0.0, 0.90),
}
_FORWARDS, _BACKWARDS = {"direction": kinds.Direction.FORWARD}, {"direction": kinds.Direction.BACKWARD}

# fmt: off
kinds.add_kinds({
    # This device's part of the output layer and of the cross entropy.
    "VOCAB_FORWARD": _PART | _FORWARDS | {
        "mnemonic": "VF", "in_last_chunk": True, "needs": kinds.Needs(_last_output), "makes": LOGITS,
        "effect": kinds.Effect(memory=_keep_logits),
        "price": kinds.Price(seconds=lambda prices: prices.per_slice_of_device(prices.costs.vocab_forward_s))},
    "VOCAB_BACKWARD": _PART | _BACKWARDS | {
        "mnemonic": "VB", "in_last_chunk": True, "needs": kinds.Needs(
            lambda deps: lambda device, op: _team(LOGITS, deps, op.microbatch, op.slice), begun=_loss, are_shared=True),
        "makes": LOGITS_GRADIENT, "effect": kinds.Effect(memory=_use_up_logits),
        "price": kinds.Price(seconds=lambda prices: prices.per_slice_of_device(prices.costs.vocab_backward_s))},
    # This device's part of the word embeddings of a slice; on the first stage: the tokens leave.
    "EMBED_FORWARD": _PART | _FORWARDS | {
        "mnemonic": "EF", "needs": kinds.Needs(_tokens), "makes": EMBEDDING,
        "price": kinds.Price(seconds=lambda prices: prices.per_slice_of_device(prices.costs.embed_forward_s))},
    # Gradient of this device's part; on the first stage: the gradient of the embeddings leaves.
    "EMBED_BACKWARD": _PART | _BACKWARDS | {
        "mnemonic": "EB", "needs": kinds.Needs(_first_gradient),
        "price": kinds.Price(seconds=lambda prices: prices.per_slice_of_device(prices.costs.embed_backward_s))},
})
# fmt: on


class _VocabularyRules(kinds.Rules):
    """Passes at the ends of the model need the parts of all devices."""

    def first_input(self, program: Program) -> kinds.Ends | None:
        """All parts of the embeddings."""
        return functools.partial(_team, EMBEDDING) if program.embedding else None

    def last_gradient(self, program: Program) -> kinds.Ends | None:
        """All gradients of the logits."""
        return functools.partial(_team, LOGITS_GRADIENT) if program.splits_output else None


kinds.RULES.append(_VocabularyRules())


# Splits the word embeddings and the output layer over the devices of each microbatch (SlimPipe, section 4.3).


@collection_paused()
def add_embedding(program: Program, *, speeds: Sequence[float] | None = None) -> Program:
    """The program with EMBED_FORWARD and EMBED_BACKWARD on every device that a microbatch visits.

    The first stage sends tokens, and receives the parts of their embeddings, while it still runs the
    operation before the slice's first FORWARD.  It sends the gradient of the embeddings after the slice's
    last BACKWARD.  A replay of the program with nominal durations gives the positions on other devices.
    Run this after ``add_vocabulary`` and before transfers are added.

    Args:
        program: without transfers.

    Raises:
        ValueError: the program has split embeddings or transfers already.
    """
    if program.embedding or program.has_transfers:
        raise ValueError(f"program {program.name}: embeddings are split once, before transfers are added")
    if program.attention_units:
        return with_inserts(program, _embeddings_by_slot(program))
    return with_inserts(program, timed_inserts(program, speeds, _first_chunk, _EMBEDDING_FORWARD, _EMBEDDING_BACKWARD))


# On all devices the operations before an EMBED_FORWARD have ended by its moment, and those after it have not.  So
# nothing before it depends on anything after it, and the result runs.  Nothing depends on an EMBED_BACKWARD.
_EMBEDDING_FORWARD = Place(Kind.EMBED_FORWARD, ahead=True, own=None)
_EMBEDDING_BACKWARD = Place(Kind.EMBED_BACKWARD, ahead=False, own=1)


def _embeddings_by_slot(program: Program) -> Inserts:
    """Inserts under the context exchange, slot by slot: one slot before the forward, and one after the backward."""
    stage, chunk = program.shape.path[0]
    wanted = []
    for s, (_, backward, passes) in enumerate(aligned_slots(program)):
        for d, op in passes.items():
            if program.devices[d].stage == stage and op.chunk == chunk:
                kind = Kind.EMBED_BACKWARD if backward else Kind.EMBED_FORWARD
                wanted.append((s + 1 if backward else max(s - 1, 0), Op(kind, op.microbatch, op.slice)))
    return slot_inserts(program, sorted(wanted, key=lambda place: place[0]))


def _first_chunk(graph: Graph, start: Sequence[float], end: Sequence[float]) -> Iterator[Moment]:
    """Times of the model's first chunk: when the operation before a forward begins, and when a backward ends."""
    stage, chunk = graph.program.shape.path[0]
    for d, device in enumerate(graph.program.devices):
        before = 0.0  # when the compute operation before began
        for node in range(graph.first[d], graph.first[d + 1]) if device.stage == stage else ():
            op = graph.ops[node]
            if op.kind in COMPUTE:
                if op.chunk == chunk and op.kind.sent_by is not None:
                    backward = op.kind.direction is kinds.Direction.BACKWARD
                    yield Moment(end[node] if backward else before, backward, node)
                before = start[node]


@collection_paused()
def add_vocabulary(program: Program, *, speeds: Sequence[float] | None = None) -> Program:
    """The program with VOCAB_FORWARD and VOCAB_BACKWARD on every device that a microbatch visits.

    The vocabulary forward of a slice goes to the end of the slot in which the last chunk ran the slice, the
    vocabulary backward to the start of the slot of its first backward.  Where passes are not aligned in
    slots, a replay of the program with nominal durations gives these positions.  Run this after the
    exchange and before transfers are added.

    Args:
        program: without transfers.

    Raises:
        ValueError: the program has vocabulary operations or transfers already.
    """
    if program.splits_output or program.has_transfers:
        raise ValueError(f"program {program.name}: the vocabulary is split once, before transfers are added")
    inserts = _by_slot(program) or timed_inserts(
        program, speeds, _last_chunk, _FORWARD, _BACKWARD, _between_the_sweeps(program)
    )
    return replace(with_inserts(program, inserts), splits_output=True)


# A VOCAB_FORWARD goes before the operations that start at or after the end of the last chunk's forward.  A
# VOCAB_BACKWARD goes after the operations that have ended when the last chunk's backward begins: after a running one it
# would be too late.  Both go after earlier inserts.  So no operation before an insert depends on one after the same
# insert on another device, and the result runs, even if the devices wait for each other there.
_FORWARD = Place(Kind.VOCAB_FORWARD, ahead=False, own=1)
_BACKWARD = Place(Kind.VOCAB_BACKWARD, ahead=True, own=0)


def _by_slot(program: Program) -> Inserts | None:
    """Inserts at slot boundaries; None when passes are not aligned."""
    try:
        slots = aligned_slots(program)
    except ValueError:
        return None
    stage, chunk = program.shape.path[-1]
    wanted = [
        (s + (not backward), Op(Kind.VOCAB_BACKWARD if backward else Kind.VOCAB_FORWARD, op.microbatch, op.slice))
        for s, (_, backward, passes) in enumerate(slots)
        for d, op in passes.items()
        if program.devices[d].stage == stage and op.chunk == chunk
    ]
    return slot_inserts(program, wanted)


def _between_the_sweeps(program: Program) -> list[tuple[int, int]] | None:
    """Positions of parts on stages without a chunk in the last sweep, if microbatches go sweep by sweep.

    Parts run in the middle of the last sweep.  A stage with a chunk in it has ended the earlier sweeps.  A stage
    without one must have ended them, too: replicas of other stages may open the chunks of the last sweep together, and
    wait for all microbatches of the sweep before.  Likewise in the backward.
    """
    most = max(map(len, program.shape.layers))
    rows = [[op.chunk for op in ops if op.kind is Kind.FORWARD] for ops in program.ops]
    if min(map(len, program.shape.layers)) == most or any(row != sorted(row) for row in rows):
        return None
    bounds = []
    for ops, device in zip(program.ops, program.devices):
        backwards = [i for i, op in enumerate(ops) if op.kind in COMPUTE and op.kind is not Kind.FORWARD]
        forwards = [i + 1 for i, op in enumerate(ops) if op.kind is Kind.FORWARD]
        lacks = len(program.shape.layers[device.stage]) < most
        bounds.append((max(forwards, default=0), min(backwards, default=len(ops))) if lacks else (0, len(ops)))
    return bounds


def _last_chunk(graph: Graph, start: Sequence[float], end: Sequence[float]) -> Iterator[Moment]:
    """The ends of the forwards and the starts of the backwards of the model's last chunk."""
    stage, chunk = graph.program.shape.path[-1]
    for d, device in enumerate(graph.program.devices):
        for node in range(graph.first[d], graph.first[d + 1]) if device.stage == stage else ():
            op = graph.ops[node]
            if op.kind in COMPUTE and op.chunk == chunk and op.kind.sent_by is not None:
                backward = op.kind.direction is kinds.Direction.BACKWARD
                yield Moment(start[node] if backward else end[node], backward, node)


_SWITCH = "--het-vocabulary-parallel"
_MOST_SHARE = 1_000_000


@dataclass(frozen=True, slots=True)
class VocabularyOptions:
    """How the rows of the vocabulary are divided over stages."""

    # rows of each stage, relative to the others; none for equal ones
    shares: tuple[int, ...] = option(
        PARAMETER,
        (),
        accepts=lambda value, plan: (
            len(value) == len(plan.stages)
            and all(isinstance(share, int) and not isinstance(share, bool) for share in value)
            and all(1 <= share <= _MOST_SHARE for share in value)
        ),
        problem=lambda plan: (
            f"must be a list of {len(plan.stages)} whole numbers, one per stage, each of 1 to {_MOST_SHARE}: the rows "
            "that a stage holds, relative to the others"
        ),
    )


class Vocabulary(Feature):
    """Splits embedding, output layer and loss over all stages."""

    name = "vocabulary"
    title = "split vocabulary"
    called = _SWITCH
    holds_rows_once = True
    view_flags = (ViewFlag("--vocabulary", "split embedding and output layer over the devices"),)
    options = VocabularyOptions
    switch = Option(
        "vocabulary",
        flag=_SWITCH,
        help="split embedding, output layer and loss over all stages and TP ranks",
        problem="must be true or false",
    )
    upstream_names: ClassVar[Mapping[str, str]] = {
        "megatron.core.pipeline_parallel.schedules.forward_step_calc_loss": "684294ee76a344fe",
        "megatron.core.pipeline_parallel.schedules.custom_backward": "d3ae4cec7fe57a12",
        "megatron.core.tensor_parallel.layers.ColumnParallelLinear.forward": "b3d148e587f2cecb",
        "megatron.core.tensor_parallel.layers.VocabParallelEmbedding.forward": "7d5adeccbc3774f0",
        "megatron.core.models.gpt.gpt_model.GPTModel._preprocess": "4675914da72daa91",
        "megatron.core.models.gpt.gpt_model.GPTModel._postprocess": "bc1e30d1679f6b95",
    }
    refused = (
        Refusal("fp16_lm_cross_entropy", "the split cross entropy is computed in fp32"),
        Refusal("fp8_output_proj", "the split output layer computes in the precision of the model"),
    )

    def viewed(self, flags: Mapping[str, Any]) -> VocabularyOptions | None:
        """Returns the options if the switch is given; None without it."""
        return VocabularyOptions() if flags["vocabulary"] else None

    def check_arguments(self, plan: Plan, options: VocabularyOptions, args: Any) -> None:
        """Refuse the arguments of the table, and a vocabulary that the stages cannot divide."""
        super().check_arguments(plan, options, args)
        if getattr(args, "cross_entropy_loss_fusion", False) and args.cross_entropy_fusion_impl != "native":
            problem = f"cannot be used with {_SWITCH}: its kernel needs whole logits"
            raise PlanError("--cross-entropy-fusion-impl", args.cross_entropy_fusion_impl, problem, "Use native")
        # It is padded to a multiple of the last one times the TP sizes (``config.apply_plan``).
        unit, padded = tp_unit(plan), getattr(args, "padded_vocab_size", None)
        rows = args.make_vocab_size_divisible_by * unit if padded is None else padded
        try:
            stage_rows(plan, rows)
        except ValueError as error:
            stages = len(plan.stages)
            name, least = ("--padded-vocab-size", stages * unit)
            if padded is None:
                name, rows, least = "--make-vocab-size-divisible-by", args.make_vocab_size_divisible_by, stages
            raise PlanError(name, rows, str(error), f"Use a multiple of {least}") from error

    def check_program(self, program: Callable[[], Program], options: VocabularyOptions, args: Any) -> None:
        """Refuse ``--overlap-grad-reduce`` where replicas would start reductions in different orders."""
        check_reductions_meet(program, args, _SWITCH)

    def before_transfers(self, program: Program, options: VocabularyOptions, speeds: Sequence[float] | None) -> Program:
        """The program in which every device has its part of the output layer and of the embeddings."""
        return add_embedding(add_vocabulary(program, speeds=speeds), speeds=speeds)

    def price(self, costs: Costs, options: VocabularyOptions, program: Program, figures: Figures) -> Costs:
        """Divide the costs of embedding and output layer from the first and the last chunk over all stages."""
        stages = program.shape.stages
        shares = options.shares or [1] * stages
        first, last = program.shape.path[0], program.shape.path[-1]

        def without(table: PerChunk, embedding: Sequence[float], head: Sequence[float]) -> PerChunk:
            rows = [list(row) for row in table]
            for d, device in enumerate(program.devices):
                for (stage, chunk), taken in ((first, embedding[d]), (last, head[d])):
                    if device.stage == stage:
                        rows[d][chunk] = max(0.0, rows[d][chunk] - taken)
            return tuple(map(tuple, rows))

        def part(row: Sequence[float]) -> tuple[float, ...]:
            held = (shares[device.stage] for device in program.devices)
            return tuple(value * share / sum(shares) for value, share in zip(row, held, strict=True))

        f = figures
        return replace(
            costs,
            forward_s=without(costs.forward_s, f.embedding_forward_s, f.head_forward_s),
            backward_s=without(costs.backward_s, f.embedding_backward_s, f.head_backward_s),
            vocab_forward_s=part(f.head_forward_s),
            vocab_backward_s=part(f.head_backward_s),
            embed_forward_s=part(f.embedding_forward_s),
            embed_backward_s=part(f.embedding_backward_s),
            memory=replace(costs.memory, logits_bytes=part(f.head_bytes)),
        )
