"""Streams, links, memory and the causes of idle time, by hand-computed cases."""

import gc
from dataclasses import replace

import pytest
from schedule_helpers import full, run, with_device

from megatron_het.features.activation_offload.spec import add_activation_offload
from megatron_het.features.context_exchange.passes import add_exchange
from megatron_het.features.window.passes import add_parameters
from megatron_het.schedule import (
    Costs,
    Kind,
    Link,
    Memory,
    Op,
    Program,
    ScheduleError,
    Shape,
    add_transfers,
    generate,
    simulate,
)
from megatron_het.schedule.transfers import post_receives_early


def test_one_f_one_b_by_hand() -> None:
    """2 stages, 2 microbatches, forward 1, backward 2: F0 F1 . B0 . B1 and . F0 B0 F1 B1."""
    result = run(full("1f1b", Shape.uniform(2, 2)))
    times = {(e.device, str(e.op)): (e.start_s, e.end_s) for e in result.events() if e.stream == "compute"}
    assert times[0, "F0.0.0"] == (0, 1) and times[0, "F1.0.0"] == (1, 2)
    assert times[0, "B0.0.0"] == (4, 6) and times[0, "B1.0.0"] == (7, 9)
    assert times[1, "B0.0.0"] == (2, 4) and times[1, "F1.0.0"] == (4, 5) and times[1, "B1.0.0"] == (5, 7)
    assert (result.makespan_s, result.ideal_s, result.bubble_fraction) == (9, 6, 0.5)


def test_latency_and_bandwidth() -> None:
    """A message takes its bytes over the bandwidth plus the latency, which does not occupy the link."""
    shape = Shape.uniform(2, 3)
    link = Link(latency_s=0.5, bytes_per_s=100.0)
    program = full("1f1b", shape, forward_only=True)
    result = simulate(program, Costs(((1.0,), (1.0,)), ((0.0,), (0.0,)), message_bytes=200.0, link=lambda a, b: link))
    sent = [(e.start_s, e.end_s) for e in result.events() if e.stream == "send"]
    assert sent == [(1.0, 3.5), (3.0, 5.5), (5.0, 7.5)]
    assert result.makespan_s == 8.5


def test_a_shared_link_serves_one_message_at_a_time() -> None:
    """Two stages of two replicas each; both edges go through one network card, or not."""
    shape = Shape(((1,), (1,)), ((0, 1), (0, 1)), (2, 2))
    program = full("1f1b", shape, forward_only=True)
    table = ((1.0,),) * 4
    apart = simulate(program, Costs(table, table, message_bytes=1.0, link=lambda a, b: Link(0, 1.0)))
    shared = simulate(program, Costs(table, table, message_bytes=1.0, link=lambda a, b: Link(0, 1.0, ("card",))))
    assert (apart.makespan_s, shared.makespan_s) == (3.0, 4.0)


def test_first_come_first_served_on_a_shared_link() -> None:
    """The message that is ready first goes first, whatever the numbering."""
    shape = Shape(((1,), (1,)), ((0, 1), (0, 1)), (2, 2))
    program = full("1f1b", shape, forward_only=True)
    forward = ((3.0,), (1.0,), (1.0,), (1.0,))
    result = simulate(program, Costs(forward, forward, message_bytes=5.0, link=lambda a, b: Link(0, 1.0, ("card",))))
    starts = {e.device: e.start_s for e in result.events() if e.stream == "send"}
    assert starts == {1: 1.0, 0: 6.0}


def test_speeds_of_devices() -> None:
    """Costs are per device."""
    shape = Shape.uniform(2, 1)
    result = simulate(full("1f1b", shape), Costs(((1.0,), (3.0,)), ((2.0,), (5.0,))))
    assert result.makespan_s == 1 + 3 + 5 + 2
    assert result.compute_s == [3.0, 8.0]


def test_attention_grows_with_the_slice() -> None:
    """Slice i attends to i + diagonal slices; the shares add up."""
    shape = Shape.uniform(1, 1, slices=4)
    for diagonal, weights in ((1.0, [1, 2, 3, 4]), (0.5, [0.5, 1.5, 2.5, 3.5])):
        costs = Costs(((4.0,),), ((0.0,),), ((10.0,),), ((0.0,),), diagonal=diagonal)
        events = [e for e in simulate(full("slimpipe", shape), costs).events() if e.op.kind == Kind.FORWARD]
        expected = [1.0 + 10.0 * w / sum(weights) for w in weights]
        assert [e.end_s - e.start_s for e in events] == pytest.approx(expected)


