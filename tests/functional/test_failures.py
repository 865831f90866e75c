"""Bad input is refused before anything starts, and a dead rank stops the others with a reason."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_het.plan import Plan, save_plan
from testing.cases import MICROBATCHES, Weights, build_plan, common_flags
from testing.lab import Lab
from testing.runner import Finished, Job

PLAN = build_plan([[1], [2, 1]], [2, 3], random.Random(0), even_routing=False)
Document = dict[str, Any]


# -- bad input -----------------------------------------------------------------------------------


def _set(path: str, value: Any) -> Callable[[Document], None]:
    """An edit of one field, named as in error messages: ``stages[0].layers``."""
    *parents, last = [
        int(word) if word.isdigit() else word for word in path.replace("[", ".").replace("]", "").split(".")
    ]

    def edit(document: Document) -> None:
        target: Any = document
        for word in parents:
            target = target[word]
        target[last] = value

    return edit


# name: (edit of the plan, what the one message must contain)
BAD_PLANS: dict[str, tuple[Callable[[Document], None], tuple[str, ...]]] = {
    "overlapping ranks": (
        _set("stages[1].replicas[1].ranks", [2]),
        ("stages[1].replicas[1].ranks", "[2]", "already used"),
    ),
    "missing rank": (_set("stages[1].replicas[1].ranks", [4]), ("stages[*].replicas[*].ranks", "rank 3 is missing")),
    "layers that do not add up": (
        _set("stages[0].layers", [3]),
        ("stages[*].layers", "add up to 6", "model.num_layers is 5"),
    ),
    "heads not divisible by TP": (
        _set("model.num_attention_heads", 9),
        ("model.num_query_groups", "4", "does not divide the 9 attention heads"),
    ),
    "KV groups not divisible by TP": (
        _set("model.num_query_groups", 1),
        ("stages[1].replicas[0].ranks", "TP size 2", "model.num_query_groups = 1"),
    ),
    "replica without microbatches": (
        _set("stages[1].replicas[1].microbatches", []),
        ("stages[1].replicas[1].microbatches", "[]"),
    ),
    "microbatch of nobody": (
        _set("stages[0].replicas[0].microbatches", [0, 1, 2, 3, 4]),
        ("stages[0].replicas[*].microbatches", "microbatch 5"),
    ),
    "another model": (_set("model.hidden_size", 128), ("model.hidden_size", "128", "another model", "64")),
    "another batch": (_set("training.micro_batch_size", 2), ("stages[0].replicas[0].microbatches",)),
    "unknown version": (_set("version", 99), ("version", "99", "unknown plan version")),
    "another file": (_set("format", "recipe"), ("format", "'recipe'", "not a plan")),
    "unknown key": (_set("training.speed", 3), ("training", "speed")),
    "wrong type": (_set("training.global_batch_size", "6"), ("training.global_batch_size", "'6'")),
    "unknown precision": (_set("training.precision", "int4"), ("training.precision", "'int4'")),
    "schedule of another shape": (
        _set("schedule", {"name": "interleaved", "parameters": {"group": 1}}),
        ("schedule = 'interleaved'", "group = 1"),
    ),
    "a V of one chunk": (
        _set("schedule.name", "zb-v"),
        ("stages[*].layers = [1]", "2 in every stage", "--num-virtual-stages-per-pipeline-rank 2"),
    ),
    "unknown schedule": (_set("schedule.name", "2f2b"), ("schedule", "2f2b")),
}

# name: (flags, what the one message must contain)
BAD_FLAGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "expert parallelism": (("--expert-model-parallel-size", "2"), ("--expert-model-parallel-size", "2")),
    "context parallelism": (("--context-parallel-size", "2"), ("--context-parallel-size", "2")),
    "FSDP": (("--use-torch-fsdp2",), ("--use-torch-fsdp2", "True")),
    "Megatron FSDP": (("--use-megatron-fsdp",), ("--use-megatron-fsdp", "True")),
    "fp8": (("--fp8-format", "hybrid"), ("--fp8-format", "hybrid", "--transformer-impl")),
    "fp4": (("--fp4-format", "e2m1"), ("--fp4", "e2m1")),
    "another TP size": (("--tensor-model-parallel-size", "4"), ("--tensor-model-parallel-size", "4")),
    "another batch size": (("--global-batch-size", "12"), ("--global-batch-size", "12")),
    "another precision": (("--bf16",), ("--bf16", "True")),
    "another layer layout": (
        ("--decoder-first-pipeline-num-layers", "1"),
        ("--decoder-first-pipeline-num-layers", "1"),
    ),
    "checkpoint format": (("--ckpt-format", "torch"), ("--ckpt-format", "'torch'")),
    "unknown flag": (("--het-speed", "3"), ("--het-speed",)),
    "unknown transport": (("--het-transport", "pigeon"), ("--het-transport", "pigeon")),
    "NCCL on a CPU": (("--het-transport", "nccl"), ("--het-transport", "nccl")),
}


def _job(
    folder: Path, plan: Path, world_size: int = PLAN.world_size, *more: str, drop: str = "", ranks: int | None = 1
) -> Job:
    """A run that must be refused; a checkpoint and a report of an earlier run lie there.

    Of all ranks the first ``ranks`` start, all with None: those that refuse wait for nobody.
    """
    for name in ("checkpoints", "report"):
        (folder / name).mkdir()
    (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("7")
    (folder / "report" / "rank-0.json").write_text("{}")
    flags = [flag for flag in common_flags(Weights()) if flag != drop]
    flags += ["--mock-data", "--save", str(folder / "checkpoints"), "--save-interval", "1"]
    flags += ["--het-plan", str(plan), "--het-report", str(folder / "report"), *more]
    setup = ("testing.probe:forbid_process_groups", {})
    world = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    return Job("refused", ranks or world_size, tuple(flags), folder / "logs", setup=setup, environment=world)


def assert_refused(finished: Finished, parts: tuple[str, ...]) -> None:
    """Every rank failed, one said why, nobody created a process group, nothing was written."""
    assert all(finished.returncodes) and 97 not in finished.returncodes, finished.returncodes
    assert not finished.timed_out and all(code > 0 for code in finished.returncodes)
    logs = [finished.log(rank) for rank in range(finished.job.world_size)]
    said = [line for log in logs for line in log.splitlines() if "error: " in line or line.startswith("megatron_het: ")]
    assert len(set(said)) == 1, logs
    for part in parts:
        assert part in said[0], said[0]
    assert not any("Traceback" in log for log in logs), logs
    folder = finished.job.log_dir.parent
    tracker = folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    assert tracker.read_text() == "7" and list((folder / "checkpoints").iterdir()) == [tracker]
    report = folder / "report" / "rank-0.json"
    assert report.read_text() == "{}" and list((folder / "report").iterdir()) == [report]


@pytest.mark.parametrize("name", list(BAD_PLANS))
def test_a_bad_plan_is_refused(name: str, lab: Lab, tmp_path: Path):
    edit, parts = BAD_PLANS[name]
    document = PLAN.to_json()
    edit(document)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    ranks = None if name == "overlapping ranks" else 1
    assert_refused(lab.runner.run(_job(tmp_path, path, ranks=ranks), check=False), parts)


@pytest.mark.parametrize("name", list(BAD_FLAGS))
def test_options_that_cannot_go_together_are_refused(name: str, lab: Lab, tmp_path: Path):
    flags, parts = BAD_FLAGS[name]
    save_plan(PLAN, tmp_path / "plan.json")
    ranks = None if name == "another batch size" else 1
    job = _job(tmp_path, tmp_path / "plan.json", PLAN.world_size, *flags, ranks=ranks)
    assert_refused(lab.runner.run(job, check=False), parts)


def test_a_missing_flag_is_named(lab: Lab, tmp_path: Path):
    save_plan(PLAN, tmp_path / "plan.json")
    job = _job(tmp_path, tmp_path / "plan.json", drop="--calculate-per-token-loss")
    assert_refused(lab.runner.run(job, check=False), ("--calculate-per-token-loss", "False"))


def test_a_flag_that_the_machine_needs_is_named(lab: Lab, tmp_path: Path):
    save_plan(PLAN, tmp_path / "plan.json")
    job = _job(tmp_path, tmp_path / "plan.json", drop="--no-persist-layer-norm")
    assert_refused(
        lab.runner.run(job, check=False), ("--no-persist-layer-norm", "False", "Add --no-persist-layer-norm")
    )


def test_an_optimizer_format_that_depends_on_the_layout_is_refused(lab: Lab, tmp_path: Path):
    plan = replace(PLAN, training=replace(PLAN.training, distributed_optimizer=True))
    save_plan(plan, tmp_path / "plan.json")
    job = _job(tmp_path, tmp_path / "plan.json", drop="--dist-ckpt-optim-fully-reshardable")
    assert_refused(lab.runner.run(job, check=False), ("--dist-ckpt-optim-fully-reshardable", "False"))


@pytest.mark.parametrize("world_size", [1, 3, 5])
def test_another_world_size_is_refused(world_size: int, lab: Lab, tmp_path: Path):
    save_plan(PLAN, tmp_path / "plan.json")
    job = _job(tmp_path, tmp_path / "plan.json", world_size, ranks=None)
    assert_refused(lab.runner.run(job, check=False), ("WORLD_SIZE", str(world_size), "4 ranks"))


def test_a_truncated_or_missing_file_is_refused(lab: Lab, tmp_path: Path):
    path = tmp_path / "plan.json"
    save_plan(PLAN, path)
    path.write_text(path.read_text()[:200])
    assert_refused(lab.runner.run(_job(tmp_path, path), check=False), (str(path), "line 10", "truncated"))
    second = tmp_path / "second"
    second.mkdir()
    missing = tmp_path / "no-such-plan.json"
    job = _job(second, missing)
    assert_refused(lab.runner.run(job, check=False), ("--het-plan", str(missing), "no such file"))


# -- dead ranks ----------------------------------------------------------------------------------

SAVED_AT, KILLED_AT = 2, 3


def _training(lab: Lab, plan: Plan, folder: Path, *more: str) -> Job:
    folder.mkdir(exist_ok=True)
    save_plan(plan, folder / "plan.json")
    flags = [*common_flags(Weights(), steps=6), *lab.data_flags(), *more]
    flags += ["--save", str(folder / "checkpoints"), "--save-interval", str(SAVED_AT)]
    flags += ["--het-plan", str(folder / "plan.json"), "--het-report", str(folder)]
    # The distributed timeout is one minute.
    return Job("training", plan.world_size, tuple(flags), folder, timeout_s=240.0, grace_s=90.0)


def assert_names(log: str, victim: int) -> None:
    """A survivor says who has stopped, whatever it waited for itself."""
    texts = [f"rank {victim} does not answer"] + (["rank 0 has probably stopped"] if victim == 0 else [])
    assert any(text in log for text in texts), log[-3000:]


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.full), 3])
def test_a_killed_rank_stops_the_others(victim: int, lab: Lab, tmp_path: Path):
    """In the middle of an iteration; the others name operation and peer, the checkpoint is intact."""
    options = {"kill": [victim, KILLED_AT, 1]}
    job = replace(_training(lab, PLAN, tmp_path / "run"), setup=("testing.probe:observe", options))
    finished = lab.runner.run(job, check=False)
    assert finished.returncodes[victim] == -9
    survivors = [rank for rank in range(PLAN.world_size) if rank != victim]
    assert all(finished.returncodes[rank] > 0 for rank in survivors), finished.returncodes
    neighbours = {0: [1, 2, 3], 1: [0, 2], 3: [0]}[victim]
    for rank in survivors:
        log = finished.log(rank)
        said = [line for line in log.splitlines() if "failed" in line and f"rank {rank}: " in line]
        assert said, log[-2000:]
        if rank in neighbours:
            assert any(f"rank {victim}" in line for line in said), said
        assert_names(log, victim)
    checkpoints = job.log_dir / "checkpoints"
    tracker = checkpoints / "latest_checkpointed_iteration.txt"
    assert tracker.read_text() == str(SAVED_AT)
    again = _training(lab, PLAN, tmp_path / "again", "--load", str(checkpoints))
    lab.runner.run(again)
    report = json.loads((again.log_dir / f"rank-{PLAN.world_size - 1}.json").read_text())
    assert [i for i, _ in report["losses"]] == list(range(SAVED_AT + 1, 7))


def test_a_save_cut_short_leaves_the_previous_checkpoint(lab: Lab, tmp_path: Path):
    """A rank dies while it writes; the next start continues from the checkpoint before."""
    victim = 1
    options = {"which": victim, "save": 2}
    job = replace(_training(lab, PLAN, tmp_path / "run"), setup=("testing.probe:die_while_saving", options))
    finished = lab.runner.run(job, check=False)
    assert finished.returncodes[victim] == -9 and all(finished.returncodes), finished.returncodes
    assert not finished.timed_out
    for rank in set(range(PLAN.world_size)) - {victim}:
        assert_names(finished.log(rank), victim)
    checkpoints = job.log_dir / "checkpoints"
    assert (checkpoints / f"iter_{2 * SAVED_AT:07}").exists(), "the second save did not begin"
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == str(SAVED_AT)
    again = _training(lab, PLAN, tmp_path / "again", "--load", str(checkpoints))
    lab.runner.run(again)
    report = json.loads((again.log_dir / f"rank-{PLAN.world_size - 1}.json").read_text())
    assert [i for i, _ in report["losses"]] == list(range(SAVED_AT + 1, 7))


assert MICROBATCHES > 1  # the victim dies before its second microbatch
