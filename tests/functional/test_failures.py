"""Bad input is refused before anything starts, and a dead rank stops the others with a reason."""

import json
import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_het.plan import save_plan
from testing.cases import MICROBATCHES, Weights, build_plan, common_flags
from testing.compare import reported_losses
from testing.lab import Lab
from testing.probe import around
from testing.runner import Finished, Job, words

PLAN = build_plan([[1], [2, 1]], [2, 3], random.Random(0), even_routing=False)
Document = dict[str, Any]


# -- bad input -----------------------------------------------------------------------------------

# name: (edit of the plan, what the one message must contain); tests/unit/plan/test_plan.py has more of them
BAD_PLANS: dict[str, tuple[Callable[[Document], None], tuple[str, ...]]] = {
    "overlapping ranks": (
        lambda plan: plan["stages"][1]["replicas"][1].update(ranks=[2]),
        ("stages[1].replicas[1].ranks", "[2]", "already used"),
    ),
    "another model": (
        lambda plan: plan["model"].update(hidden_size=128),
        ("model.hidden_size", "128", "another model", "64"),
    ),
    "schedule of another shape": (
        lambda plan: plan.update(schedule={"name": "interleaved", "parameters": {"group": 1}}),
        ("schedule = 'interleaved'", "group = 1"),
    ),
}

# name: (flags, what the one message must contain, more of the job); tests/unit/plan/test_refusals.py has more of them
BAD_STARTS: dict[str, tuple[tuple[str, ...], tuple[str, ...], dict[str, Any]]] = {
    "fp8": (("--fp8-format", "hybrid"), ("--fp8-format", "hybrid", "--transformer-impl"), {}),
    "another batch size": (("--global-batch-size", "12"), ("--global-batch-size", "12"), {"ranks": None}),
    "checkpoint format": (("--ckpt-format", "torch"), ("--ckpt-format", "'torch'"), {}),
    "unknown flag": (("--het-speed", "3"), ("--het-speed",), {}),
    "NCCL on a CPU": (("--het-transport", "nccl"), ("--het-transport", "nccl"), {}),
    "a flag that the machine needs": (
        (),
        ("--no-persist-layer-norm", "False", "Add --no-persist-layer-norm"),
        {"drop": "--no-persist-layer-norm"},
    ),
    "an optimizer's format that depends on the layout": (
        (),
        ("--dist-ckpt-optim-fully-reshardable", "False"),
        {"drop": "--dist-ckpt-optim-fully-reshardable"},
    ),
    "another world size": ((), ("WORLD_SIZE", "3", "4 ranks"), {"world_size": 3, "ranks": None}),
}


def _job(
    folder: Path, plan: Path, *more: str, world_size: int = PLAN.world_size, drop: str = "", ranks: int | None = 1
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


@pytest.mark.parametrize("name", list(BAD_STARTS))
def test_a_start_that_cannot_be_is_refused(name: str, lab: Lab, tmp_path: Path):
    flags, parts, more = BAD_STARTS[name]
    is_divided = "--dist-ckpt-optim-fully-reshardable" in more.values()
    plan = replace(PLAN, training=replace(PLAN.training, distributed_optimizer=is_divided))
    save_plan(plan, tmp_path / "plan.json")
    assert_refused(lab.runner.run(_job(tmp_path, tmp_path / "plan.json", *flags, **more), check=False), parts)


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


def _training(lab: Lab, folder: Path, *more: str) -> Job:
    # The distributed timeout is one minute.
    limits = {"timeout_s": 240.0, "grace_s": 90.0}
    return lab.training(PLAN, folder, *more, steps=6, every=SAVED_AT, **limits)


def assert_goes_on(lab: Lab, folder: Path, checkpoints: Path) -> None:
    """Another start trains from the iteration that was saved before the accident to the end."""
    again = _training(lab, folder, "--load", str(checkpoints))
    lab.runner.run(again)
    assert sorted(reported_losses(again.log_dir)) == list(range(SAVED_AT + 1, 7))


def assert_names(log: str, victim: int) -> None:
    """A survivor says who has stopped, whatever it waited for itself."""
    texts = [f"rank {victim} does not answer"] + (["rank 0 has probably stopped"] if victim == 0 else [])
    assert any(text in log for text in texts), log[-3000:]


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.full), 3])
def test_a_killed_rank_stops_the_others(victim: int, lab: Lab, tmp_path: Path):
    """In the middle of an iteration; the others name operation and peer, the checkpoint is intact."""
    options = {"kill": [victim, KILLED_AT, 1]}
    job = replace(_training(lab, tmp_path / "run"), setup=("testing.probe:observe", options))
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
    assert_goes_on(lab, tmp_path / "again", checkpoints)


def test_a_save_cut_short_leaves_the_previous_checkpoint(lab: Lab, tmp_path: Path):
    """A rank dies while it writes; the next start continues from the checkpoint before."""
    victim = 1
    options = {"which": victim, "save": 2}
    job = replace(_training(lab, tmp_path / "run"), setup=("testing.probe:die_while_saving", options))
    finished = lab.runner.run(job, check=False)
    assert finished.returncodes[victim] == -9 and all(finished.returncodes), finished.returncodes
    assert not finished.timed_out
    for rank in set(range(PLAN.world_size)) - {victim}:
        assert_names(finished.log(rank), victim)
    checkpoints = job.log_dir / "checkpoints"
    assert (checkpoints / f"iter_{2 * SAVED_AT:07}").exists(), "the second save did not begin"
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == str(SAVED_AT)
    assert_goes_on(lab, tmp_path / "again", checkpoints)


def lose_losses(*, rank: int, which: int | None) -> None:
    """Make all losses of one rank NaN (a ``Job.setup``)."""
    if rank == which:
        from megatron_het import gpt_training

        around(gpt_training, "_watch_loss", before=lambda _, loss: loss.data.fill_(math.nan))


@pytest.mark.parametrize(
    ("saves", "mode", "said", "victim"),
    [
        (True, "validate_results", "iteration 2 gave NaN.*checkpoints is of before", None),
        (False, "validate_results", "iteration 2 gave NaN.*without --save", None),
        (True, "disabled", "Rank 0, .* Unexpected result nan .* has no checkpoint yet", None),
        (True, "disabled", "Rank 3, .* Unexpected result nan .* has no checkpoint yet", 3),
    ],
)
def test_a_loss_that_is_no_number_ends_all_ranks_with_one_line(
    saves: bool, mode: str, said: str, victim: int | None, lab: Lab, tmp_path: Path
):
    """The first rank took the store with it, so that others ended with traces of C++, or all with a TypeError."""
    flags, every = words("--lr 1e30 --min-lr 1e29 --clip-grad 0 --rerun-mode", mode), SAVED_AT if saves else None
    setup = ("tests.functional.test_failures:lose_losses", {"which": victim})
    job = lab.training(PLAN, tmp_path / "run", *flags, steps=6, every=every, setup=setup)
    finished = lab.runner.run(job, check=False)
    assert set(finished.returncodes) == {16 if saves and mode != "disabled" else 1}
    logs = [finished.log(rank) for rank in range(PLAN.world_size)]
    assert not any(word in log for log in logs for word in ("Traceback", "frame #")), logs
    assert re.match(f"megatron_het: {said}", logs[0].splitlines()[-1]), logs[0][-500:]


assert MICROBATCHES > 1  # the victim dies before its second microbatch
