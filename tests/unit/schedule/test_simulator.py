"""Streams, links, memory and the causes of idle time, by hand-computed cases."""

import gc
from dataclasses import replace

import pytest
from schedule_helpers import full, peaks, run, with_device

from megatron_het.features.activation_offload.spec import add_activation_offload
from megatron_het.features.context_exchange.passes import add_exchange
from megatron_het.features.vocab_parallel.spec import add_vocabulary
from megatron_het.features.window.passes import add_parameters
from megatron_het.schedule import Costs, Kind, Link, Memory, Op, Program, ScheduleError, Shape, add_transfers, generate
from megatron_het.schedule.generators.one_f_one_b import choose_depths, published_depths
from megatron_het.schedule.memory import CATEGORIES
from megatron_het.schedule.simulate import simulate
from megatron_het.schedule.transfers import post_receives_early
from megatron_het.schedule.validate import validate


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


def test_first_come_first_served_on_a_shared_link() -> None:
    """The message that is ready first goes first, whatever the numbering."""
    shape = Shape(((1,), (1,)), ((0, 1), (0, 1)), (2, 2))
    program = full("1f1b", shape, forward_only=True)
    forward = ((3.0,), (1.0,), (1.0,), (1.0,))
    result = simulate(
        program, Costs(forward, forward, message_bytes=5.0, link=lambda a, b: Link(0, 1.0, (("card", 1.0),)))
    )
    starts = {e.device: e.start_s for e in result.events() if e.stream == "send"}
    assert starts == {1: 1.0, 0: 6.0}


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


@pytest.mark.parametrize(
    ("layers", "attention_s", "unit_s"),
    [
        (((1,), (1,)), (30.0, 10.0), 3.0),  # what is given away costs the helper's time per layer
        (((1,), (3,)), (10.0, 30.0), 1.0),  # beside one layer, a third of the attention of three can move
    ],
)
def test_a_helper_pays_its_own_speed_for_the_layers_of_the_smallest_chunk(
    layers: tuple[tuple[int, ...], ...], attention_s: tuple[float, float], unit_s: float
) -> None:
    shape = replace(Shape.uniform(2, 1, slices=4), layers=layers)
    program = add_transfers(add_exchange(generate("slimpipe", shape), units=1, helping=True))
    attention = tuple((seconds,) for seconds in attention_s)
    events = list(simulate(program, Costs(((0.0,),) * 2, ((0.0,),) * 2, attention, attention)).events())
    helps = [e for e in events if e.op.kind == Kind.ATTEND_HELP and e.device == 0]
    gives = [op for op in program.ops[1] if op.kind == Kind.ATTEND_GIVE]
    assert helps and gives
    for event in helps:
        assert event.end_s - event.start_s == pytest.approx(unit_s * (event.op.stop - event.op.start))
    forwards = sum(e.end_s - e.start_s for e in events if e.op.kind == Kind.FORWARD and e.device == 1)
    assert forwards == pytest.approx(attention_s[1] - sum(op.stop - op.start for op in gives))


