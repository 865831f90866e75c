"""The compiled loops say what the Python code says, to the last bit, and Python takes over without them."""

import collections
import os
import random
import re
import stat
from collections.abc import Iterator
from ctypes import c_double, c_int32
from dataclasses import replace

import pytest

from megatron_het.schedule import Costs, Link, Program, Shape, add_transfers, generate
from megatron_het.schedule.generators.listing import ORDERS, Speeds, require_all
from megatron_het.schedule.generators.one_f_one_b import merged
from megatron_het.schedule.simulate import simulate
from testing.planner_cases import estimator_of, random_pool
from tools.planner.costs import plain
from tools.planner.costs.candidate import Candidate, Group
from tools.planner.costs.estimate import Estimator
from tools.planner.costs.layer import MEGATRON_HET
from tools.planner.costs.plain import Wiring, makespan_s, pipelines_s
from tools.planner.costs.schedules import SCHEDULES, base, pipelines
from tools.planner.errors import PlannerError
from tools.planner.search.balance import balance
from tools.planner.search.candidate_cache import _ROW, divide, stages_s


@pytest.fixture
def built():
    found = plain.loops()
    if found is None:
        pytest.skip("there is no compiler")
    return found


@pytest.fixture
def fresh():
    plain.loops.cache_clear()
    yield
    plain.loops.cache_clear()


def some_shape(rng: random.Random) -> Shape:
    stages, microbatches = rng.randint(1, 5), rng.randint(1, 24)
    replicas = [rng.randint(1, min(4, microbatches)) for _ in range(stages)]
    route = [[rng.randrange(n) for _ in range(microbatches)] for n in replicas]
    return Shape(tuple((rng.randint(1, 6),) for _ in range(stages)), tuple(map(tuple, route)), tuple(replicas))


def some_costs(rng: random.Random, shape: Shape) -> Costs:
    """Links that queue up, within and between nodes."""
    groups = [Group(rng.randrange(3), rng.choice((1, 2)), 1) for _ in shape.devices]
    places = [rng.randrange(3) for _ in shape.devices]
    prices = {}

    def price(a: Group, b: Group, local: bool) -> Link:
        shared = () if local else (("card", 10.0 ** rng.randint(5, 8)),)
        return prices.setdefault((a, b, local), Link(rng.random() * 0.1, 10.0 ** rng.randint(5, 8), shared))

    times = [tuple((rng.random() + 0.01,) for _ in shape.devices) for _ in range(2)]
    return Costs(
        forward_s=times[0],
        backward_s=times[1],
        message_bytes=1e6,
        link=Wiring(groups, places, price, rng.choice(([], [d.stage for d in shape.devices]))),
        operation_s=rng.choice((0.0, 0.01)),
        tail_s=tuple(rng.random() for _ in shape.devices),
    )


@pytest.mark.parametrize("order", ORDERS)
def test_merge_is_that_of_python(built, order):
    rng, different, stuck = random.Random(ORDERS.index(order)), 0, 0
    for _ in range(400):
        shape = some_shape(rng)
        limits = [rng.randint(1, 6) for _ in shape.devices]
        times = Speeds(*[tuple((rng.choice((1.0, 1.5, rng.random())),) for _ in shape.devices) for _ in range(2)])
        mine = plain._Layout(built, shape).merge(shape, limits, times, order)
        try:
            theirs = merged(shape, limits, times, order)
        except ValueError as error:
            with pytest.raises(ValueError, match=re.escape(str(error))):
                require_all(shape, mine, [2 * len(shape.microbatches_of(d)) for d in range(len(mine))], limits, order)
            stuck += 1
            continue
        assert [list(map(bool, way)) for way in mine] == theirs
        different += any(len(set(way)) > 1 and way != sorted(way) for way in theirs)
    assert different > 50  # not all of them are plain
    assert (stuck > 5) == (order == "alternating")


def python_s(monkeypatch: pytest.MonkeyPatch, shape: Shape, program: Program, costs: Costs) -> float:
    with monkeypatch.context() as context:
        context.setattr(plain, "loops", lambda: None)
        return makespan_s(shape, program.ops, costs)


@pytest.mark.parametrize("order", ORDERS)
def test_time_is_that_of_python(built, monkeypatch, order):
    rng, told = random.Random(7 + ORDERS.index(order)), 0
    for _ in range(150):
        shape = some_shape(rng)
        costs, speeds = some_costs(rng, shape), [rng.choice((1.0, 0.5, 0.3)) for _ in shape.devices]
        parameters = {"slack": rng.choice((0.0, 0.5, 1.0)), "order": order}
        if rng.random() < 0.3 and shape.stages > 1:
            parameters["depths"] = tuple(rng.randint(1, 3) for _ in range(shape.stages - 1))
        try:
            program = generate("1f1b", shape, speeds=speeds, **parameters)
        except ValueError:  # the order waits forever
            with pytest.raises(PlannerError, match="waits forever"):
                pipelines_s("1f1b", shape, speeds, costs, parameters)
            continue
        assert pipelines_s("1f1b", shape, speeds, costs, parameters) == python_s(monkeypatch, shape, program, costs)
        told += 1
    assert told > 75


