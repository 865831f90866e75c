"""The costs that a plan file carries: the simulator says the same of them, and wrong ones are refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from megatron_het.lowering.programs import costs_of, planned_costs, program_of
from megatron_het.plan import ModelShape, Plan, PlanError, Prediction, Replica, ScheduleSpec, Stage, TrainingShape
from megatron_het.plan.schema import PER_CHUNK, PER_DEVICE
from megatron_het.plan.validate import check_plan
from megatron_het.schedule import cost
from megatron_het.schedule.cost import Costs, Link
from megatron_het.schedule.simulate import simulate


def _plan() -> Plan:
    ids = tuple(range(6))
    return Plan(
        ModelShape(5, 64, 8, 4, 32),
        TrainingShape(1, 6),
        (
            Stage((2, 1), (Replica((0,), ids[::2], "a"), Replica((1,), ids[1::2], "b"))),
            Stage((1, 1), (Replica((2,), ids, "a"),)),
        ),
        ScheduleSpec("interleaved"),
    )


def _costs() -> Costs:
    return Costs(
        forward_s=((0.2, 0.1), (0.4, 0.2), (0.1, 0.3)),
        backward_s=((0.4, 0.2), (0.8, 0.4), (0.2, 0.6)),
        step_s=((0.01, 0.02), (0.01, 0.02), (0.03, 0.04)),
        tail_s=(0.05, 0.05, 0.07),
        message_bytes=1000.0,
        link=lambda a, b: Link(0.001 * (1 + a), 1e5 * (1 + b)),
        operation_s=0.002,
        host_blocks=True,
    )


def _carrying() -> Plan:
    plan = _plan()
    return dataclasses.replace(plan, predicted=Prediction(1.0, 0.1, costs=planned_costs(_costs(), program_of(plan))))


def test_all_tables_of_the_simulator_are_carried() -> None:
    assert set(PER_CHUNK) == set(cost._PER_CHUNK) - set(cost._MEMORY_PER_CHUNK)
    assert set(PER_DEVICE) == set(cost._PER_DEVICE)


def test_a_plan_that_was_written_and_read_is_simulated_as_before() -> None:
    plan = Plan.from_json(json.loads(json.dumps(_carrying().to_json())))
    check_plan(plan)
    found = costs_of(plan)
    assert found is not None
    program = program_of(plan)
    before, after = simulate(program, _costs()), simulate(program, found)
    assert after.makespan_s == pytest.approx(before.makespan_s, rel=1e-5)
    assert after.end_s == pytest.approx(before.end_s, rel=1e-5)


def test_devices_and_links_that_are_alike_share_a_row() -> None:
    alike = dataclasses.replace(
        _costs(),
        forward_s=((0.2, 0.1),) * 3,
        backward_s=((0.4, 0.2),) * 3,
        step_s=(),
        tail_s=(),
        link=lambda a, b: Link(0.1, 1e5),
    )
    found = planned_costs(alike, program_of(_plan()))
    assert [row.devices for row in found.devices] == [(0, 1, 2)]
    assert len(found.links) == 1


def test_a_plan_without_costs_says_nothing() -> None:
    assert costs_of(_plan()) is None
    assert "costs" not in dataclasses.replace(_plan(), predicted=Prediction(1.0, 0.1)).to_json()["predicted"]


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda c: c["devices"][0].update(forward_s=[0.1]), "forward_s"),
        (lambda c: c["devices"][0].update(forward_s=[0.1, -1.0]), "forward_s"),
        (lambda c: c["devices"][0].update(step_s=[0.1]), "step_s"),
        (lambda c: c["devices"][0].update(devices=[7]), "devices[0].devices"),
        (lambda c: c["devices"].pop(), "costs.devices"),
        (lambda c: c["links"][0].update(bytes_per_s=0.0), "bytes_per_s"),
        (lambda c: c["links"][0].update(pairs=[[0, 9]]), "pairs"),
        (lambda c: c["links"][0].update(pairs=[[0]]), "pairs"),
        (lambda c: c.update(message_bytes=-1.0), "message_bytes"),
        (lambda c: c.update(speed=1.0), "speed"),
    ],
)
def test_costs_that_do_not_fit_are_refused(change: Any, where: str) -> None:
    document = json.loads(json.dumps(_carrying().to_json()))
    change(document["predicted"]["costs"])
    with pytest.raises(PlanError) as refused:
        check_plan(Plan.from_json(document))
    assert where in refused.value.where
