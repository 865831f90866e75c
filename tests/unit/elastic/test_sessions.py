"""How a session that fails is told."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from megatron_het.elastic import sessions
from megatron_het.elastic.generation import Generation
from tests.unit.elastic.test_pool import plan


class Session:
    """Stands for the boundary of a session."""

    def __init__(self, is_saving: bool) -> None:
        self.generation, self.process = Generation(0, plan([[1]]), (1,), (), ("n1",)), 1
        self.saving, self.iteration = 5 if is_saving else None, 4

    def closed(self) -> None:
        pass


@pytest.mark.parametrize("is_saving", [True, False])
def test_trouble_of_one_node_is_no_failed_checkpoint(
    is_saving: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def entry(_: Any) -> None:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(sessions, "end_session", lambda: None)
    monkeypatch.setattr(sessions.sys, "argv", [])
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
    boundary: Any = Session(is_saving)
    if is_saving:
        outcome = sessions.run_session(boundary, ["--save", "x"], tmp_path, entry)
        assert (outcome.how, outcome.unsaved) == ("failed", 5)
    else:
        with pytest.raises(OSError, match="input/output"):
            sessions.run_session(boundary, ["--save", "x"], tmp_path, entry)
