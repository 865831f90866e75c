"""Shapes, operations and programs: checks and the exact text form."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_helpers import full

from megatron_het.schedule import Device, Kind, Op, ScheduleSyntaxError, Shape, dumps, generate, loads
from megatron_het.schedule.ir import parse_op

HET = Shape(((2, 1), (3,), (1, 1, 2)), ((0, 0, 0), (0, 1, 0), (1, 0, 1)), (1, 2, 2))


def test_devices_are_numbered_stage_major() -> None:
    assert HET.devices == (Device(0, 0), Device(1, 0), Device(1, 1), Device(2, 0), Device(2, 1))
    assert HET.device(1, 1) == 2
    assert [HET.runner(2, m) for m in range(3)] == [4, 3, 4]
    assert HET.microbatches_of(4) == (0, 2)
    with pytest.raises(ValueError, match="no replica 2 of stage 1"):
        HET.device(1, 2)


def test_a_microbatch_visits_chunks_in_order() -> None:
    assert HET.path == ((0, 0), (1, 0), (2, 0), (0, 1), (2, 1), (2, 2))
    assert HET.next(0, 1) == (2, 1) and HET.previous(0, 1) == (2, 0)
    assert HET.previous(0, 0) is None and HET.next(2, 2) is None
    v = Shape.uniform(3, 1, chunks=2, placement="v")
    assert v.path == ((0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": ()}, "at least one stage"),
        ({"layers": ((1,), ())}, r"layers\[1\]"),
        ({"layers": ((1,), (-2,))}, r"layers\[1\]"),
        ({"route": ((0, 0),)}, "route has 1 entries for 2 stages"),
        ({"route": ((0, 0), (0,))}, r"route\[1\] has 1 microbatches"),
        ({"route": ((), ())}, "at least one microbatch"),
        ({"replicas": (1,)}, "replicas has 1 entries"),
        ({"replicas": (1, 0)}, r"replicas\[1\] = 0"),
    ],
)
def test_bad_shapes(changes: dict[str, object], message: str) -> None:
    good = {"layers": ((1,), (1,)), "route": ((0, 0), (0, 0)), "replicas": (1, 1)}
    with pytest.raises(ValueError, match=message):
        Shape(**(good | changes))  # type: ignore[arg-type]


def test_immutable() -> None:
    program = generate("1f1b", Shape.uniform(2, 2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        program.name = "other"  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        program.shape.slices = 2  # type: ignore[misc]
    with pytest.raises(AttributeError):
        program.ops[0][0].slice = 1  # type: ignore[misc]
    assert not hasattr(program, "__dict__") and not hasattr(program.ops[0][0], "__dict__")
    assert len({program, generate("1f1b", Shape.uniform(2, 2))}) == 1


def test_for_device_and_compute() -> None:
    program = full("1f1b", Shape(((1,), (1,)), ((0, 0), (0, 1)), (1, 2)))
    assert [op.microbatch for op in program.for_device(1, 1)] == [1] * 4
    assert [op.kind for op in program.compute(2)] == [Kind.FORWARD, Kind.BACKWARD]


NUMBER = st.integers(-1, 300)


@given(st.builds(Op, st.sampled_from(list(Kind)), NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER))
def test_operations_round_trip(op: Op) -> None:
    assert parse_op(str(op)) == op


@pytest.mark.parametrize(
    "text",
    ["", "F", "F0", "F0.0", "F0.0.0 ", " F0.0.0", "F0.0.0>1", "F0.0.0[1]", "f0.0.0", "F-1.0.0", "F0.0.0F0.0.0", "X0.0"],
)
def test_unknown_operations(text: str) -> None:
    with pytest.raises(ScheduleSyntaxError, match="line 3, column 7"):
        parse_op(text, 3, 7)


TEXT = dumps(full("1f1b", Shape(((1,), (2,)), ((0, 0), (0, 1)), (1, 2))))


def test_text_is_exact() -> None:
    assert dumps(loads(TEXT)) == TEXT
    assert loads("# a comment\n\n" + TEXT) == loads(TEXT)
    assert str(loads(TEXT)) == TEXT
