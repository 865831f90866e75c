"""Runs cases: data, shared checkpoints, references and the runs themselves, each made once."""

from __future__ import annotations

from pathlib import Path

from benchmarks.cases import VOCABULARY, Case, Weights, common_flags
from benchmarks.runner import Job, Runner
from megatron_het.plan import save_plan

_DOCUMENTS, _DATA_SEED = 3000, 7
_PACKED = ("--reset-attention-mask", "--reset-position-ids")
_CASE_S = 900.0  # far more than a case takes, for machines that do other work


class Lab:
    """A folder with everything that cases share.

    Args:
        runner: Where jobs run.
        folder: An empty or missing folder.
    """

    def __init__(self, runner: Runner, folder: Path) -> None:
        self.runner = runner
        self.folder = folder.resolve()
        self._references: dict[tuple[Weights, float, tuple[str, ...]], Path] = {}
        self._checkpoints: dict[Weights, Path] = {}
        self._data: dict[bool, Path] = {}
        self._jobs = 0

    def data_flags(self, long_tailed: bool = False) -> tuple[str, ...]:
        """Flags for the dataset, which is written on first use.

        Args:
            long_tailed: Whether its documents are of very different lengths.
        """
        if long_tailed not in self._data:
            prefix = self.folder / ("long-tailed" if long_tailed else "data") / "documents"
            prefix.parent.mkdir(parents=True)
            options = {"prefix": str(prefix), "vocab_size": VOCABULARY, "documents": _DOCUMENTS, "seed": _DATA_SEED}
            self.runner.run(
                Job(
                    "dataset",
                    1,
                    (),
                    prefix.parent,
                    "benchmarks.probe:nothing",
                    ("benchmarks.probe:write_dataset", {**options, "long_tailed": long_tailed}),
                )
            )
            self._data[long_tailed] = prefix
        prefix = self._data[long_tailed]
        return ("--data-path", str(prefix), "--data-cache-path", str(prefix.parent / "cache"))

    def checkpoint(self, weights: Weights) -> Path:
        """Weights that stock Megatron saved in one process, after one step."""
        if weights not in self._checkpoints:
            folder = self.folder / f"start-{weights}"
            flags = (*common_flags(weights, steps=2), *self.data_flags())
            saving = ("--save", str(folder / "checkpoint"), "--save-interval", "1")
            self.runner.run(Job(folder.name, 1, (*flags, *saving, "--exit-interval", "1"), folder))
            self._checkpoints[weights] = folder / "checkpoint"
        return self._checkpoints[weights]

    def start_flags(self, weights: Weights, extra: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Flags that start from the shared weights as a new training.

        Args:
            weights: Of the case.
            extra: More flags of the case; where they are about documents, so is its dataset.
        """
        path = str(self.checkpoint(weights))
        data = self.data_flags(any(flag in extra for flag in _PACKED))
        return ("--load", path, "--finetune", "--no-load-optim", "--no-load-rng", *data)

    def reference(self, case: Case) -> Path:
        """The folder of the case's one-process run of stock Megatron."""
        key = weights, clip, extra = case.reference
        if key not in self._references:
            folder = self.folder / f"one-{len(self._references)}-{weights}-{clip}"
            self.runner.run(
                Job(
                    folder.name,
                    1,
                    (*common_flags(weights, clip, extra), *self.start_flags(weights, extra)),
                    folder,
                    setup=("benchmarks.probe:observe", {"out": str(folder), "gradients": True}),
                )
            )
            self._references[key] = folder
        return self._references[key]

    def job(self, case: Case, *more: str) -> Job:
        """The run of a case under its plan, in a folder of its own, also where several cases have one name."""
        folder = self.folder / "cases" / f"{self._jobs:03}-{case.name}"
        self._jobs += 1
        folder.mkdir(parents=True)
        save_plan(case.plan, folder / "plan.json")
        flags = common_flags(*case.reference, by_samples=case.by_samples)
        plan = ("--het-plan", str(folder / "plan.json"), "--het-report", str(folder))
        return Job(
            case.name,
            case.plan.world_size,
            (*flags, *self.start_flags(case.weights, case.extra), *plan, *case.plan_flags(), *more),
            folder,
            setup=("benchmarks.probe:observe", {"out": str(folder), "gradients": True}),
            timeout_s=_CASE_S,
        )
