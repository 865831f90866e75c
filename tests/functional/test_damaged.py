"""A damaged checkpoint is named and the one before is used; what cannot be loaded ends in one clear error."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_het.plan import Plan
from testing.cases import build_plan
from testing.compare import reported_losses
from testing.lab import Lab
from testing.runner import Finished, Job
from tests.functional.selected import selected, tiers

PLAN = build_plan([[1], [1, 1]], [2, 3], random.Random(0), even_routing=False)
STEPS, INTERVAL = 5, 2
SAVED = (2, 4)  # and the last step
TRACKER = "latest_checkpointed_iteration.txt"


def _job(lab: Lab, folder: Path, plan: Plan, *more: str, steps: int = STEPS, save: bool = True) -> Job:
    stop = ("--exit-interval", str(steps))
    every = INTERVAL if save else None
    return lab.training(plan, folder, *stop, *more, steps=STEPS, every=every, timeout_s=120.0)


@pytest.fixture(scope="module")
def whole(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run; the last checkpoint is of iteration 4."""
    folder = tmp_path_factory.mktemp("whole")
    lab.runner.run(_job(lab, folder, PLAN))
    shutil.rmtree(folder / "checkpoints" / f"iter_{STEPS:07}", ignore_errors=True)
    (folder / "checkpoints" / TRACKER).write_text(str(SAVED[-1]))
    return folder


def newest(checkpoints: Path) -> Path:
    return checkpoints / f"iter_{SAVED[-1]:07}"


def data_file(checkpoints: Path) -> Path:
    """The largest file of the newest checkpoint, of a rank that is not the first."""
    return max(newest(checkpoints).glob("__1_*.distcp"), key=lambda path: path.stat().st_size)


def truncate(checkpoints: Path) -> None:
    path = data_file(checkpoints)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(checkpoints: Path) -> None:
    path = data_file(checkpoints)
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 8] = bytes(byte ^ 0xFF for byte in data[middle : middle + 8])
    path.write_bytes(data)


def cut_description(checkpoints: Path) -> None:
    path = newest(checkpoints) / ".metadata"
    path.write_bytes(path.read_bytes()[:100])


# name: (damage, iteration that is loaded, what rank 0 must say)
DAMAGE: dict[str, tuple[Callable[[Path], None], int, str]] = {
    "truncated": (truncate, 2, "bytes, at least"),
    "missing file": (lambda saved: data_file(saved).unlink(), 2, "__1_"),
    "flipped bytes": (flip, 2, "another checksum"),
    "truncated description": (cut_description, 2, ".metadata is not what was written"),
    "tracker ahead": (lambda saved: shutil.rmtree(newest(saved)), 2, "there is no iter_0000004"),
    "empty tracker": (lambda saved: (saved / TRACKER).open("w").close(), 4, "names no iteration"),
    "no tracker": (lambda saved: (saved / TRACKER).unlink(), 4, "is missing"),
}
FULL = {"missing file", "truncated description", "tracker ahead", "no tracker"}


@pytest.fixture(scope="module")
def resumed(
    lab: Lab, whole: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, Finished]:
    """A run from each damaged folder that selected tests name, two at a time."""
    jobs = []
    for name, (damage, _, _) in selected(DAMAGE, request).items():
        folder = tmp_path_factory.mktemp("damaged")
        shutil.copytree(whole / "checkpoints", folder / "checkpoints")
        damage(folder / "checkpoints")
        jobs.append(replace(_job(lab, folder, PLAN, "--load", str(folder / "checkpoints")), name=name))
    return {done.job.name: done for done in lab.runner.run_all(jobs, at_once=2)}


@pytest.mark.parametrize("name", tiers(DAMAGE, FULL))
def test_training_goes_on_from_the_newest_whole_checkpoint(name: str, whole: Path, resumed: dict[str, Finished]):
    _, start, said = DAMAGE[name]
    done = resumed[name].check()
    expected = reported_losses(whole)
    assert reported_losses(done.job.log_dir) == {i: expected[i] for i in range(start + 1, STEPS + 1)}
    log = done.log(0)
    assert said in log and f"het: loading {done.job.log_dir}/checkpoints/iter_{start:07} instead" in log
    assert (done.job.log_dir / "checkpoints" / TRACKER).read_text() == str(STEPS)