def test_split_backwards() -> None:
    """Attention has no weight gradient; the two halves are as long as the joint backward."""
    shape = Shape.uniform(1, 1)
    costs = Costs(((1.0,),), ((2.0,),), ((3.0,),), ((6.0,),), weight_share=0.5)
    events = {e.op.kind: e.end_s - e.start_s for e in simulate(full("zb-h1", shape), costs).events()}
    assert events == {Kind.FORWARD: 4.0, Kind.BACKWARD_INPUT: 7.0, Kind.BACKWARD_WEIGHT: 1.0}


def test_given_attention_moves_to_the_helper() -> None:
    """The exchange moves time from one device to the other and creates none."""
    shape = Shape.uniform(2, 2, slices=4)
    program = generate("slimpipe", shape)
    costs = Costs.uniform(
        shape, forward_s=4.0, backward_s=8.0, attention_forward_s=((20.0,),) * 2, attention_backward_s=((40.0,),) * 2
    )
    before = simulate(add_transfers(program), costs)
    after = simulate(add_transfers(add_exchange(program, helping=True)), costs)
    assert sum(after.compute_s) == pytest.approx(sum(before.compute_s))
    assert after.makespan_s < before.makespan_s


def test_a_slow_helper_pays_its_own_speed() -> None:
    """What is given away costs the helper's time per layer."""
    shape = Shape.uniform(2, 1, slices=4)
    program = add_transfers(add_exchange(generate("slimpipe", shape), units=1, helping=True))
    attention = ((30.0,), (10.0,))
    result = simulate(program, Costs(((0.0,),) * 2, ((0.0,),) * 2, attention, attention))
    helps = [e for e in result.events() if e.op.kind == Kind.ATTEND_HELP and e.device == 0]
    assert helps
    for event in helps:
        assert event.end_s - event.start_s == pytest.approx(3.0 * (event.op.stop - event.op.start))


def test_only_layers_that_the_smallest_chunk_has_are_exchanged() -> None:
    """Of a chunk of three layers beside one of one layer, a third of the attention can move."""
    shape = replace(Shape.uniform(2, 1, slices=4), layers=((1,), (3,)))
    program = add_transfers(add_exchange(generate("slimpipe", shape), units=1, helping=True))
    attention = ((10.0,), (30.0,))
    events = list(simulate(program, Costs(((0.0,),) * 2, ((0.0,),) * 2, attention, attention)).events())
    helps = [e for e in events if e.op.kind == Kind.ATTEND_HELP and e.device == 0]
    gives = [op for op in program.ops[1] if op.kind == Kind.ATTEND_GIVE]
    assert helps and gives
    for event in helps:
        assert event.end_s - event.start_s == pytest.approx(1.0 * (event.op.stop - event.op.start))
    forwards = sum(e.end_s - e.start_s for e in events if e.op.kind == Kind.FORWARD and e.device == 1)
    assert forwards == pytest.approx(30.0 - sum(op.stop - op.start for op in gives))


def test_causes_of_idle_time_add_up() -> None:
    """Compute and all causes fill the makespan of every device."""
    shape = Shape(((3, 2), (2, 2), (1, 1)), ((0,) * 5, (0, 1, 0, 0, 1), (0,) * 5), (1, 2, 1))
    program = add_activation_offload(add_parameters(full("ministage", shape), offload=True, step="ministage"))
    two = tuple((1.0, 0.5) for _ in range(4))
    costs = Costs(
        two,
        two,
        message_bytes=1.0,
        link=lambda a, b: Link(0.1, 2.0, ("switch",)),
        gather_s=two,
        reduce_s=two,
        prefetch_s=two,
        offload_s=two,
        act_offload_s=two,
        act_fetch_s=two,
        step_s=two,
        tail_s=(0.5,) * 4,
    )
    result = simulate(program, costs)
    for busy, bubble in zip(result.compute_s, result.bubble):
        assert busy + bubble.total_s == pytest.approx(result.makespan_s)
        assert min(bubble.warmup_s, bubble.imbalance_s, bubble.communication_s, bubble.gather_s) >= 0