@pytest.mark.parametrize(("schedule", "chunks", "slices"), [("interleaved", 3, 1), ("slimpipe", 1, 8), ("gpipe", 1, 1)])
@pytest.mark.parametrize("most", [0, plain.MOST_PAIRS])
def test_time_of_other_schedules_is_that_of_python(built, monkeypatch, schedule, chunks, slices, most):
    """With two stages messages of both directions take one link."""
    rng = random.Random(chunks + slices)
    monkeypatch.setattr(plain, "MOST_PAIRS", most)
    for stages in (2, 2, 3, 4) * 5:
        route = tuple(tuple(m % 2 for m in range(4 * stages)) for _ in range(stages))
        shape = Shape(((2,) * chunks,) * stages, route, (2,) * stages, slices=slices)
        costs, rows = some_costs(rng, shape), [[rng.random() for _ in range(chunks)] for _ in shape.devices]
        attention = tuple(map(tuple, rows)) if slices > 1 else ()
        costs = replace(
            costs,
            forward_s=tuple(f * chunks for f in costs.forward_s),
            backward_s=tuple(b * chunks for b in costs.backward_s),
            attention_forward_s=attention,
            attention_backward_s=attention,
        )
        program = generate(schedule, shape)
        seconds = makespan_s(shape, program.ops, costs)
        assert seconds == python_s(monkeypatch, shape, program, costs)
        assert seconds == pytest.approx(simulate(add_transfers(program), costs).makespan_s, rel=1e-12)


@pytest.mark.parametrize("loops", [plain.loops, lambda: None])
def test_operations_that_wait_for_each_other_are_an_error(monkeypatch, loops):
    monkeypatch.setattr(plain, "loops", loops)
    shape = Shape(((1,), (1,)), ((0, 0), (0, 0)), (1, 1))
    first, second = generate("1f1b", shape).ops
    with pytest.raises(PlannerError, match="wait for each other"):
        makespan_s(shape, (first[::-1], second), some_costs(random.Random(0), shape))


def test_stages_are_those_of_python(built):
    """Layers of stages that lack room, that get a layer although they are slow, and that are divided as they like."""
    rng, few, slow = random.Random(5), 0, 0
    for _ in range(400):
        count = rng.randint(1, 9)
        stages = [
            (rng.choice((0.1, 1.0, rng.random() * 9)), rng.random() * 3, *[rng.random() for _ in range(3)])
            for _ in range(count)
        ]
        caps = [rng.choice((rng.randint(1, 9), 1 << 30)) for _ in stages]
        wanted = rng.randint(count, max(count, min(40, sum(caps))))
        if wanted > sum(caps):
            continue
        figures = b"".join(_ROW.pack(*row) for row in stages)
        out, drain = (c_double * 3)(), rng.random()
        assert built.het_stages(count, figures, bytes((c_int32 * count)(*caps)), wanted, drain, out)
        assert tuple(out) == stages_s(figures, caps, wanted, drain)
        layers = divide([row[0] for row in stages], [row[1] for row in stages], caps, wanted)
        few += any(n == cap for n, cap in zip(layers, caps))
        slow += layers.count(1) > 1
    assert few > 50 and slow > 50


def test_too_many_stages_are_left_to_python(built):
    assert not built.het_stages(257, bytes(5 * 8 * 257), bytes(4 * 257), 300, 0.0, (c_double * 3)())


