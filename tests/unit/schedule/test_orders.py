"""Compute orders against Megatron's rule and against PyTorch's schedules."""

import math
import subprocess
import sys
from unittest.mock import MagicMock

import pytest

from megatron_het.schedule import Costs, Kind, Link, Op, Program, Shape, add_transfers, generate, simulate
from megatron_het.schedule.generators.one_f_one_b import in_flight_limits
from megatron_het.schedule.validate import validate


def compact(program: Program, device: int) -> list[tuple[str, int, int]]:
    """(F or B, stage of the whole model, microbatch)."""
    stages = program.shape.stages
    return [(op.kind.name[0], device + stages * op.chunk, op.microbatch) for op in program.compute(device)]


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 2), (3, 7), (4, 4), (4, 9)])
def test_one_f_one_b_equals_megatron_and_pytorch(stages: int, microbatches: int) -> None:
    """Warm-up of stages - 1 - stage forwards; PyTorch's own step function, recorded."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    program = generate("1f1b", Shape.uniform(stages, microbatches))
    for rank in range(stages):
        warmup = stages - 1 - rank
        pairs = range(microbatches - warmup)
        steady = [(kind, rank, i + (warmup if kind == "F" else 0)) for i in pairs for kind in "FB"]
        first = [("F", rank, i) for i in range(warmup)]
        last = [("B", rank, i) for i in range(microbatches - warmup, microbatches)]
        assert compact(program, rank) == first + steady + last
        schedule = object.__new__(schedules.Schedule1F1B)
        calls: list[tuple[str, int, int]] = []
        stage = MagicMock(stage_index=rank)
        stage.forward_one_chunk.side_effect = lambda i, *_, **__: calls.append(("F", rank, i))  # noqa: B023
        stage.backward_one_chunk.side_effect = lambda i, **_: calls.append(("B", rank, i))  # noqa: B023
        for name in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
            getattr(stage, name).return_value = []
        values = {
            "_stage": stage,
            "_n_microbatches": microbatches,
            "_num_stages": stages,
            "scale_grads": True,
            "_check_inputs": lambda *_: ([()] * microbatches, [{}] * microbatches),
            "_initialize_stage": MagicMock(),
            "_maybe_compute_loss": MagicMock(),
            "_maybe_get_loss": MagicMock(),
            "_update_losses": MagicMock(),
        }
        for name, value in values.items():
            setattr(schedule, name, value)
        schedule._step_microbatches()
        assert compact(program, rank) == calls


def pytorch_orders(name: str, stages: int, microbatches: int, chunks: int) -> list[list[tuple[str, int, int]]]:
    """Orders of a private PyTorch schedule class, without building stages."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule = object.__new__(getattr(schedules, name))
    schedule.pp_group_size, schedule._n_microbatches = stages, microbatches
    schedule.n_local_stages, schedule._stages = chunks, [None] * chunks
    schedule.number_of_rounds = max(1, microbatches // stages)
    schedule.microbatches_per_round = microbatches // schedule.number_of_rounds
    orders = []
    for rank in range(stages):
        actions = [a for a in schedule._calculate_single_rank_operations(rank) if a is not None]
        kept = [a for a in actions if a.computation_type.name in ("FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT")]
        letters = ["F" if a.computation_type.name == "FORWARD" else "B" for a in kept]
        orders.append([(letter, a.stage_index, a.microbatch_index) for letter, a in zip(letters, kept)])
    return orders


@pytest.mark.parametrize(("stages", "microbatches", "chunks"), [(1, 2, 3), (2, 3, 2), (4, 2, 3), (4, 8, 1), (3, 5, 4)])
def test_ministage_equals_looped_bfs(stages: int, microbatches: int, chunks: int) -> None:
    """Zorse's schedule is breadth-first pipeline parallelism."""
    program = generate("ministage", Shape.uniform(stages, microbatches, chunks=chunks))
    expected = pytorch_orders("ScheduleLoopedBFS", stages, microbatches, chunks)
    assert [compact(program, rank) for rank in range(stages)] == expected


@pytest.mark.parametrize(("stages", "microbatches", "chunks"), [(2, 4, 2), (4, 8, 2), (4, 12, 3), (3, 3, 2)])
def test_interleaved_equals_pytorch(stages: int, microbatches: int, chunks: int) -> None:
    """Interleaved 1F1B."""
    program = generate("interleaved", Shape.uniform(stages, microbatches, chunks=chunks))
    expected = pytorch_orders("ScheduleInterleaved1F1B", stages, microbatches, chunks)
    assert [compact(program, rank) for rank in range(stages)] == expected


def test_slimpipe_order() -> None:
    """Groups of 2p slices per chunk, the rest at the end; the backward exactly reversed within the microbatch."""
    program = generate("slimpipe", Shape.uniform(2, 2, slices=6, chunks=2))
    forward = [(op.microbatch, op.chunk, op.slice) for op in program.ops[1] if op.kind == Kind.FORWARD]
    one = [(c, s) for group in (range(4), range(4, 6)) for c in (0, 1) for s in group]
    assert forward == [(m, c, s) for m in (0, 1) for c, s in one]
    backward = [(op.microbatch, op.chunk, op.slice) for op in program.ops[1] if op.kind == Kind.BACKWARD]
    assert backward == [(m, c, s) for m in (0, 1) for c, s in reversed(one)]
    for stage in range(2):
        kinds = [op.kind for op in program.ops[stage]]
        assert kinds.index(Kind.BACKWARD) == 6 * 2 + 2 * (1 - stage)


def test_faster_replicas_get_ahead() -> None:
    """A replica with more microbatches may have more in flight; speeds shape the order."""
    shape = Shape(((1,), (1,)), ((0, 0, 1, 0, 0, 1), (0,) * 6), (2, 1))
    program = generate("1f1b", shape, speeds=(2.0, 1.0, 3.0))
    for d, own in ((0, [0, 1, 3, 4]), (1, [2, 5])):
        assert [op.microbatch for op in program.ops[d] if op.kind == Kind.FORWARD] == own
    with pytest.raises(ValueError, match="2 values for 3 devices"):
        generate("1f1b", shape, speeds=(1.0, 1.0))
    with pytest.raises(ValueError, match="is not positive"):
        generate("1f1b", shape, speeds=(1.0, 0.0, 1.0))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("1f1b", Shape.uniform(2, 2, chunks=2), "exactly one chunk"),
        ("1f1b", Shape.uniform(2, 2, slices=2), "slices = 2"),
        ("gpipe", Shape.uniform(2, 2, slices=2), "slices = 2"),
        ("interleaved", Shape.uniform(4, 6, chunks=2), "leave a group of 2"),
        ("ministage", Shape.uniform(2, 2, slices=2), "slices = 2"),
        ("slimpipe", Shape.uniform(4, 2, slices=6, chunks=2), "a multiple of the 4 stages"),
        ("slimpipe", Shape(((1, 1), (1,)), ((0,), (0,)), (1, 1), 3), "with 2 chunks .* a multiple of the 2 stages"),
        ("seq1f1b", Shape(((1, 1), (1,)), ((0,), (0,)), (1, 1), 2), "one chunk per stage only"),
        ("seq1f1b", Shape.uniform(2, 2, slices=2, chunks=2), "one chunk per stage only"),
        ("zb-v", Shape.uniform(2, 2, chunks=2), "must be v"),
        ("zb-v", Shape.uniform(2, 2, placement="v"), "exactly 2 chunk"),
        ("v-half", Shape.uniform(2, 2, chunks=2, slices=2, placement="v"), "slices = 2"),
    ],
)
def test_shapes_that_do_not_fit(name: str, shape: Shape, message: str) -> None:
    """One error that names schedule, field and value."""
    with pytest.raises(ValueError, match=f"schedule {name}: .*{message}"):
        generate(name, shape)


