"""The numbers of the papers, to the digits printed there or derived from them by hand."""

from dataclasses import replace

import pytest
from schedule_helpers import full, peaks, run

from megatron_het.features.context_exchange.passes import ExchangePlan, balance, plan_exchange
from megatron_het.features.vocab_parallel.spec import add_vocabulary
from megatron_het.features.window.passes import add_parameters
from megatron_het.schedule import Costs, Graph, Link, Memory, Shape, add_transfers, generate
from megatron_het.schedule.simulate import simulate
from megatron_het.schedule.validate import deadlocks
from megatron_het.schedule.view.visualize import Setting, compare
from testing import paper_formulas as formulas


def lockstep_bubble(plan: ExchangePlan, slices: int, microbatches: int) -> float:
    """Bubble when attention is everything and every slot lasts as long as its heaviest device.

    The backward mirrors the forward, so forward slots are enough.
    """
    total = sum(max(slot.after) for slot in plan.slots if not slot.backward)
    ideal = microbatches * slices * (slices + 1) // 2 * plan.units
    return (total - ideal) / ideal


@pytest.mark.parametrize(
    ("p", "n", "v", "m", "peak", "fraction", "bubble"),
    [
        (4, 8, 1, 2, 14, 0.4375, 0.1875),
        (4, 8, 2, 2, 22, 0.3438, 0.0938),
        (4, 4, 1, 4, 10, 0.6250, 0.1875),
        (8, 8, 1, 4, 22, 0.3438, 0.2188),
        (8, 16, 5, 4, 94, 0.1469, 0.0219),
    ],
)
def test_slimpipe_memory_and_bubble(p: int, n: int, v: int, m: int, peak: int, fraction: float, bubble: float) -> None:
    """SlimPipe, Table 2; the peak falls by two stage-slices per device."""
    result = run(full("slimpipe", Shape.uniform(p, m, slices=n, chunks=v)))
    in_slices = [value * n * v * p for value in peaks(result)]
    assert in_slices == pytest.approx([peak - 2 * r for r in range(p)])
    assert max(peaks(result)) == pytest.approx(fraction, abs=5.1e-5)
    assert result.bubble_fraction == pytest.approx(bubble, abs=5.1e-5)


def test_slimpipe_figure_3() -> None:
    """At 8 stages and 4 microbatches: SlimPipe far below all others, split backwards in between."""
    order = ["slimpipe-helping", "slimpipe", "slimpipe-plain", "zb-v", "1f1b"]
    rows = {r.schedule: r for r in compare(Setting(8, 4, slices=16, attention_share=0.6), order)}
    assert [rows[a].bubble_fraction < rows[b].bubble_fraction for a, b in zip(order, order[1:])] == [True] * 4
    assert rows["1f1b"].bubble_fraction == pytest.approx(7 / 4)


def test_imbalance_bubble_of_split_backwards_grows_with_attention() -> None:
    """ZB-V is free of bubbles only when all three passes take equally long (SlimPipe, section 2.2)."""
    bubbles = []
    for share in (0.0, 0.5, 1.0):
        bubbles += [row.bubble_fraction for row in compare(Setting(4, 16, slices=4, attention_share=share), ["zb-v"])]
    assert bubbles[0] == pytest.approx(3 / 96)  # only the start of the last device
    assert bubbles[0] < bubbles[1] < bubbles[2] <= formulas.zb_v_bubble_bound(4, 16) + 3 / 96


def test_ministage_bubble_at_8_microbatches() -> None:
    """4 groups, 8 microbatches: .375 .188 .094 .047 for 1, 2, 4, 8 ministages."""
    got = [run(full("ministage", Shape.uniform(4, 8, chunks=c)), 1 / c, 2 / c).bubble_fraction for c in (1, 2, 4, 8)]
    assert got == pytest.approx([0.375, 0.188, 0.094, 0.047], abs=6e-4)
    logits = Memory(activation_bytes=((1.0, 1.0),) * 3, logits_bytes=(0.0, 0.0, 6.0))
    uses = run(full("ministage", Shape.uniform(3, 5, chunks=2)), memory=logits).memory
    assert [(u.peak_of("logits"), u.peak_of("activations")) for u in uses] == [(0, 10), (0, 10), (6, 6)]  # of one


@pytest.mark.parametrize(
    ("prefetch", "expected"), [(0, [0.883, 0.950, 1.001, 1.057]), (1, [0.883, 0.455, 0.256, 0.187])]
)
def test_ministage_gathers(prefetch: int, expected: list[float]) -> None:
    """A gather of 2.0 per stage, forward 1 and backward 3 per stage, 0.02 per hop: exposed or prefetched."""
    got = []
    for c in (1, 2, 4, 8):
        program = add_parameters(full("ministage", Shape.uniform(4, 4, chunks=c)), prefetch=prefetch, step="none")
        gather = ((2.0 / c,) * c,) * 4
        link = Link(latency_s=0.02)
        got.append(run(program, 1 / c, 3 / c, gather_s=gather, link=lambda a, b: link).bubble_fraction)  # noqa: B023
    assert got == pytest.approx(expected, abs=6e-4)


