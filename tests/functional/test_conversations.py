"""Packed conversations (``--sft``) under plans equal stock Megatron with a dense mask in one process."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from testing.cases import VOCABULARY, Case, build_plan, common_flags
from testing.compare import compare_gradients, gathered, plan_losses, reference_losses, relative
from testing.lab import Lab
from testing.runner import Job
from testing.slimpipe_cases import PLAIN, sliced_case
from tests.functional.conversations import write_conversations
from tests.functional.selected import tiers

BAR = 1e-5
_SHARED = {"layers": 5, "cp": 2, "uneven": True, "microbatches": 3}
CASES = {
    case.name: case
    for case in (
        Case("three-stages", build_plan([[1], [2, 1], [1]], [2, 2, 1], random.Random(0), even_routing=False)),
        sliced_case({**PLAIN, "layers": 5, "chunks": 2}, "in-slices", random.Random(0)),
        sliced_case({**PLAIN, "layers": 5, "vocabulary": True}, "vocabulary", random.Random(0)),
        sliced_case({**PLAIN, **_SHARED, "chunks": 2}, "shared-slices", random.Random(0)),
        sliced_case({**PLAIN, **_SHARED, "schedule": "1f1b", "tp": 2}, "shared-sequences", random.Random(0)),
        sliced_case(
            {**PLAIN, "layers": 5, "exchange": {"context_exchange": True}, "parameters": {"slice_lengths": "work"}},
            "of-equal-work-exchanged",
            random.Random(0),
        ),
    )
}


@pytest.fixture(scope="module")
def start(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], tuple[str, ...]]:
    file = tmp_path_factory.mktemp("conversations") / "train.jsonl"
    write_conversations(file, 200, VOCABULARY, 0)

    def flags(case: Case) -> tuple[str, ...]:
        found = list(lab.start_flags(case.weights))
        at = found.index("--data-path")
        return (*found[:at], "--data-path", str(file), "--data-cache-path", str(file.parent / "cache"))

    return flags


def evaluated(folder: Path, rank: int) -> list[float]:
    return json.loads((folder / f"evaluations-{rank}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", tiers(CASES, ["vocabulary", "shared-sequences", "of-equal-work-exchanged"]))
def test_equals_one_process(name: str, lab: Lab, start: Callable[[Case], tuple[str, ...]], tmp_path: Path):
    case = CASES[name]
    reference = tmp_path / "one"
    setup = ("tests.functional.conversations:masked", {"out": str(reference), "gradients": True})
    size = ("--micro-batch-size", str(case.plan.training.micro_batch_size))  # an evaluation is a mean over microbatches
    lab.runner.run(
        Job("one", 1, (*common_flags(case.weights, steps=lab.steps), *start(case), *size), reference, setup=setup)
    )
    done = lab.runner.run(lab.job(case, *start(case), "--sft", observe="tests.functional.conversations:packed"))
    found, expected = plan_losses(done.job.log_dir, case.plan), reference_losses(reference)
    assert relative(found["losses"], expected["losses"], "losses") <= BAR
    evaluations = evaluated(reference, 0)
    last = case.plan.stages[case.plan.path[-1][0]].replicas[-1].ranks[-1]
    assert relative(evaluated(done.job.log_dir, last), evaluations, "evaluations") <= BAR
    assert relative(found["validation"], evaluations[: len(found["validation"])], "reported evaluations") <= BAR
    assert compare_gradients(done.job.log_dir, case.plan, gathered(reference, [0]))[0] <= BAR
