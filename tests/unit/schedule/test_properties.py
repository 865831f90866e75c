"""Every schedule, over random shapes: it validates, and peak and bubble meet their closed forms."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from schedule_helpers import full, peaks, run

from megatron_het.features.activation_offload.spec import add_activation_offload
from megatron_het.features.context_exchange.passes import add_exchange
from megatron_het.features.vocab_parallel.spec import add_embedding, add_vocabulary
from megatron_het.features.window.passes import add_parameters, add_sharded_passes, post_together
from megatron_het.schedule import COMPUTE, Kind, Program, Shape, add_transfers, dumps, generate, loads
from megatron_het.schedule.generators import GENERATORS
from megatron_het.schedule.generators.listing import ORDERS
from megatron_het.schedule.graph import Graph
from megatron_het.schedule.transfers import post_receives_early
from megatron_het.schedule.validate import deadlock, validate
from testing import paper_formulas as formulas


@st.composite
def routed_shapes(
    draw: st.DrawFn, chunks: bool = False, equal_chunks: bool = True, slices: bool = False, all_busy: bool = False
) -> Shape:
    """Unequal layers, one to three replicas per stage, microbatches routed at random."""
    stages = draw(st.integers(1, 4))
    microbatches = draw(st.integers(3 if all_busy else 1, 7))
    count = draw(st.integers(1, 3)) if chunks else 1
    counts = [count if equal_chunks else draw(st.integers(1, 3)) for _ in range(stages)]
    layers = tuple(tuple(draw(st.integers(0, 3)) for _ in range(n)) for n in counts)
    replicas = tuple(draw(st.integers(1, 3)) for _ in range(stages))
    route = tuple(tuple(draw(st.integers(0, r - 1)) for _ in range(microbatches)) for r in replicas)
    if all_busy:
        route = tuple((*range(r), *row[r:]) for r, row in zip(replicas, route))
    multiple = draw(st.integers(1, 2)) * stages if slices and max(counts) > 1 else draw(st.integers(1, 6))
    return Shape(layers, route, replicas, multiple if slices else 1)


def good(program: Program) -> None:
    """Valid on all transports, and the text form is exact."""
    problems = validate(program)
    assert problems == [], str(problems[0])
    assert loads(dumps(program)) == program


def good_when_posted_early(complete: Program) -> None:
    """Receives posted ahead of the global order cannot deadlock where every directed pair has a queue."""
    early = post_receives_early(complete)
    order_kept(complete, early)
    assert deadlock(Graph(early), "edge") == ()
    run(early, host_blocks=True)


def order_kept(before: Program, after: Program) -> None:
    assert [before.compute(d) for d in range(len(before.ops))] == [after.compute(d) for d in range(len(after.ops))]


@given(routed_shapes(), st.lists(st.floats(0.2, 5.0), min_size=12, max_size=12), st.sampled_from(ORDERS))
def test_one_f_one_b(shape: Shape, speeds: list[float], order: str) -> None:
    program = generate("1f1b", shape, speeds=speeds[: len(shape.devices)], order=order)
    complete = add_transfers(program, speeds=speeds[: len(shape.devices)])
    order_kept(program, complete)
    good(complete)
    good_when_posted_early(complete)
    for d in range(len(shape.devices)):
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            assert [op.microbatch for op in program.ops[d] if op.kind == kind] == list(shape.microbatches_of(d))
    good(full("1f1b", shape, forward_only=True))


@given(st.sampled_from(sorted(GENERATORS)), st.integers(1, 5), st.integers(1, 9), st.integers(1, 3), st.integers(1, 2))
def test_homogeneous(name: str, stages: int, microbatches: int, chunks: int, groups: int) -> None:
    slices = stages * groups if name in ("slimpipe", "terapipe", "seq1f1b") else 1
    placement = "v" if name in ("zb-v", "v-half") else "loop"
    chunks = 2 if placement == "v" else chunks
    shape = Shape.uniform(stages, microbatches, slices=slices, chunks=chunks, placement=placement)
    try:
        program = generate(name, shape)
    except ValueError as error:
        assert str(error).startswith("schedule "), error
        return
    complete = add_transfers(program)
    order_kept(program, complete)
    order_kept(program, add_transfers(program, order="late"))
    good(complete)
    good_when_posted_early(complete)
    good(add_transfers(generate(name, shape, forward_only=True)))
    good(add_activation_offload(add_parameters(complete, offload=True)))


@given(routed_shapes(chunks=True, equal_chunks=False, all_busy=True))
def test_ministage(shape: Shape) -> None:
    """Unequal chunk counts and replicas; then with its whole window."""
    program = generate("ministage", shape)
    for step in ("end", "ministage", "none"):
        late = (shape.path[0], shape.path[-1]) if step == "ministage" else ()
        window = post_together(add_parameters(add_transfers(program), offload=True, step=step, late=late))
        complete = add_activation_offload(window)
        order_kept(program, complete)
        good(complete)
    run(add_parameters(add_transfers(program), per_layer=True))


@given(
    routed_shapes(chunks=True, equal_chunks=False, all_busy=True),
    st.lists(st.floats(0.2, 5.0), min_size=12, max_size=12),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
)
def test_ministage_with_a_split_vocabulary(
    shape: Shape, speeds: list[float], prefetch: int, per_layer: bool, offload: bool
) -> None:
    """Parts wait for other stages, gathers for other replicas: never do they wait for each other."""
    used = speeds[: len(shape.devices)]
    for forward_only in (False, True):
        program = generate("ministage", shape, forward_only=forward_only)
        program = add_transfers(add_embedding(add_vocabulary(program, speeds=used), speeds=used), speeds=used)
        options = {"prefetch": prefetch, "per_layer": per_layer, "offload": offload}
        for step, late in (("none", ()), ("ministage", (shape.path[0], shape.path[-1]))):
            windowed = add_parameters(program, **options, step=step, late=late)  # type: ignore[arg-type]
            complete = post_together(windowed, speeds=used)
            order_kept(program, complete)
            good(complete)
            good_when_posted_early(complete)
            opened = [op.chunk for op in complete.ops[0] if op.kind is Kind.PARAM_RELEASE]
            count = len(shape.layers[0])  # no visit more than without parts
            assert opened == [*range(count), *([] if forward_only else range(count - 2, -1, -1))]


@given(
    st.integers(1, 3),
    st.lists(st.integers(0, 3), min_size=1, max_size=3),
    st.lists(st.integers(0, 2), min_size=3, max_size=6),
    st.sampled_from([2, 3]),
    st.integers(0, 2),
    st.booleans(),
    st.booleans(),
)
def test_zero_with_a_split_vocabulary(
    replicas: int, layers: list[int], route: list[int], zero: int, prefetch: int, keep: bool, forward_only: bool
) -> None:
    """Also where replicas have unequal numbers of passes."""
    shape = Shape((tuple(layers),), (tuple(r % replicas for r in route),), (replicas,))
    program = add_embedding(add_vocabulary(generate("data-parallel", shape, forward_only=forward_only)))
    complete = add_sharded_passes(program, zero=zero, prefetch=prefetch, keep_at_turn=keep, per_layer=True)
    order_kept(program, complete)
    good(complete)


@given(routed_shapes(chunks=True, equal_chunks=False, slices=True))
@example(Shape(((0,), (0,)), ((0,), (0,)), (2, 1)))  # a replica without microbatches
def test_slimpipe_routed(shape: Shape) -> None:
    program = generate("slimpipe", shape)
    good(add_transfers(program))
    good_when_posted_early(add_transfers(program))
    split = add_vocabulary(program)
    order_kept(program, split)
    good(add_transfers(split))
    good_when_posted_early(add_transfers(split))


@given(routed_shapes(chunks=True, equal_chunks=False))
def test_interleaved_routed(shape: Shape) -> None:
    """Interleaved 1F1B with several replicas per stage, where the number of microbatches allows it."""
    try:
        program = generate("interleaved", shape)
    except ValueError as error:
        assert "fewer than the" in str(error)
        return
    good(add_transfers(program))


@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))
def test_slimpipe_closed_form(stages: int, groups: int, chunks: int, microbatches: int) -> None:
    slices = stages * groups
    result = run(full("slimpipe", Shape.uniform(stages, microbatches, slices=slices, chunks=chunks)))
    expected = formulas.slimpipe(stages, microbatches, slices, chunks)
    assert (max(peaks(result)), result.bubble_fraction) == pytest.approx(expected)


@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 3))
def test_other_closed_forms(stages: int, microbatches: int, chunks: int) -> None:
    for name, shape, expected in (
        ("gpipe", Shape.uniform(stages, microbatches), formulas.gpipe(stages, microbatches)),
        ("1f1b", Shape.uniform(stages, microbatches), formulas.one_f_one_b(stages, microbatches)),
        ("terapipe", Shape.uniform(stages, microbatches, slices=4), formulas.terapipe(stages, microbatches, 4)),
    ):
        result = run(full(name, shape))
        assert (max(peaks(result)), result.bubble_fraction) == pytest.approx(expected), name
    result = run(full("ministage", Shape.uniform(stages, microbatches, chunks=chunks)))
    assert result.bubble_fraction == pytest.approx(formulas.ministage_bubble(stages, chunks, microbatches))
    whole = Shape.uniform(stages, stages * ((microbatches + stages - 1) // stages), chunks=chunks)
    result = run(full("interleaved", whole))
    expected = formulas.interleaved(stages, whole.microbatches, chunks) if chunks > 1 else None
    if expected:
        assert (max(peaks(result)), result.bubble_fraction) == pytest.approx(expected)


@given(st.integers(2, 4), st.integers(1, 2))
def test_v_half_memory(half: int, rounds: int) -> None:
    """1/2 + 1/p of the activations for an even number of stages."""
    stages = 2 * half
    shape = Shape.uniform(stages, 2 * stages * rounds, chunks=2, placement="v")
    assert max(peaks(run(full("v-half", shape)))) == pytest.approx(formulas.v_half_activations(stages))
    assert max(peaks(run(full("zb-v", shape)))) <= 1.0 + 1e-9


@given(st.integers(2, 5), *[st.integers(1, 3)] * 3, *[st.booleans()] * 4)
def test_exchange(
    stages: int, groups: int, microbatches: int, units: int, helping: bool, keep: bool, split: bool, chunked: bool
) -> None:
    """The exchange keeps the compute order, runs on all transports, and balances within one unit and the mask."""
    shape = Shape.uniform(stages, microbatches, slices=stages * groups, chunks=2 if chunked else 1)
    program = generate("slimpipe", shape)
    exchanged = add_exchange(program, units=units, helping=helping, keep=keep)
    order_kept(program, exchanged)
    complete = add_transfers(add_vocabulary(exchanged) if split else exchanged)
    order_kept(program, complete)
    good(complete)
    good_when_posted_early(complete)


@given(routed_shapes())
def test_makespan_does_not_depend_on_how_receives_are_ordered_without_latency(shape: Shape) -> None:
    """With free links the transfers of the global order never delay a computation."""
    program = generate("1f1b", shape)
    assert run(add_transfers(program)).makespan_s == pytest.approx(run(program).makespan_s)


def test_compute_is_what_a_generator_makes() -> None:
    for name in GENERATORS:
        placement, chunks = ("v", 2) if name in ("zb-v", "v-half") else ("loop", 1)
        stages = 1 if name == "data-parallel" else 4
        program = generate(name, Shape.uniform(stages, 4, chunks=chunks, placement=placement))
        assert all(op.kind in COMPUTE for ops in program.ops for op in ops)
        assert replace(program).name == name