def test_causes_by_case() -> None:
    """Each cause alone."""
    shape = Shape.uniform(2, 8)
    plain = run(full("1f1b", shape))
    assert [b.total_s for b in plain.bubble] == [b.warmup_s for b in plain.bubble] == [3.0, 3.0]
    slow = simulate(full("1f1b", shape), Costs(((1.0,), (2.0,)), ((2.0,), (4.0,))))
    assert slow.bubble[0].imbalance_s > 0 and slow.bubble[1].imbalance_s == 0
    linked = run(full("1f1b", shape), link=lambda a, b: Link(0.25))
    assert linked.bubble[1].communication_s >= 0.25 and linked.bubble[1].gather_s == 0
    window = run(add_parameters(full("1f1b", shape)), gather_s=((2.0,), (2.0,)))
    assert window.bubble[0].gather_s == 2.0
    tail = run(full("1f1b", shape), tail_s=(0.0, 7.0))
    assert tail.bubble[1].tail_s == 7.0
    assert tail.makespan_s == plain.makespan_s - 2.0 + 7.0  # the last stage ends one backward earlier


def test_critical_path() -> None:
    """A gap-free chain from the start to the end of the iteration."""
    result = run(full("slimpipe", Shape.uniform(4, 2, slices=8)), link=lambda a, b: Link(0.1))
    path = result.critical_path()
    assert path[0].start_s == 0 and path[-1].end_s == result.makespan_s
    assert all(a.end_s == pytest.approx(b.start_s) for a, b in zip(path, path[1:]))


def test_collectives_wait_for_all_replicas() -> None:
    """A gather starts when the slowest replica is there."""
    shape = Shape(((1, 1),), ((0, 1),), (2,))
    program = add_parameters(generate("ministage", shape), prefetch=0, step="none")
    forward = ((1.0, 1.0), (4.0, 1.0))
    result = simulate(program, Costs(forward, forward, gather_s=((2.0, 2.0),) * 2))
    second = [e for e in result.events() if e.op.kind == Kind.PARAM_GATHER and e.op.chunk == 1]
    assert {(e.start_s, e.end_s) for e in second} == {(6.0, 8.0)}


def test_a_collective_that_one_replica_lacks() -> None:
    """It would wait for ever; the simulator says so."""
    shape = Shape(((1,),), ((0, 1),), (2,))
    program = add_parameters(generate("1f1b", shape))
    ops = [op for op in program.ops[1] if op.kind != Kind.GRAD_REDUCE]
    with pytest.raises(ScheduleError, match="not all replicas"):
        run(with_device(program, 1, ops))


def test_messages_received_in_another_order_than_sent() -> None:
    """Found by the simulator too."""
    program = full("gpipe", Shape.uniform(2, 2))
    receives = [i for i, op in enumerate(program.ops[1]) if op.kind == Kind.RECV_FORWARD]
    ops = [op for op in program.ops[1] if op.kind != Kind.RECV_FORWARD]
    swapped = [program.ops[1][i] for i in reversed(receives)]
    with pytest.raises(ScheduleError, match="in another order than sent"):
        run(with_device(program, 1, [*swapped, *ops]))


def test_stuck_programs_are_named() -> None:
    """Operations that wait for each other."""
    program = full("1f1b", Shape.uniform(2, 2))
    backward_first = sorted(program.ops[1], key=lambda op: op.kind != Kind.BACKWARD)
    with pytest.raises(ScheduleError, match=r"wait for each other(.|\n)*waits for F0.0.0"):
        run(with_device(program, 1, backward_first))


def test_host_blocks() -> None:
    """A process that posts only between computations delays its receives."""
    shape = Shape.uniform(2, 4)
    link = Link(0.0, 4.0)
    free, blocked = (
        run(full("1f1b", shape), message_bytes=2.0, link=lambda a, b: link, host_blocks=flag) for flag in (False, True)
    )
    assert blocked.makespan_s > free.makespan_s


def test_receives_posted_early_hide_the_latency() -> None:
    """Where the host posts, a latency shorter than an operation costs next to nothing after the warm-up."""
    shape = Shape.uniform(2, 2, slices=8, chunks=2)
    program = full("slimpipe", shape)
    link = {"link": lambda a, b: Link(0.04), "host_blocks": True}
    ideal, late, early = run(program), run(program, **link), run(post_receives_early(program), **link)
    assert early.makespan_s < ideal.makespan_s + 4 * 0.04
    assert late.makespan_s > ideal.makespan_s + 20 * 0.04


