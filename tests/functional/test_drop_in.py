"""Without ``--het-*`` flags nothing differs from stock Megatron; with a plan its logging is the same."""

import json
import math
import os
import random
from pathlib import Path

import pytest

from megatron_het.plan import save_plan
from testing.cases import Weights, build_plan, common_flags
from testing.lab import Lab
from testing.runner import Job, words

STEPS = 6
CHECKOUT = os.environ.get("MEGATRON_LM_PATH", "")
LOGGING = words(
    """
    --tensorboard-queue-size 1 --tensorboard-log-interval 1 --log-validation-ppl-to-tensorboard
    --log-num-zeros-in-grad --log-params-norm
    """
)


def _job(lab: Lab, folder: Path, *more: str, world_size: int = 1, **options: object) -> Job:
    folder.mkdir()
    flags = [*common_flags(Weights(), steps=STEPS), *lab.start_flags(Weights()), *more]
    setup = ("testing.probe:observe", {"out": str(folder), "gradients": False})
    return Job(folder.name, world_size, tuple(flags), folder, **{"setup": setup, **options})  # type: ignore[arg-type]


@pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM_PATH is not set: no Megatron-LM checkout")
@pytest.mark.parametrize(
    "layout", [[], ["--tensor-model-parallel-size", "2", "--sequence-parallel"]], ids=["one process", "TP 2"]
)
def test_without_a_plan_it_is_stock_megatron_bit_for_bit(layout: list[str], lab: Lab, tmp_path: Path):
    """The checkout's own pretrain_gpt.py and this entry: equal losses, weights and optimizer state."""
    world_size = 2 if layout else 1
    found = []
    for name, options in (
        (
            "stock",
            {"entry": "testing.probe:run_script", "environment": {"HET_TEST_SCRIPT": f"{CHECKOUT}/pretrain_gpt.py"}},
        ),
        ("ours", {}),
    ):
        save = ["--save", str(tmp_path / name / "checkpoints"), "--save-interval", str(STEPS)]
        job = _job(lab, tmp_path / name, *layout, *save, world_size=world_size, **options)
        lab.runner.run(job)
        found.append(json.loads((job.log_dir / f"losses-{world_size - 1}.json").read_text()))
    assert len(found[0]["losses"]) == STEPS and found[0] == found[1]
    first, second = (tmp_path / n / "checkpoints" / f"iter_{STEPS:07}" for n in ("stock", "ours"))
    compared = lab.compare_checkpoints(first, second, tmp_path / "compare")
    assert compared["missing"] == [] and compared["different"] == {} and compared["equal"] > 20


def _scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_gets_what_stock_megatron_writes(lab: Lab, tmp_path: Path):
    stock = _job(lab, tmp_path / "stock", *LOGGING, "--tensorboard-dir", str(tmp_path / "tb-stock"))
    lab.runner.run(stock)
    plan = build_plan([[1], [2, 1]], [2, 3], random.Random(0), even_routing=False)
    save_plan(plan, tmp_path / "plan.json")
    ours = _job(
        lab,
        tmp_path / "ours",
        *LOGGING,
        "--tensorboard-dir",
        str(tmp_path / "tb-ours"),
        "--het-plan",
        str(tmp_path / "plan.json"),
        world_size=plan.world_size,
    )
    lab.runner.run(ours)
    expected, found = _scalars(tmp_path / "tb-stock"), _scalars(tmp_path / "tb-ours")
    assert expected and sorted(found) == sorted(expected)
    timed = ("time", "memory", "throughput")
    for tag, points in expected.items():
        assert [step for step, _ in found[tag]] == [step for step, _ in points], tag
        if any(word in tag for word in timed):
            continue
        for (step, value), (_, wanted) in zip(found[tag], points, strict=True):
            assert math.isclose(value, wanted, rel_tol=1e-5, abs_tol=1e-12), (tag, step)
    assert {"lm loss", "grad-norm", "learning-rate", "lm loss validation"} <= set(found)
