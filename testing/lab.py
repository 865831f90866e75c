"""Runs cases and their references, with data sets and initial checkpoints that are made once."""

import contextlib
import fcntl
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_het.plan import Plan, save_plan
from testing.cases import STEPS, VOCABULARY, Case, Weights, common_flags, recompute_some
from testing.compare import Differences, compare
from testing.runner import Job, Runner

_DOCUMENTS, _DATA_SEED = 3000, 7
_PACKED = ("--reset-attention-mask", "--reset-position-ids")
OBSERVE = "testing.probe:observe"
_CASE_S = 900.0  # far longer than a case takes, for machines that are busy


@contextlib.contextmanager
def made_once(folder: Path) -> Iterator[bool]:
    """Context with the lock of a folder that several processes need; yields whether its contents are missing.

    Args:
        folder: Folder, which is created.  It counts as complete once a block has ended without an exception.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # waits for a process that makes the contents
        made = folder / "made"
        yield not made.exists()
        made.touch()


class Lab:
    """A folder of cases and of the data, checkpoints and references that they share.

    Args:
        runner: Runs the jobs.
        folder: An empty or missing folder.
        steps: Training steps of cases and references.
        shared: Folder of data, checkpoints and references, which labs of other processes may use, too; None for
            ``folder``.
    """

    def __init__(self, runner: Runner, folder: Path, *, steps: int = STEPS, shared: Path | None = None) -> None:
        self.runner = runner
        self.folder = folder.resolve()
        self.steps = steps
        self.shared = (shared or folder).resolve()
        self._jobs = 0

    def common_flags(
        self, weights: Weights, clip: float = 1.0, extra: tuple[str, ...] = (), *, by_samples: bool = False
    ) -> tuple[str, ...]:
        """Flags of a run on the runner's device with the lab's steps, without data, checkpoints and plan."""
        device, has_te = self.runner.device, self.runner.has_te
        return common_flags(weights, clip, extra, by_samples=by_samples, steps=self.steps, device=device, has_te=has_te)

    def data_flags(self, long_tailed: bool = False) -> tuple[str, ...]:
        """Flags for the dataset, which is written on first use."""
        folder = self.shared / ("long-tailed" if long_tailed else "data")
        prefix = folder / "documents"
        with made_once(folder) as is_missing:
            if is_missing:
                options = {"prefix": str(prefix), "vocab_size": VOCABULARY, "documents": _DOCUMENTS, "seed": _DATA_SEED}
                setup = ("testing.probe:write_dataset", {**options, "long_tailed": long_tailed})
                self.runner.run(Job("dataset", 1, (), folder, "testing.probe:nothing", setup))
        # Megatron writes its index files without a lock, so each lab has its own.
        return ("--data-path", str(prefix), "--data-cache-path", str(self.folder / f"cache-{folder.name}"))

    def checkpoint(self, weights: Weights) -> Path:
        """Folder of a checkpoint that stock Megatron saved in one process after one step."""
        folder = self.shared / f"start-{weights}"
        with made_once(folder) as is_missing:
            if is_missing:
                device, has_te = self.runner.device, self.runner.has_te
                flags = (*common_flags(weights, steps=2, device=device, has_te=has_te), *self.data_flags())
                saving = ("--save", str(folder / "checkpoint"), "--save-interval", "1")
                self.runner.run(Job(folder.name, 1, (*flags, *saving, "--exit-interval", "1"), folder))
        return folder / "checkpoint"

    def start_flags(self, weights: Weights, extra: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Flags that start a new training from the shared checkpoint.

        Args:
            weights: Kind of weights of the case.
            extra: Further flags of the case; with packed documents the data set has long-tailed lengths.
        """
        path = str(self.checkpoint(weights))
        data = self.data_flags(any(flag in extra for flag in _PACKED))
        return ("--load", path, "--finetune", "--no-load-optim", "--no-load-rng", *data)

    def reference(self, case: Case) -> Path:
        """Folder of the case's reference: a run of stock Megatron in one process."""
        folder = self.shared / reference_name("one", *case.reference, self.steps)
        return self.alone(case, folder, ("testing.probe:observe", {"out": str(folder), "gradients": True}))

    def alone(self, case: Case, folder: Path, setup: tuple[str, dict[str, Any]], *more: str, **job: Any) -> Path:
        """Folder of a run of stock Megatron in one process, which is made if it is missing."""
        weights, clip, extra = case.reference
        with made_once(folder) as is_missing:
            if is_missing:
                argv = (*self.common_flags(weights, clip, extra), *self.start_flags(weights, extra), *more)
                self.runner.run(Job(folder.name, 1, argv, folder, setup=setup, **job))
        return folder

    def job(self, case: Case, *more: str, observe: str = OBSERVE, **options: Any) -> Job:
        """The job of a case under its plan, with a new folder for each call.

        Args:
            case: Plan, weights and flags.
            more: Flags of this run only.
            observe: Setup function of the ranks, in place of the probe's; it may inject faults.
            options: Options of ``observe``.
        """
        folder = self.folder / "cases" / f"{self._jobs:03}-{case.name}"
        self._jobs += 1
        folder.mkdir(parents=True)
        save_plan(recompute_some(case.plan), folder / "plan.json")
        flags = self.common_flags(*case.reference, by_samples=case.by_samples)
        plan = ("--het-plan", str(folder / "plan.json"), "--het-report", str(folder))
        return Job(
            case.name,
            case.plan.world_size,
            (*flags, *self.start_flags(case.weights, case.extra), *plan, *case.plan_flags(self.runner.device), *more),
            folder,
            setup=(observe, {"out": str(folder), "gradients": True, **options}),
            timeout_s=_CASE_S,
        )

    def training(
        self, plan: Plan, folder: Path, *more: str, steps: int, every: int | None, precision: str = "fp32", **job: Any
    ) -> Job:
        """The job of a plan without a case: ``folder`` gets its report, and a checkpoint every ``every`` steps."""
        folder.mkdir(parents=True, exist_ok=True)
        save_plan(plan, folder / "plan.json")
        flags = [*common_flags(Weights(precision), steps=steps), *self.data_flags(), *more]
        if every is not None:
            flags += ["--save", str(folder / "checkpoints"), "--save-interval", str(every)]
        flags += ["--het-plan", str(folder / "plan.json"), "--het-report", str(folder)]
        return Job("training", plan.world_size, tuple(flags), folder, **job)

    def compare_checkpoints(self, first: Path, second: Path, folder: Path) -> dict[str, Any]:
        """Result of ``testing.probe:compare_checkpoints``."""
        options = {"first": str(first), "second": str(second), "out": str(folder / "found.json")}
        setup = ("testing.probe:compare_checkpoints", options)
        self.runner.run(Job("compare", 1, (), folder, "testing.probe:nothing", setup))
        found: dict[str, Any] = json.loads((folder / "found.json").read_text())
        return found

    def differences(self, case: Case, *more: str, gradients: bool = True, **of_job: Any) -> Differences:
        """Run a case; returns its differences from its reference, see :meth:`job` and :func:`compare`."""
        reference, job = self.reference(case), self.job(case, *more, **of_job)
        self.runner.run(job)
        return compare(job.log_dir, case.plan, reference, gradients=gradients)


def reference_name(kind: str, weights: Weights, *what: object) -> str:
    """Name of a reference's folder: a readable beginning and a hash of ``what``."""
    return f"{kind}-{weights}-{hashlib.sha256(repr(what).encode()).hexdigest()[:12]}"
