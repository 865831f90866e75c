"""Why a dry run is refused is said whichever rank it is of."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.bad_input_cases import PLAN, document_text
from megatron_het.arguments.hooks import exit_with
from megatron_het.dry_run import __main__ as command
from megatron_het.dry_run import run as dry
from megatron_het.plan import PlanError


@pytest.mark.parametrize("rank", [0, 2])
def test_the_reason_is_said_once(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "0")

    def refused(setting: dry.Setting, flags: object) -> None:
        exit_with(PlanError("--seed", "x", "is no number"))

    monkeypatch.setattr(dry, "run", refused)
    (tmp_path / "plan.json").write_text(document_text(PLAN), encoding="utf-8")
    words = ["--rank", str(rank), "--out", str(tmp_path / "out.json"), "--", "--het-plan", str(tmp_path / "plan.json")]
    with pytest.raises(SystemExit) as stop:
        command.main(words)
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("is no number") == 1
