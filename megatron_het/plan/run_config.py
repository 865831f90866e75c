"""The ``--het-*`` flags of a run as one record, which launch makes and everything on a rank reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_het.plan.schema import Plan


@dataclass(frozen=True, slots=True)
class HetConfig:
    """The ``--het-*`` flags.  Without a plan the extension is off; with ``auto_batch`` the plan is yet to be made."""

    plan: Plan | None = None
    plan_path: str = ""
    transport: str = "auto"
    report_dir: Path | None = None
    trace_dir: Path | None = None
    trace_iteration: int = 3
    auto_batch: Path | None = None
    least_zero: int = 0
    measured_cp_shares: bool = False
    """Whether the plan gets its context-parallel parts from measurements at the start."""
    turns: tuple[Plan, ...] = ()
    """All plans of the job, where several take turns, one for each global batch size."""
    turn_files: tuple[str, ...] = ()
    trust_checkpoint: bool = False
    """Whether the description of a checkpoint may name classes that are no part of its format."""

    @property
    def is_active(self) -> bool:
        """Whether there is a plan to run."""
        return self.plan is not None

    def report_file(self, rank: int) -> Path | None:
        """Where a rank's report goes; None when none was asked for."""
        return self.report_dir / f"rank-{rank}.json" if self.report_dir else None

    def trace_file(self, rank: int) -> Path | None:
        """Where a rank's trace goes; None when none was asked for."""
        return self.trace_dir / f"trace-rank-{rank}.json" if self.trace_dir else None