def test_posting_takes_the_hosts_time() -> None:
    """Every transfer delays the computation after it, and arrives later; the time counts as communication."""
    shape = Shape.uniform(2, 1)
    result = run(full("1f1b", shape), host_blocks=True, post_s=0.25)
    starts = {(e.device, e.op.kind.name): e.start_s for e in result.events() if e.stream == "compute"}
    assert starts == {(0, "FORWARD"): 0.0, (1, "FORWARD"): 1.25, (1, "BACKWARD"): 2.25, (0, "BACKWARD"): 4.5}
    assert result.makespan_s == 6.5
    assert result.compute_s == [3.0, 3.0]
    assert sum(b.communication_s for b in result.bubble) >= 0.5


def test_measured_durations_replace_the_tables() -> None:
    """An iteration is replayed with what its operations took; those without a measurement keep the model's time."""
    program = full("1f1b", Shape.uniform(2, 1))
    first = next(op for op in program.ops[0] if op.kind == Kind.FORWARD)
    result = run(program, measured_s={(0, first): 5.0})
    assert result.makespan_s == 6.0 + 4.0
    assert result.compute_s == [7.0, 3.0]


def test_costs_that_do_not_fit() -> None:
    """One error that names the table."""
    program = full("1f1b", Shape.uniform(2, 2))
    for changes, name in (
        ({"forward_s": ((1.0,),)}, "forward_s"),
        ({"tail_s": (1.0,)}, "tail_s"),
        ({"gather_s": ((1.0, 1.0), (1.0,))}, "gather_s"),
        ({"backward_s": ((-1.0,), (1.0,))}, "backward_s"),
        ({"memory": Memory(kv_bytes=((1.0,),))}, "kv_bytes"),
        ({"memory": Memory(logits_bytes=(1.0,))}, "logits_bytes"),
    ):
        with pytest.raises(ValueError, match=name):
            simulate(program, replace(Costs.uniform(program.shape), **changes))
    with pytest.raises(ValueError, match="bytes_per_s"):
        Link(0.0, 0.0)


def test_costs_from_layers() -> None:
    """Layers, embedding and head per device, head on the slower device."""
    shape = Shape(((2, 1), (1, 3)), ((0,), (0,)), (1, 1))
    costs = Costs.of(
        shape,
        layer_forward_s=(1.0, 2.0),
        layer_backward_s=(2.0, 4.0),
        embedding_forward_s=0.5,
        head_forward_s=3.0,
        head_backward_s=6.0,
        head_speeds=(1.0, 0.5),
    )
    assert costs.forward_s == ((2.5, 1.0), (2.0, 12.0))
    assert costs.backward_s == ((4.0, 2.0), (4.0, 24.0))


def test_garbage_collection_is_left_as_it_was() -> None:
    """It is paused inside only."""
    run(full("1f1b", Shape.uniform(2, 2)))
    assert gc.isenabled()


def test_program_without_transfers_runs_with_free_links() -> None:
    """Compute orders can be simulated alone."""
    program = generate("slimpipe", Shape.uniform(4, 2, slices=8))
    assert run(program).makespan_s == run(add_transfers(program)).makespan_s


def test_empty_devices() -> None:
    """A replica without microbatches idles through the iteration."""
    shape = Shape(((1,), (1,)), ((0, 0), (0, 0)), (1, 2))
    result = run(full("1f1b", shape))
    assert result.compute_s[2] == 0 and result.bubble[2].total_s == result.makespan_s


def test_events_name_their_streams() -> None:
    """Every operation appears once, on the stream where it runs."""
    program: Program = add_parameters(full("ministage", Shape.uniform(2, 2, chunks=2)), offload=True)
    streams = {e.op.kind: e.stream for e in run(program).events()}
    assert streams[Kind.PARAM_GATHER] == "collective" and streams[Kind.PARAM_PREFETCH] == "host_to_device"
    assert streams[Kind.PARAM_OFFLOAD] == "device_to_host" and streams[Kind.SEND_FORWARD] == "send"
    assert streams[Kind.RECV_BACKWARD] == "receive" and streams[Kind.OPTIMIZER_STEP] == "compute"
    assert isinstance(next(run(program).events()).op, Op)
