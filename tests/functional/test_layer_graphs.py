"""Layers captured by a stand-in for Transformer Engine train as stock Megatron does in one process without graphs."""

from dataclasses import replace

import pytest

from megatron_het.features.layer_graphs.spec import TRY
from testing.cases import Case
from testing.combination_cases import case_of, pair_row
from testing.compare import compare
from testing.lab import Lab
from tests.functional.selected import tiers

BAR = 1e-5


def made(name: str, *parts: str, **features: object) -> Case:
    flags = ("--cuda-graph-impl", "transformer_engine", "--cuda-graph-warmup-steps", "1")
    modules = ("--cuda-graph-modules", *parts) if parts else ()
    case = case_of(pair_row(features.items()), name, 0)
    return replace(case, own=(*case.own, *flags, *modules))


CASES = [
    made("graphs-1f1b", schedule="1f1b"),
    made("graphs-interleaved", "attn", schedule="interleaved"),
    made("graphs-interleaved-layers", schedule="interleaved"),
    made("graphs-zb-v", schedule="zb-v"),
    made("graphs-slimpipe", "mlp", schedule="slimpipe"),
    made("graphs-overlap", overlap="gradients and parameters", distributed_optimizer=True),
    made("graphs-unequal-microbatches", microbatches="unequal"),
]
BY_NAME = {case.name: case for case in CASES}
FULL = {f"graphs-{name}" for name in ["1f1b", "interleaved", "interleaved-layers", "overlap", "unequal-microbatches"]}


@pytest.mark.parametrize("name", tiers(BY_NAME, FULL))
def test_equals_one_process(name: str, lab: Lab) -> None:
    case = BY_NAME[name]
    job = replace(lab.job(case, observe="tests.functional.captured_layers:observe"), environment={TRY: "1"})
    lab.runner.run(job)
    replays = [int((job.log_dir / f"replays-{rank}").read_text()) for rank in range(case.plan.world_size)]
    assert min(replays) > 0
    found = compare(job.log_dir, case.plan, lab.reference(case))
    assert max(found.loss, found.validation, found.gradient) <= BAR, found