def test_zorse_table_2() -> None:
    """At most two ministages materialised; one gather per layer forward and one backward."""
    layers = 8
    for ministages in (1, 2, 4, 8):
        per = layers // ministages
        shape = Shape.uniform(3, 5, chunks=ministages, layers_per_chunk=per)
        program = add_parameters(full("ministage", shape), per_layer=True, keep_at_turn=False)
        sizes = ((float(per),) * ministages,) * 3
        base = Costs.uniform(shape)
        result = simulate(program, replace(base, memory=replace(base.memory, parameter_bytes=sizes)))
        for d in range(3):
            gathers = sum(op.kind.name == "PARAM_GATHER" for op in program.ops[d])
            assert gathers == formulas.ministage_gathers(layers)
            most = result.memory[d].peak_of("parameters")
            assert most == formulas.ministage_materialized_layers(layers, ministages)


def test_zorse_allocates_when_a_gather_is_issued() -> None:
    """A reduction that delays the next gather does not delay the allocation of what it fills."""
    shape = Shape.uniform(1, 2, chunks=4)
    program = add_parameters(full("ministage", shape), keep_at_turn=False, step="ministage")
    ones = ((1.0,) * 4,)
    costs = Costs(((1.0,) * 4,), ((3.0,) * 4,), gather_s=((0.1,) * 4,))
    costs = replace(costs, memory=replace(costs.memory, parameter_bytes=ones, gradient_bytes=ones))
    for reduce_s in (0.0, 2.5):
        (use,) = simulate(program, replace(costs, reduce_s=((reduce_s,) * 4,))).memory
        # Two open ministages and one in backward, and the one before while it is being reduced.
        assert use.peak_bytes == (4.0 if reduce_s else 3.0)


def test_zorse_keeps_gradient_shards_until_the_next_opening() -> None:
    """Exact updates: all shards at the start, each gone when its ministage is opened, all back at the end."""
    program = add_parameters(full("ministage", Shape.uniform(1, 2, chunks=4)), keep_at_turn=False, step="none")
    costs = Costs(((1.0,) * 4,), ((3.0,) * 4,))
    costs = replace(costs, memory=replace(costs.memory, gradient_shard_bytes=((1.0,) * 4,)))
    (use,) = simulate(program, costs).memory
    held = [value for _, value in use.curve("gradients")]
    assert held[0] == 2.0 and min(held) == 0.0 and held[-1] == 4.0 and max(held) <= 4.0


def test_exchange_table() -> None:
    """p = 4, n = 8: loads, transfers and loads after, through the juncture of two microbatches."""
    plan = plan_exchange(generate("slimpipe", Shape.uniform(4, 2, slices=8)), units=1)
    slots = {s.index: s for s in plan.slots if not s.backward}
    moves = {k: ", ".join(f"{m.owner}>{m.helper}:{m.stop - m.start}" for m in slots[k].moves) for k in range(8, 16)}
    expected = {
        8: ((1, 8, 7, 6), "1>0:2, 2>0:1, 3>0:1", (5, 6, 6, 5)),
        9: ((2, 1, 8, 7), "2>1:3, 3>0:2", (4, 4, 5, 5)),
        10: ((3, 2, 1, 8), "3>2:2, 3>1:1, 3>0:1", (4, 3, 3, 4)),
    }
    for k, (loads, text, after) in expected.items():
        assert (slots[k].loads, moves[k], slots[k].after) == (loads, text, after)
    for k in range(11, 16):
        assert slots[k].loads == (k - 7, k - 8, k - 9, k - 10)
        assert moves[k] == "0>3:1"


@pytest.mark.parametrize(("p", "n", "busiest", "paper"), [(4, 8, 44, 44), (8, 16, 166, 184)])
def test_exchange_volume(p: int, n: int, busiest: int, paper: int) -> None:
    """The busiest device stays within the paper's equation (2), and no slot differs by more than one slice.

    Its last factor is left out: these are slices per microbatch and device, of size L M_h / (p n).
    """
    plan = plan_exchange(generate("slimpipe", Shape.uniform(p, 3, slices=n)), units=1)
    middle = replace(plan, slots=tuple(s for s in plan.slots if not s.backward and n <= s.index < 2 * n))
    assert max(middle.volume().values()) == busiest <= paper
    assert balance(middle.slots) == 1


