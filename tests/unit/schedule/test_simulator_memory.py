"""What simulated devices hold, and when."""

from dataclasses import replace

import pytest
from schedule_helpers import full, peaks, run

from megatron_het.features.activation_offload.spec import add_activation_offload
from megatron_het.features.context_exchange.passes import add_exchange
from megatron_het.features.vocab_parallel.spec import add_vocabulary
from megatron_het.features.window.passes import add_parameters
from megatron_het.schedule import Costs, Kind, Link, Memory, Shape, add_transfers, generate, simulate
from megatron_het.schedule.memory import CATEGORIES


def test_memory_by_category_by_hand() -> None:
    """One device, two slices: parameters, gradients, activations, keys and values, logits."""
    shape = Shape.uniform(1, 1, slices=2)
    memory = Memory(
        parameter_bytes=((100.0,),),
        gradient_bytes=((50.0,),),
        activation_bytes=((8.0,),),
        kv_bytes=((4.0,),),
        logits_bytes=(6.0,),
        optimizer_bytes=((30.0,),),
        other_bytes=(1.0,),
    )
    use = run(full("slimpipe", shape), memory=memory).memory[0]
    assert use.peak_bytes == 181 + 18 and use.peak_at_s == 0.5
    assert use.at_peak_bytes == dict(zip(CATEGORIES, (100, 50, 30, 8, 4, 6, 0, 1, 0)))
    assert use.curve()[-1][1] == use.curve()[0][1] - 9 == 181
    assert use.peak_of("kv") == 4.0


def test_activations_live_from_forward_start_to_backward_end() -> None:
    """Of the joint backward, or of the weight gradient."""
    memory = Memory(activation_bytes=((8.0,),), kv_bytes=((4.0,),))
    joint = run(full("1f1b", Shape.uniform(1, 1)), memory=memory).memory[0]
    assert joint.curve("activations") == [(0.0, 8.0), (3.0, 0.0)] and joint.curve("kv") == [(0.0, 4.0), (3.0, 0.0)]
    split = run(full("zb-h1", Shape.uniform(1, 1)), 1.0, 2.0, weight_share=0.25, memory=memory)
    assert split.memory[0].curve("activations") == [(0.0, 8.0), (3.0, 0.0)]


def test_receive_buffers_last_until_used() -> None:
    """A message occupies memory from the posting of its receive to its use, and until it is sent (or to the end)."""
    shape = Shape.uniform(2, 2)
    program = full("gpipe", shape, forward_only=True)
    costs = Costs(((1.0,), (10.0,)), ((0.0,), (0.0,)), message_bytes=7.0, link=lambda a, b: Link(0.0, 3.5))
    sender, receiver = simulate(program, costs).memory
    assert receiver.curve("buffers") == [(0.0, 7.0), (3.0, 7.0), (13.0, 0.0)]
    assert sender.curve("buffers") == [(0.0, 0.0), (1.0, 7.0), (2.0, 14.0), (3.0, 7.0), (5.0, 0.0)]
    sender, _ = simulate(program, replace(costs, keeps_sent=True)).memory
    assert sender.curve("buffers") == [(0.0, 0.0), (1.0, 7.0), (2.0, 14.0), (23.0, 0.0)]


def test_workspace_is_there_while_an_operation_runs() -> None:
    """On top of everything that is kept."""
    memory = Memory(activation_bytes=((8.0,),), workspace_bytes=((5.0,),))
    use = run(full("gpipe", Shape.uniform(1, 2)), memory=memory).memory[0]
    assert use.curve("workspace") == [(0.0, 5.0), (1.0, 5.0), (2.0, 5.0), (4.0, 5.0), (6.0, 0.0)]
    assert use.peak_bytes == 2 * 8 + 5


def test_window_memory() -> None:
    """Two of four chunks at most; gradients only of the chunk in backward, shards until the step."""
    shape = Shape.uniform(2, 4, chunks=4)
    table = lambda size: ((size,) * 4,) * 2  # noqa: E731
    memory = Memory(
        parameter_bytes=table(10.0),
        gradient_bytes=table(10.0),
        parameter_shard_bytes=table(1.0),
        gradient_shard_bytes=table(2.0),
    )
    program = add_parameters(full("ministage", shape), offload=True, step="ministage")
    for use in run(program, memory=memory, reduce_s=table(0.5)).memory:
        assert use.peak_of("parameters") == 2 * 10.0 + 3 * 1.0  # the third shard waits for its step
        assert use.peak_of("gradients") <= 2 * 10.0 + 2 * 2.0
        assert use.curve("gradients")[-1][1] == 0
        assert use.curve("parameters")[-1][1] == 0
    whole = run(full("ministage", shape), memory=memory).memory[0]
    assert whole.peak_of("parameters") == 44.0


