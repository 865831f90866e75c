"""A feature is one room: what is in ``spec.py`` and ``runtime.py`` here, and its place in the list, is all it takes.

From a flag to an operation that a rank executes, nothing of the product names it.
"""

import contextlib
import importlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_het.arguments.flags import het_help
from megatron_het.features import FEATURES
from megatron_het.features.registry import check_plan_alone, schedule_parameters
from megatron_het.lowering.programs import build
from megatron_het.lowering.ranks import boundary_map, lower
from megatron_het.plan import Placement, PlanError
from megatron_het.report import Timeline
from megatron_het.runtime.executor import Executor
from megatron_het.runtime.feature import Call, RuntimeFeature, open_features
from megatron_het.schedule import Costs, Kind, dumps, loads
from megatron_het.schedule.simulate import simulate
from megatron_het.schedule.validate import validate
from tests.unit.plan.test_plan import document, read
from tests.unit.schedule.schedule_helpers import drop_kinds

ROOM = "tests.unit.features.room"


@contextlib.contextmanager
def moved_in() -> Iterator[Any]:
    """The feature is in the list, and its kinds are in the table."""
    before = set(Kind.rows)
    spec = importlib.import_module(f"{ROOM}.spec")
    FEATURES.append(spec.Notes())
    try:
        yield spec
    finally:
        FEATURES.pop()
        drop_kinds(Kind.rows.keys() - before)
        for page in ("spec", "runtime"):
            sys.modules.pop(f"{ROOM}.{page}", None)


def with_notes(every: int) -> Any:
    body = document()
    body["schedule"] = {"name": "1f1b", "parameters": {"notes": True, "note_every": every}}
    return read(body)


def test_a_room_is_all_that_a_feature_takes() -> None:
    """Its flags, checks, program, text, validation, simulation, memory, lowering and execution."""
    with moved_in() as spec:
        assert "--het-note-every N" in het_help() and {"notes", "note_every"} <= set(schedule_parameters("1f1b"))
        with pytest.raises(PlanError, match="more than all microbatches"):
            check_plan_alone(with_notes(9))
        with pytest.raises(PlanError, match="note_every"):
            check_plan_alone(with_notes("x"))  # type: ignore[arg-type]
        plan = with_notes(2)
        check_plan_alone(plan)

        program = build(plan)[False]
        notes = [op for ops in program.ops for op in ops if op.kind is Kind.NOTE]
        assert len(notes) == 2 * 2 and {op.microbatch for op in notes} == {0, 2}
        assert loads(dumps(program)) == program and "NN0.0.0" in dumps(program)
        (problem,) = validate(loads(dumps(program).replace("NN0.0.0", "NN0.0.0 NN0.0.0", 1)))
        assert problem.rule == "lifetime" and problem.message.endswith("noted twice")

        costs = Costs.uniform(program.shape)
        result = simulate(program, costs)
        noted = [event for event in result.events() if event.op.kind is Kind.NOTE]
        assert {event.end_s - event.start_s for event in noted} == {spec.NOTE_S}
        assert result.memory[0].peak_of("other") == 2 * spec.NOTE_BYTES


def test_a_rank_executes_it() -> None:
    """The session opens its runtime half by the room's name, and the executor calls its handler."""
    with moved_in():
        plan = with_notes(2)
        lowered = lower(build(plan)[False], boundary_map(Placement(plan)), 0, 0)
        context: Any = SimpleNamespace(plan=plan, options=None, args=SimpleNamespace())
        (feature,) = open_alone(context)
        only = replace(lowered, ops=tuple(op for op in lowered.ops if op.kind is Kind.NOTE), losses_known=None)
        channels: Any = SimpleNamespace(wait_sends=lambda: None)
        chunks: Any = {"loss_chunk": -1, "num_chunks": 1, "tells_chunk": False}
        executor = Executor({False: only}, channels, **chunks, timeline=Timeline(), features=[feature])
        config: Any = SimpleNamespace(no_sync_func=None, param_sync_func=None)
        executor.run(
            Call(
                print,
                [None],
                [],
                config,
                num_microbatches=lowered.num_microbatches,
                length=1,
                hidden_size=1,
                sequences=lambda microbatch: 2,
                args=None,
                dtype=torch.float32,
                device=torch.device("cpu"),
                forward_only=False,
                collect_non_loss_data=False,
            )
        )
        written: Any = feature
        assert written.written == [(0, 2), (2, 2)]


def open_alone(context: Any) -> Sequence[RuntimeFeature]:
    """The last feature of the list, without the runtime halves of the others."""
    kept = list(FEATURES)
    FEATURES[:] = kept[-1:]
    try:
        return open_features(context)
    finally:
        FEATURES[:] = kept
