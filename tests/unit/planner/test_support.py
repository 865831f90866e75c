"""The archive for a report of a bug."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

import pytest

from tools.planner.__main__ import main


def test_versions_plan_and_logs_are_packed_without_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = tmp_path / "run", tmp_path / "support.zip"
    (run / "iter_0000001").mkdir(parents=True)
    for name in ("plan.json", "args.sh", "token", "text.bin", "weights.distcp", "iter_0000001/metadata.json"):
        (run / name).write_text("x", encoding="utf-8")
    (run / "rank-0.log").write_bytes(b"a" * (1 << 20) + b"the end")
    os.mkfifo(run / "pipe.log")
    assert main(["support", str(run), "--out", str(out)]) == 0
    with zipfile.ZipFile(out) as archive:
        assert [name.split("-", 1)[-1] for name in archive.namelist()] == [
            "versions.json", "args.sh", "plan.json", "rank-0.log"]  # fmt: skip
        assert "torch" in json.loads(archive.read("versions.json"))
        log = archive.read("002-rank-0.log")
    assert len(log) == 1 << 20 and log.endswith(b"the end")
    assert main(["support", str(run), "--out", str(out)]) == 2
    assert "the file is there" in capsys.readouterr().err