def test_offload_lowers_the_peak() -> None:
    """Activations leave after the forward and are back for the backward."""
    shape = Shape.uniform(2, 8)
    tables = {"act_offload_s": ((0.2,),) * 2, "act_fetch_s": ((0.2,),) * 2}
    memory = Memory(activation_bytes=((10.0,),) * 2, boundary_bytes=((1.0,),) * 2)
    kept = run(full("gpipe", shape), memory=memory)
    moved = run(add_activation_offload(full("gpipe", shape)), memory=memory, **tables)
    assert max(peaks(kept)) == 80.0
    assert max(peaks(moved)) <= 8 * 1.0 + 3 * 9.0
    assert moved.makespan_s == pytest.approx(kept.makespan_s, abs=0.5)


def test_vocabulary_memory_and_time() -> None:
    """Logits live from the vocabulary forward to the vocabulary backward, on every device."""
    program = add_transfers(add_vocabulary(generate("slimpipe", Shape.uniform(4, 2, slices=8))))
    result = run(
        program,
        8.0,
        16.0,
        vocab_forward_s=(4.0,) * 4,
        vocab_backward_s=(8.0,) * 4,
        memory=Memory(logits_bytes=(8.0,) * 4),
    )
    assert all(0 < use.peak_of("logits") <= 16.0 and use.curve("logits")[-1][1] == 0 for use in result.memory)


def test_kept_keys_and_values_occupy_the_helper() -> None:
    """At most half of the slices, rounded, of one layer per microbatch in flight; nothing is left at the end.

    In the backward pass their gradients are added up beside them.
    """
    shape = Shape.uniform(4, 3, slices=8)
    program = generate("slimpipe", shape)
    sizes = {"kv_message_bytes": ((8.0,),) * 4, "message_bytes": 1e-9}
    sent, kept = (
        run(add_transfers(add_exchange(program, units=2, keep=keep)), 8.0, 16.0, memory=Memory(), **sizes)
        for keep in (False, True)
    )
    most = [max(use.peak_of("kv") for use in result.memory) for result in (sent, kept)]
    assert 0 < most[0] < most[1] <= 3 * 4.0
    alone = add_exchange(generate("slimpipe", Shape.uniform(4, 1, slices=8)), units=2, keep=True)
    use = run(add_transfers(alone), 8.0, 16.0, memory=Memory(), **sizes).memory[2]
    helps = [op for op in alone.ops[2] if op.kind == Kind.ATTEND_HELP_BACKWARD]
    keys = 0.5 * len({(op.peer, unit) for op in helps for unit in range(op.start, op.stop)})
    assert len(helps) == 6 and use.peak_of("kv") > keys
    assert all(use.curve("kv")[-1][1] == 0 for result in (sent, kept) for use in result.memory)


def test_a_smaller_microbatch_takes_its_share_of_time_bytes_and_memory() -> None:
    """Costs are those of the largest; what every operation costs is not less for a small one."""
    shape = Shape(((1,), (1,)), ((0, 0), (0, 0)), (1, 1), sizes=(4, 1))
    program = full("gpipe", shape)
    memory = Memory(activation_bytes=((8.0,), (8.0,)))
    costs = Costs(
        ((4.0,), (4.0,)),
        ((8.0,), (8.0,)),
        operation_s=0.5,
        message_bytes=16.0,
        link=lambda a, b: Link(0.0, 16.0),
        memory=memory,
    )
    found = simulate(program, costs)
    seconds = {str(op): found.end_s[i] - found.start_s[i] for i, op in enumerate(found.graph.ops) if i < 6}
    assert seconds["F0.0.0"] == 4.5 and seconds["F1.0.0"] == 1.5
    receives = [i for i, op in enumerate(found.graph.ops) if op.kind is Kind.RECV_FORWARD]
    assert [found.end_s[i] - found.start_s[i] for i in receives] == [1.0, 0.25]
    assert found.memory[0].peak_of("activations") == 10.0
    assert found.memory[0].curve("activations")[-1][1] == 0.0
