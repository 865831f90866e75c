"""The mixed pipeline of ``benchmarks.slimpipe_speed``: what passes take becomes the exchange's parameters."""

from dataclasses import replace

from benchmarks.slimpipe_runs import BAR, MIXED_LAYERS, SLICES, exchange_of, plan_of
from benchmarks.slimpipe_speed import MODEL
from megatron_het.features.registry import check_plan_alone
from megatron_het.lowering.programs import build
from megatron_het.plan.validate import check_plan
from megatron_het.schedule.cost import Costs
from megatron_het.schedule.simulate import simulate

TOKENS = 1024


def costs_of(slower: float, layer_s: float = 0.08, attention_s: float = 0.08) -> Costs:
    """Of a microbatch, with a backward of twice the forward; the last stage is ``slower``."""
    rows = [
        [n * s * factor for n, factor in zip(MIXED_LAYERS, (1.0, slower), strict=True)] for s in (layer_s, attention_s)
    ]
    rest, attention = (tuple((value,) for value in row) for row in rows)
    twice = [tuple((2 * value,) for (value,) in row) for row in (rest, attention)]
    shape = build(plan_of(MODEL, TOKENS))[False].shape
    costs = replace(Costs.uniform(shape), forward_s=rest, backward_s=twice[0], diagonal=0.5)
    return replace(costs, attention_forward_s=attention, attention_backward_s=twice[1])


def test_what_passes_take_becomes_the_parameters() -> None:
    found = exchange_of(costs_of(2.0))
    pairs = SLICES**2 / 2
    assert found["exchange_attention"] == [round(0.08e6 / pairs), round(0.16e6 / pairs)]
    assert found["exchange_rest"] == [round(5 * 0.08e6 / SLICES), round(3 * 0.16e6 / SLICES)]


def test_the_exchange_helps_a_slow_stage_in_the_simulator() -> None:
    costs = costs_of(2.0)
    plain, exchanging = plan_of(MODEL, TOKENS), plan_of(MODEL, TOKENS, **exchange_of(costs))
    for plan in (plain, exchanging):
        check_plan(plan)
        check_plan_alone(plan)
    off, on = (simulate(build(plan)[False], costs).makespan_s for plan in (plain, exchanging))
    assert off / on > BAR