def test_unknown_schedule() -> None:
    """The known ones are listed."""
    with pytest.raises(ValueError, match="'2f2b': unknown .*1f1b.*slimpipe"):
        generate("2f2b", Shape.uniform(2, 2))


def test_imports_without_torch_and_numpy() -> None:
    """The package stands alone."""
    code = (
        "import sys, megatron_het.schedule, megatron_het.schedule.view.cli\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'rich', 'megatron'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def held(program: Program, device: int) -> int:
    """The most forwards that wait for their backward."""
    now = most = 0
    for op in program.compute(device):
        now += 1 if op.kind == Kind.FORWARD else -1
        most = max(most, now)
    return most


def test_slack_shortens_pipelines_of_unequal_width() -> None:
    """One fast device feeds four slow ones: with slack they find their next input waiting; the limit holds."""
    shape = Shape(layers=((3,), (12,)), route=((0,) * 16, (0, 1, 2, 3) * 4), replicas=(1, 4))
    seconds = []
    for slack in (0.0, 0.5, 1.0):
        program = generate("1f1b", shape, slack=slack)
        limits = in_flight_limits(shape, slack)
        assert limits == [1 + round(4 * (1 + slack)), 1, 1, 1, 1]
        assert [held(program, d) for d in range(5)] == limits
        costs = Costs(
            forward_s=((1.0,), *[(4.0,)] * 4),
            backward_s=((2.0,), *[(8.0,)] * 4),
            message_bytes=1.0,
            link=lambda a, b: Link(0.0, 2.0),
        )
        seconds.append(simulate(add_transfers(program), costs).makespan_s)
    assert seconds[2] <= seconds[1] < seconds[0]
    assert seconds[0] > 1.1 * seconds[2]


def test_slack_changes_nothing_where_stages_divide_alike() -> None:
    shape = Shape(layers=((2,),) * 3, route=((0, 1, 0, 1, 0, 1),) * 3, replicas=(2, 2, 2))
    assert generate("1f1b", shape, slack=0.0) == generate("1f1b", shape) == generate("1f1b", shape, slack=2.0)
    uniform = Shape.uniform(4, 8)
    assert generate("1f1b", uniform, slack=0.0) == generate("1f1b", uniform)


@pytest.mark.parametrize("slack", [-0.1, float("inf"), "much"])
def test_slack_must_be_a_number(slack: object) -> None:
    with pytest.raises(ValueError, match="slack"):
        generate("1f1b", Shape.uniform(2, 2), slack=slack)


@pytest.mark.parametrize(
    "route", [((0, 1, 0, 1, 0, 1), (0,) * 6), ((0,) * 6, (0, 0, 1, 0, 0, 1)), ((1, 0) * 3, (0, 1) * 3)]
)
@pytest.mark.parametrize("speeds", [None, (1.0, 2.0, 0.5)])
def test_zero_bubble_with_replicas_runs_within_the_memory_of_1f1b(
    route: tuple[tuple[int, ...], ...], speeds: tuple[float, ...] | None
) -> None:
    """Several replicas with unequal shares: every part of the work once, in an order that cannot stop."""
    replicas = tuple(max(row) + 1 for row in route)
    shape = Shape(((2,), (2,)), route, replicas)
    if speeds is not None:
        speeds = (*speeds, 1.0)[: len(shape.devices)]
    for forward_only in (False, True):
        program = generate("zb-h1", shape, forward_only=forward_only, speeds=speeds)
        assert validate(add_transfers(program, speeds=speeds)) == []
    program = generate("zb-h1", shape, speeds=speeds)
    for device, ops in enumerate(program.ops):
        held = most = 0
        for op in ops:
            held += (op.kind == Kind.FORWARD) - (op.kind == Kind.BACKWARD_WEIGHT)
            most = max(most, held)
        share = len(shape.microbatches_of(device)) / shape.microbatches
        assert most <= max(in_flight_limits(shape)[device], 1 + math.ceil(share * sum(replicas[1:])))


ROUTES = [((0, 1, 0, 1, 0, 1), (0,) * 6), ((0, 0, 0, 1, 1, 1), (0, 0, 1, 0, 0, 1)), ((1, 0) * 3, (0, 1) * 3, (0,) * 6)]


@pytest.mark.parametrize("name", ["zb-v", "v-half"])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("speeds", [None, (1.0, 2.0, 0.5, 1.0, 1.0)])
def test_a_v_with_replicas_holds_no_more_than_one_pipeline(
    name: str, route: tuple[tuple[int, ...], ...], speeds: tuple[float, ...] | None
) -> None:
    """Replicas with unequal shares: no device holds more chunks than in a pipeline without replicas."""
    stages = len(route)
    shape = Shape(((2, 1),) * stages, route, tuple(max(row) + 1 for row in route), placement="v")
    if speeds is not None:
        speeds = speeds[: len(shape.devices)]
    for forward_only in (False, True):
        program = generate(name, shape, forward_only=forward_only, speeds=speeds)
        assert validate(add_transfers(program, speeds=speeds)) == []
    alone = generate(name, Shape.uniform(stages, 24, chunks=2, placement="v"))
    bound = max(map(most_held, alone.ops))
    assert max(map(most_held, generate(name, shape, speeds=speeds).ops)) <= bound


def most_held(ops: tuple[Op, ...]) -> int:
    """The most chunks of microbatches between their forward and their weight gradients."""
    held = most = 0
    for op in ops:
        held += (op.kind == Kind.FORWARD) - (op.kind == Kind.BACKWARD_WEIGHT)
        most = max(most, held)
    return most


def test_equal_replicas_of_a_v_run_as_pipelines_alone() -> None:
    """Two replicas that share the microbatches have the order of one, each with its own microbatches."""
    alone = generate("zb-v", Shape.uniform(3, 6, chunks=2, placement="v"))
    both = generate("zb-v", Shape(((1, 1),) * 3, ((0, 1) * 6,) * 3, (2,) * 3, placement="v"))
    for device, ops in zip(both.devices, both.ops, strict=True):
        own = [op._replace(microbatch=2 * op.microbatch + device.replica) for op in alone.ops[device.stage]]
        assert list(ops) == own
