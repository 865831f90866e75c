"""Several chunks per stage: programs, handovers on one device, arguments."""

from types import SimpleNamespace

from megatron_het.arguments.megatron_args import apply_after_validation
from megatron_het.families import pipeline_layout
from megatron_het.lowering.programs import build
from megatron_het.lowering.ranks import BoundaryMap, lower
from megatron_het.plan import ModelShape, Placement, Plan, Replica, ScheduleSpec, Stage, TrainingShape
from megatron_het.schedule.ir import SENDS, Kind


def ministage_plan(layers: tuple[tuple[int, ...], ...], replicas: tuple[int, ...], **parameters: object) -> Plan:
    """Stages of replicas of one rank; 4 microbatches, the first replica gets the odd ones out."""
    rank, stages = 0, []
    for chunks, count in zip(layers, replicas, strict=True):
        owners = [min(m, count - 1) for m in range(4)]
        found = []
        for q in range(count):
            found.append(Replica((rank,), tuple(m for m in range(4) if owners[m] == q)))
            rank += 1
        stages.append(Stage(chunks, tuple(found)))
    model = ModelShape(sum(map(sum, layers)), 64, 4, 2, 32)
    training = TrainingShape(1, 4, distributed_optimizer=True)
    return Plan(model, training, tuple(stages), ScheduleSpec("ministage", dict(parameters)))


def test_a_single_stage_hands_every_result_over_to_its_next_chunk() -> None:
    placement = Placement(ministage_plan(((1, 2, 1),), (2,)))
    program = build(placement.plan)[False]
    for rank in range(2):
        lowered = lower(program, BoundaryMap(placement, 32, False), rank, rank)
        assert not lowered.sends
        mine = placement.replica(0, rank).microbatches
        forward = {s: r for s, r in lowered.handovers.items() if s[0] == Kind.SEND_FORWARD}
        assert forward == {
            (Kind.SEND_FORWARD, (m, 0, c)): (Kind.RECV_FORWARD, (m, 0, c + 1)) for m in mine for c in range(2)
        }
        backward = {s: r for s, r in lowered.handovers.items() if s[0] == Kind.SEND_BACKWARD}
        assert backward == {
            (Kind.SEND_BACKWARD, (m, 0, c + 1)): (Kind.RECV_BACKWARD, (m, 0, c)) for m in mine for c in range(2)
        }


def test_several_stages_hand_nothing_over_and_use_the_wrap_around_edge() -> None:
    placement = Placement(ministage_plan(((1, 1), (1, 1)), (1, 1)))
    program = build(placement.plan)[False]
    first, last = (lower(program, BoundaryMap(placement, 32, False), d, d) for d in range(2))
    assert not first.handovers and not last.handovers
    wrapped = [op for op in last.ops if op.kind == Kind.SEND_FORWARD]
    assert {(op.chunk, op.peer) for op in wrapped} == {(0, 0)}
    assert sum(op.kind in SENDS for op in first.ops) == 4 * 2 + 4


def test_chunks_of_a_single_stage_reach_the_arguments_after_validation() -> None:
    plan = ministage_plan(((1, 0, 2),), (1,))
    assert pipeline_layout(plan) == "Et||ttL"
    args = SimpleNamespace(pipeline_model_parallel_layout=None, virtual_pipeline_model_parallel_size=None)
    apply_after_validation(plan, args)
    assert args.pipeline_model_parallel_layout == "Et||ttL"
    assert args.virtual_pipeline_model_parallel_size == 3
    other = SimpleNamespace(virtual_pipeline_model_parallel_size=2)
    apply_after_validation(ministage_plan(((1, 1), (1, 1)), (1, 1)), other)
    assert other.virtual_pipeline_model_parallel_size == 2