def test_causes_of_idle_time_add_up() -> None:
    """Compute and all causes fill the makespan of every device."""
    shape = Shape(((3, 2), (2, 2), (1, 1)), ((0,) * 5, (0, 1, 0, 0, 1), (0,) * 5), (1, 2, 1))
    program = add_activation_offload(add_parameters(full("ministage", shape), offload=True, step="ministage"))
    two = tuple((1.0, 0.5) for _ in range(4))
    costs = Costs(
        two,
        two,
        message_bytes=1.0,
        link=lambda a, b: Link(0.1, 2.0, (("switch", 2.0),)),
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
    program = full("gpipe", Shape.uniform(2, 2))
    receives = [i for i, op in enumerate(program.ops[1]) if op.kind == Kind.RECV_FORWARD]
    ops = [op for op in program.ops[1] if op.kind != Kind.RECV_FORWARD]
    swapped = [program.ops[1][i] for i in reversed(receives)]
    with pytest.raises(ScheduleError, match="in another order than sent"):
        run(with_device(program, 1, [*swapped, *ops]))


def test_stuck_programs_are_named() -> None:
    program = full("1f1b", Shape.uniform(2, 2))
    backward_first = sorted(program.ops[1], key=lambda op: op.kind != Kind.BACKWARD)
    with pytest.raises(ScheduleError, match=r"wait for each other(.|\n)*waits for F0.0.0"):
        run(with_device(program, 1, backward_first))


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
    program = full("1f1b", Shape.uniform(2, 2))
    for changes, name in (
        ({"forward_s": ((1.0,),)}, "forward_s"),
        ({"tail_s": (1.0,)}, "tail_s"),
        ({"embed_forward_s": (1.0,)}, "embed_forward_s: 1 values for 2 devices"),
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
    shape = Shape(((2, 1), (1, 3)), ((0,), (0,)), (1, 1))
    costs = Costs.of(
        shape,
        layer_forward_s=(1.0, 2.0),
        layer_backward_s=(2.0, 4.0),
        attention_forward_s=(0.5, 0.25),
        weight_share=0.25,
    )
    assert costs.forward_s == ((2.0, 1.0), (2.0, 6.0))
    assert costs.backward_s == ((4.0, 2.0), (4.0, 12.0))
    assert costs.attention_forward_s == ((1.0, 0.5), (0.25, 0.75)) and costs.attention_backward_s == ()
    assert costs.weight_share == 0.25


def test_garbage_collection_is_left_as_it_was() -> None:
    """It is paused inside only."""
    run(full("1f1b", Shape.uniform(2, 2)))
    assert gc.isenabled()


def test_empty_devices() -> None:
    """A replica without microbatches idles through the iteration."""
    shape = Shape(((1,), (1,)), ((0, 0), (0, 0)), (1, 2))
    result = run(full("1f1b", shape))
    assert result.compute_s[2] == 0 and result.bubble[2].total_s == result.makespan_s


def test_events_name_their_streams() -> None:
    program: Program = add_parameters(full("ministage", Shape.uniform(2, 2, chunks=2)), offload=True)
    streams = {e.op.kind: e.stream for e in run(program).events()}
    assert streams[Kind.PARAM_GATHER] == "collective" and streams[Kind.PARAM_PREFETCH] == "host_to_device"
    assert streams[Kind.PARAM_OFFLOAD] == "device_to_host" and streams[Kind.SEND_FORWARD] == "send"
    assert streams[Kind.RECV_BACKWARD] == "receive" and streams[Kind.OPTIMIZER_STEP] == "compute"
    assert isinstance(next(run(program).events()).op, Op)


# What simulated devices hold, and when.


def test_memory_by_category_by_hand() -> None:
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
    shards = {"parameter_shard_bytes": table(1.0), "gradient_shard_bytes": table(2.0)}
    memory = Memory(parameter_bytes=table(10.0), gradient_bytes=table(10.0), **shards)
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
    memory = Memory(logits_bytes=(8.0,) * 4)
    result = run(program, 8.0, 16.0, vocab_forward_s=(4.0,) * 4, vocab_backward_s=(8.0,) * 4, memory=memory)
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
    times, link = (((4.0,), (4.0,)), ((8.0,), (8.0,))), Link(0.0, 16.0)
    costs = Costs(*times, operation_s=0.5, message_bytes=16.0, link=lambda a, b: link, memory=memory)
    found = simulate(program, costs)
    seconds = {str(op): found.end_s[i] - found.start_s[i] for i, op in enumerate(found.graph.ops) if i < 6}
    assert seconds["F0.0.0"] == 4.5 and seconds["F1.0.0"] == 1.5
    receives = [i for i, op in enumerate(found.graph.ops) if op.kind is Kind.RECV_FORWARD]
    assert [found.end_s[i] - found.start_s[i] for i in receives] == [1.0, 0.25]
    assert found.memory[0].peak_of("activations") == 10.0
    assert found.memory[0].curve("activations")[-1][1] == 0.0


# More microbatches in flight across slow links.

STAGE_S = 3.0


def seconds(shape: Shape, transfer_s: float, depths: tuple[int, ...] = (), slow: int = 0) -> float:
    """An iteration whose transfers across one boundary take long."""

    def link(source: int, target: int) -> Link:
        boundary = min(shape.devices[source].stage, shape.devices[target].stage)
        return Link(transfer_s if boundary == slow else 0.0, 1e30)

    return run(full("1f1b", shape, depths=depths), message_bytes=1.0, link=link).makespan_s


def warmups(shape: Shape, depths: tuple[int, ...]) -> list[int]:
    """Forwards before the first backward of each device."""
    program = generate("1f1b", shape, depths=depths)
    assert not validate(full("1f1b", shape, depths=depths))
    return [[op.kind for op in program.compute(d)].index(Kind.BACKWARD) for d in range(len(shape.devices))]


def test_the_warm_up_of_a_stage_grows_by_the_depths_after_it() -> None:
    assert warmups(Shape.uniform(3, 8), ()) == warmups(Shape.uniform(3, 8), (1, 1)) == [3, 2, 1]
    assert warmups(Shape.uniform(3, 8), (3, 1)) == [5, 2, 1]
    assert warmups(Shape.uniform(3, 8), (1, 3)) == [5, 4, 1]
    assert warmups(Shape.uniform(2, 2), (7,)) == [2, 1]


def test_replicas_that_divide_microbatches_differently_hold_more_too() -> None:
    routes = ((0,) * 12, (0, 1, 2) * 4)
    shape = Shape(layers=((1,), (1,)), route=routes, replicas=(1, 3))
    assert warmups(shape, (2,))[0] > warmups(shape, ())[0]


def test_depth_hides_a_transfer_of_half_a_stage() -> None:
    shape = Shape.uniform(2, 16)
    plain = seconds(shape, STAGE_S / 2)
    found = choose_depths((STAGE_S,) * 2, (STAGE_S / 2,), lambda d: seconds(shape, STAGE_S / 2, d))
    assert found == (2,)
    assert plain / seconds(shape, STAGE_S / 2, found) > 1.3
    # A microbatch's way there and back, and nothing else, is left of the transfers.
    assert seconds(shape, STAGE_S / 2, found) == pytest.approx(seconds(shape, 0.0) + STAGE_S)


def test_only_the_slow_boundary_is_deepened() -> None:
    shape = Shape.uniform(4, 16)
    found = choose_depths((STAGE_S,) * 4, (0.0, 2 * STAGE_S, 0.0), lambda d: seconds(shape, 2 * STAGE_S, d, slow=1))
    assert found[0] == found[2] == 1 and found[1] > 3
    shallower = (found[0], found[1] - 1, found[2])
    assert seconds(shape, 2 * STAGE_S, shallower, slow=1) > seconds(shape, 2 * STAGE_S, found, slow=1)


def test_nothing_changes_where_links_are_fast_or_nothing_fits() -> None:
    shape = Shape.uniform(2, 16)
    assert choose_depths((STAGE_S,) * 2, (0.001,), lambda d: pytest.fail("there is nothing to gain")) == ()
    time_of = lambda d: seconds(shape, STAGE_S, d) if sum(d) == 1 else None  # noqa: E731
    assert choose_depths((STAGE_S,) * 2, (STAGE_S,), time_of) == ()
    # One boundary alone may be what matters, where a depth at the next one costs as much again.
    assert choose_depths((1.0,) * 5, (0.3,) * 4, lambda d: 10.0 - (d[2] > 1) + (d[3] > 1)) == (1, 1, 2, 1)


def test_depth_costs_the_activations_of_its_microbatches() -> None:
    shape = Shape.uniform(2, 16)
    plain, deep = (peaks(run(full("1f1b", shape, depths=d))) for d in ((1,), (3,)))
    assert deep == pytest.approx([2 * plain[0], plain[1]])


def test_published_rule() -> None:
    stages = (1.0, 2.0, 1.0, 1.0)
    assert published_depths(stages, (0.1, 0.5, 1.5), (True, True, True)) == (2, 3, 4)
    assert published_depths(stages, (0.1, 0.5, 1.5), (False, True, False)) == (1, 3, 1)