@pytest.mark.parametrize(
    ("p", "n", "none", "whole", "half"),
    [(4, 8, None, 0.201, 0.094), (8, 16, 0.669, 0.167, 0.109), (8, 32, 0.385, 0.085, 0.055)],
)
def test_exchange_bubble(p: int, n: int, none: float | None, whole: float, half: float) -> None:
    """Attention only, aligned slots, 4 microbatches: no exchange, many to one, half slices, idle help."""
    program = generate("slimpipe", Shape.uniform(p, 4, slices=n))

    def bubble(**options: object) -> float:
        return lockstep_bubble(plan_exchange(program, **options), n, 4)  # type: ignore[arg-type]

    if none is not None:
        plan = plan_exchange(program, units=1)
        total = sum(max(s.loads) for s in plan.slots if not s.backward)
        ideal = 4 * n * (n + 1) / 2
        assert (total - ideal) / ideal == pytest.approx(none, abs=6e-4)
    assert bubble(units=1) == pytest.approx(whole, abs=5.1e-4)
    assert bubble(units=2) == pytest.approx(half, abs=5.1e-4)
    assert bubble(units=2, helping=True) < (p - 1) / (n * 4)


def test_exchange_in_half_slices_reaches_the_papers_bound() -> None:
    """8 devices, 32 slices, 4 microbatches, attention only; below the bound when idle devices help."""
    names = ["slimpipe", "slimpipe-helping", "slimpipe-plain"]
    rows = {r.schedule: r.bubble_fraction for r in compare(Setting(8, 4, slices=32, attention_share=1.0), names)}
    assert rows["slimpipe"] <= 7 / 128
    assert rows["slimpipe-helping"] < formulas.slimpipe_attention_bubble(8, 4, 32) < 7 / 128
    assert rows["slimpipe-plain"] > 0.2


@pytest.mark.parametrize(
    ("n", "v", "output", "last_only", "distributed"), [(16, 1, 0.4, 0.438, 0.104), (16, 5, 2.1, 0.370, 0.021)]
)
def test_vocabulary_bubble(n: int, v: int, output: float, last_only: float, distributed: float) -> None:
    """8 devices, 4 microbatches, output layer of ``output`` forwards of a stage-slice (section 4.3)."""
    p, shape = 8, Shape.uniform(8, 4, slices=n, chunks=v)
    program = generate("slimpipe", shape)
    costs = Costs.uniform(shape, forward_s=n, backward_s=2 * n)

    def plus(table: tuple[tuple[float, ...], ...], extra: float) -> tuple[tuple[float, ...], ...]:
        return (*table[:-1], (*table[-1][:-1], table[-1][-1] + extra))

    heavy = replace(
        costs, forward_s=plus(costs.forward_s, n * output), backward_s=plus(costs.backward_s, 2 * n * output)
    )
    assert simulate(add_transfers(program), heavy).bubble_fraction == pytest.approx(last_only, abs=6e-4)
    part = (n * output / p,) * p
    split = replace(costs, vocab_forward_s=part, vocab_backward_s=tuple(2 * t for t in part))
    result = simulate(add_transfers(add_vocabulary(program)), split)
    assert result.bubble_fraction == pytest.approx(distributed, abs=6e-4)


def test_deep_warmup_hides_latency() -> None:
    """A hop of 0.3 forwards, 4 devices, 8 slices: .113 with SlimPipe's warm-up, twice that with Seq1F1B's."""
    shape = Shape.uniform(4, 4, slices=8)
    link = Link(latency_s=0.3 / 8)
    got = [run(full(name, shape), 1.0, 2.0, link=lambda a, b: link).bubble_fraction for name in ("slimpipe", "seq1f1b")]
    assert got == pytest.approx([0.1125, 0.225], abs=6e-4)


_OK, _DEAD = False, True


@pytest.mark.parametrize(
    ("name", "shape", "late"),
    [
        ("slimpipe", Shape.uniform(4, 2, slices=8), (_DEAD, _DEAD, _DEAD, _OK)),
        ("slimpipe", Shape.uniform(4, 2, slices=8, chunks=2), (_DEAD, _DEAD, _DEAD, _OK)),
        ("1f1b", Shape.uniform(4, 8), (_DEAD, _DEAD, _DEAD, _OK)),
        ("ministage", Shape.uniform(2, 2, chunks=3), (_DEAD, _DEAD, _DEAD, _OK)),
        ("ministage", Shape.uniform(2, 4, chunks=3), (_DEAD, _DEAD, _DEAD, _OK)),
        ("ministage", Shape.uniform(3, 3, chunks=4), (_DEAD, _DEAD, _DEAD, _OK)),
        ("ministage", Shape.uniform(4, 5, chunks=4), (_DEAD, _DEAD, _DEAD, _OK)),
        ("ministage", Shape.uniform(4, 16), (_DEAD, _DEAD, _DEAD, _OK)),
    ],
)
def test_transports(name: str, shape: Shape, late: tuple[bool, ...]) -> None:
    """Receives right before use deadlock on most transports; one global order on none."""
    program = generate(name, shape)
    found = deadlocks(Graph(add_transfers(program, order="late")))
    assert tuple(bool(found[t]) for t in ("blocking", "rank", "pair", "edge")) == late
    assert not any(deadlocks(Graph(add_transfers(program))).values())
