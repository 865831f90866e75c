"""Ministages and the parameter window train as stock Megatron in one process does.

``benchmarks/parity.py --schedule ministage`` has the combinations; here are a few that touch every part:
several stages, TP, offload, updates at the next opening and at once, checkpoints.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.cases import Case
from benchmarks.compare import compare
from benchmarks.runner import Runner
from benchmarks.zorse_cases import MinistageLab, keeps_gradients, ministage_cases
from megatron_het.plan import Placement
from megatron_het.runtime.programs import build_programs
from megatron_het.schedule.ir import Kind, Op

FP32_BAR = 1e-5
NAMES = ("fp32-05", "fp32-08", "fp32-12", "fp32-14")
CASES = {case.name: case for case in ministage_cases(0, quick=False) if case.name in NAMES}


@pytest.fixture(scope="module")
def lab(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> MinistageLab:
    return MinistageLab(runner, tmp_path_factory.mktemp("ministages"))


@pytest.mark.parametrize("name", NAMES)
def test_equals_one_process(name: str, lab: MinistageLab):
    case = CASES[name]
    lab.reference(case)
    done = lab.runner.run(lab.job(case))
    found = compare(done.job.log_dir, case.plan, lab.reference(case), gradients=keeps_gradients(case))
    assert max(found.loss, found.validation) <= FP32_BAR, found
    if keeps_gradients(case):
        assert found.gradient <= FP32_BAR, found
    assert lab.parameter_difference(case) <= FP32_BAR
    check_collectives(case, done.job.log_dir)


def check_collectives(case: Case, folder: Path) -> None:
    """The window ran exactly one collective per layer that the program gathers or reduces."""
    placement = Placement(case.plan)
    program = build_programs(placement)[False]
    for rank in range(case.plan.world_size):
        where = placement.locate(rank)
        window = json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8"))["window"]
        ops = program.for_device(where.stage, where.replica)
        alone = len(case.plan.stages[where.stage].replicas) == 1
        for kind, figure in ((Kind.PARAM_GATHER, "gathers"), (Kind.GRAD_REDUCE, "reductions")):
            layers = [_buckets(case, where.stage, op) for op in ops if op.kind == kind]
            assert window[figure] == (0 if alone else sum(layers)), (rank, figure)


def _buckets(case: Case, stage: int, op: Op) -> int:
    """Layers that an operation covers; without layers there may be an embedding or an output layer."""
    chunks = case.plan.stages[stage].layers
    if chunks[op.chunk]:
        return chunks[op.chunk] if op.start < 0 else op.stop - op.start
    ends = (stage == 0 and op.chunk == 0, stage == len(case.plan.stages) - 1 and op.chunk == len(chunks) - 1)
    return int(any(ends))