def some_candidates(estimator: Estimator, rng: random.Random) -> Iterator[Candidate]:
    """Stages of several kinds, and cut in equal ones, under all schedules, with whole vocabularies and split ones."""
    limits = [n.quota for n in estimator.cluster.nodes]
    for _ in range(12):
        count = rng.randint(2, 6)
        groups = [
            tuple(
                Group(p, 1, rng.randint(1, n // count))
                for p, n in enumerate(limits)
                if n >= count and rng.random() < 0.6
            )
            for _ in range(count)
        ]
        alike = Group(rng.randrange(len(limits)), 1, rng.randint(1, 3))
        for stages in (groups, [(alike,)] * count):
            like = Candidate((), 1, zero_stage=1, slack=rng.choice((0.0, 1.0)), rows=rng.choice(((), ((1.0, 1.0),))))
            plain = balance(estimator, tuple(stages), like) if all(stages) else None
            if plain is not None:
                yield plain.with_(depths=tuple(rng.randint(1, 3) for _ in stages[1:]))
                yield from (c for schedule in SCHEDULES.values() for c in schedule.variants(estimator, plain))


@pytest.mark.parametrize("in_turn", [False, True])
def test_closed_form_is_that_of_python(built, monkeypatch, in_turn):
    rng, met = random.Random(in_turn), collections.Counter()
    for seed, slower in ((0, 1), (7, 1), (10, 100), (16, 1000), (2, 30)):
        cluster, model = random_pool(seed, "vocabulary" if seed == 7 else "dense")
        nodes = [n.model_copy(update={"network_bytes_per_s": n.network_bytes_per_s / slower}) for n in cluster.nodes]
        cluster = cluster.model_copy(update={"nodes": tuple(nodes)})
        runtime = replace(MEGATRON_HET, transfers_in_turn=in_turn)
        mine, theirs = (estimator_of(cluster, model, None, runtime) for _ in range(2))
        for candidate in some_candidates(mine, rng):
            with monkeypatch.context() as context:
                for module in (base, pipelines):
                    context.setattr(module, "loops", lambda: None)
                wanted = theirs.estimate(candidate)
            found = mine.estimate(candidate)
            assert found == wanted
            if found is not None:
                met[candidate.schedule, bool(candidate.rows)] += 1
                met[max(len(stage.groups) for stage in candidate.stages) > 1] += 1
    assert len(met) == 10 and min(met.values()) > 5


def test_what_certainly_takes_longer_is_not_priced():
    """What is priced below a limit is what is priced without one, and nothing below it is left out."""
    cluster, model = random_pool(10)
    mine, theirs = (estimator_of(cluster, model) for _ in range(2))
    left_out = above = 0
    for candidate in some_candidates(mine, random.Random(1)):
        wanted = theirs.estimate(candidate)
        if wanted is None:
            continue
        for share in (0.9, 1.0, 1.1):
            before = mine.evaluations
            found = mine.estimate(candidate, share * wanted.iteration_s)
            assert found == wanted or (found is None and share < 1)
            left_out += found is None
            above += found is None and mine.evaluations > before
        assert mine.estimate(candidate) == wanted
    assert left_out > 50 and not above


def test_equal_parts_are_timed_once_and_different_ones_all(built, monkeypatch):
    """Two pipelines of one shape; the second one's link is slower."""
    shape = Shape(((2,), (2,)), ((0, 1) * 4, (0, 1) * 4), (2, 2))
    slow, fast = Group(0, 1, 1), Group(1, 1, 1)
    seen = []
    real = plain._Part
    monkeypatch.setattr(plain, "_Part", lambda *a: seen.append(1) or real(*a))

    def time_s(groups):
        def price(a, b, local):
            return Link(0.0, 1e3 if slow in (a, b) else 1e9)

        costs = Costs(
            forward_s=((1.0,),) * 4, backward_s=((2.0,),) * 4, message_bytes=1e3, link=Wiring(groups, range(4), price)
        )
        seconds = pipelines_s("1f1b", shape, [1.0] * 4, costs, {})
        assert seconds == python_s(monkeypatch, shape, generate("1f1b", shape, speeds=[1.0] * 4), costs)
        return seconds

    both_fast = time_s([fast] * 4)
    assert len(seen) == 1
    assert time_s([fast, slow, fast, slow]) > both_fast
    assert len(seen) == 3


def test_no_compiler(fresh, monkeypatch):
    monkeypatch.setenv(plain.COMPILER, "")
    assert plain.loops() is None


@pytest.mark.parametrize("text", ["exit 1", "touch /dev/null"])
def test_compiler_that_makes_nothing(fresh, monkeypatch, tmp_path, text):
    tool = tmp_path / "cc"
    tool.write_text(f"#!/bin/sh\n{text}\n")
    tool.chmod(0o755)
    monkeypatch.setenv(plain.COMPILER, str(tool))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert plain.loops() is None
    assert not list((tmp_path / "cache" / "megatron_het").iterdir())


def test_what_others_may_write_is_not_loaded(built, fresh, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert plain.loops() is not None
    (made,) = (tmp_path / "megatron_het").glob("*.so")
    made.chmod(stat.S_IMODE(made.stat().st_mode) | 0o002)
    plain.loops.cache_clear()
    assert plain.loops() is None
    made.chmod(0o755)
    os.chmod(made.parent, 0o777)
    plain.loops.cache_clear()
    assert plain.loops() is None


def test_changed_text_is_compiled_anew(built, fresh, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    changed = tmp_path / "pipelines.c"
    changed.write_text(plain.SOURCE.read_text() + "\n")
    plain.loops()
    monkeypatch.setattr(plain, "SOURCE", changed)
    plain.loops.cache_clear()
    assert plain.loops() is not None
    assert len(list((tmp_path / "megatron_het").glob("*.so"))) == 2