def test_every_file_of_a_checkpoint_has_a_checksum(whole: Path):
    folder = newest(whole / "checkpoints")
    noted: dict[str, dict[str, int]] = {}
    for path in folder.glob("het-checksums-*.json"):
        noted |= json.loads(path.read_text())["files"]
    # Megatron 0.20 copies the tokenizer into a folder of its own, which no training reads.
    files = {path.name for path in folder.iterdir() if path.is_file() and not path.name.startswith("het-checksums")}
    assert set(noted) == files and len(files) > 3
    assert all(noted[name]["bytes"] == (folder / name).stat().st_size for name in files)


def refusal(finished: Finished) -> str:
    assert all(code == 2 for code in finished.returncodes), (finished.returncodes, finished.log(0)[-2000:])
    logs = [finished.log(rank) for rank in range(finished.job.world_size)]
    said = [line for log in logs for line in log.splitlines() if line.startswith("megatron_het: ")]
    assert len(said) == 1, logs
    assert not any("Traceback" in log for log in logs), logs
    return said[0]


def test_nothing_whole_is_one_error(lab: Lab, whole: Path, tmp_path: Path):
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(whole / "checkpoints", checkpoints)
    truncate(checkpoints)
    (checkpoints / f"iter_{SAVED[0]:07}" / "metadata.json").unlink()
    load = ("--load", str(checkpoints))
    said = refusal(lab.runner.run(_job(lab, tmp_path / "a", PLAN, *load, save=False), check=False))
    assert "iter_0000004" in said and "iter_0000002" in said and "--ckpt-step" in said
    asked = ("--ckpt-step", str(SAVED[-1]))
    said = refusal(lab.runner.run(_job(lab, tmp_path / "b", PLAN, *load, *asked, save=False), check=False))
    assert "iter_0000004" in said and "iter_0000002" not in said


def test_a_missing_checkpoint_is_an_error_where_one_must_exist(lab: Lab, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    job = _job(lab, tmp_path / "run", PLAN, "--load", str(tmp_path / "empty"), save=False)
    assert "there is no checkpoint" in refusal(lab.runner.run(job, check=False))


@pytest.mark.parametrize("distributed", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_optimizers_other_form_is_refused(distributed: bool, lab: Lab, tmp_path: Path):
    plans = {
        form: build_plan([[1], [1]], [2, 3], random.Random(0), distributed_optimizer=form) for form in (False, True)
    }
    lab.runner.run(_job(lab, tmp_path / "saved", plans[distributed], steps=2))
    load = ("--load", str(tmp_path / "saved" / "checkpoints"))
    job = _job(lab, tmp_path / "refused", plans[not distributed], *load, save=False)
    job = replace(job, setup=("testing.probe:forbid_process_groups", {}))
    said = refusal(lab.runner.run(job, check=False))
    assert "distributed optimizer" in said and "--no-load-optim" in said
    weights = _job(lab, tmp_path / "weights", plans[not distributed], *load, "--no-load-optim", save=False)
    lab.runner.run(weights)


def test_a_constant_structure_is_saved_again_and_again(lab: Lab, tmp_path: Path):
    """Ranks with replicas and ranks without: both agree on what the second save needs no exchange for."""
    job = _job(lab, tmp_path / "run", PLAN, "--ckpt-assume-constant-structure")
    lab.runner.run(job)
    job = _job(lab, tmp_path / "again", PLAN, "--load", str(tmp_path / "run" / "checkpoints"), "--ckpt-step", "4")
    lab.runner.run(job)
    first, second = reported_losses(tmp_path / "run"), reported_losses(tmp_path / "again")
    assert second == {STEPS: first[STEPS]}
