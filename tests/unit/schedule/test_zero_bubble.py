"""ZB-H1 against 1F1B in the simulator: less idle time within the same memory, also on mixed stages."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_helpers import full, peaks, run

from megatron_het.schedule import Costs, Kind, Link, Memory, Shape, add_transfers, generate, simulate
from megatron_het.schedule.validate import validate


@given(st.integers(2, 6), st.integers(1, 3))
def test_its_bubble_is_a_third_of_that_of_1f1b(stages: int, rounds: int) -> None:
    """Forward and both halves of the backward take equally long: (p - 1) instead of 3 (p - 1) passes are idle."""
    shape = Shape.uniform(stages, stages * rounds)
    half, plain = run(full("zb-h1", shape)), run(full("1f1b", shape))
    assert plain.bubble_fraction == pytest.approx((stages - 1) / shape.microbatches)
    assert half.bubble_fraction < plain.bubble_fraction
    if rounds > 1:
        assert half.bubble_fraction == pytest.approx((stages - 1) / (3 * shape.microbatches))
    assert max(peaks(half)) <= max(peaks(plain)) + 1e-9  # ZB-H1 keeps to the memory of 1F1B's first stage


def test_it_is_faster_on_mixed_stages() -> None:
    """Stages with one and two replicas, and messages that take time."""
    shape = Shape(((3,), (2,), (2,)), ((0, 0) * 4, (0, 1) * 4, (0, 0) * 4), (1, 2, 1))
    speeds = (2.0, 0.7, 0.7, 1.4)
    costs = replace(
        Costs.of(shape, layer_forward_s=(0.5, 1.4, 1.4, 0.7), layer_backward_s=(1.0, 2.8, 2.8, 1.4)),
        message_bytes=1.0,
        link=lambda a, b: Link(0.05, 10.0),
    )
    seconds = {}
    for name in ("1f1b", "zb-h1"):
        program = add_transfers(generate(name, shape, speeds=speeds), speeds=speeds)
        assert validate(program) == []
        seconds[name] = simulate(program, costs).makespan_s
    assert seconds["1f1b"] > 1.05 * seconds["zb-h1"]


def test_activations_stay_until_the_weight_gradient() -> None:
    """The gradient of the input leaves after I; what the layers keep goes with W."""
    shape = Shape.uniform(2, 3)
    program = full("zb-h1", shape)
    memory = Memory(activation_bytes=((1.0,), (1.0,)))
    result = run(program, memory=memory)
    for device, ops in enumerate(program.ops):
        node = {(op.kind, op.microbatch): result.graph.first[device] + i for i, op in enumerate(ops)}
        freed = sorted(time for time, amount, _ in result.memory[device].changes if amount < 0)
        assert freed == sorted(result.end_s[node[Kind.BACKWARD_WEIGHT, m]] for m in range(3))
        if device:
            for m in range(3):
                send, half = node[Kind.SEND_BACKWARD, m], node[Kind.BACKWARD_INPUT, m]
                assert result.start_s[send] >= result.end_s[half]
                assert result.start_s[send] < result.end_s[node[Kind.BACKWARD_WEIGHT, m]]
