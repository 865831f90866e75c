"""How a session that fails is told."""

from __future__ import annotations

import errno
import os
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings import RotaryEmbedding

from megatron_het.elastic import sessions
from megatron_het.elastic.generation import Generation
from megatron_het.lowering.programs import Choice
from megatron_het.plan import Placement
from megatron_het.plan.run_config import HetConfig
from megatron_het.report.run_report import RunReport
from megatron_het.store import StoreServer
from megatron_het.store.torch_store import TorchStore
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


def test_a_change_waits_for_no_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The next session begins after the report of this one is written; a busy disk takes half a second to sync."""
    synced: list[int] = []

    def entry(_: Any) -> None:
        one = Placement(plan([[1]]))
        platform: Any = SimpleNamespace(device_name="cpu")
        RunReport(HetConfig(report_dir=tmp_path), one, 0, "hash", Choice("gloo", "test"), platform).write()

    monkeypatch.setattr(os, "fsync", synced.append)
    monkeypatch.setattr(sessions, "end_session", lambda: None)
    monkeypatch.setattr(sessions.sys, "argv", [])
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
    boundary: Any = Session(is_saving=False)
    assert sessions.run_session(boundary, [], tmp_path, entry).how == "finished"
    assert (tmp_path / "plan-0.json").exists()
    assert (tmp_path / "rank-0.json").exists()
    assert not synced


def test_a_world_that_could_not_be_made_uses_up_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waited for a process that died numbers its groups as one that has just come; else they never meet."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    shared = StoreServer("127.0.0.1", 0, "0123456789abcdef")
    shared.start()
    shared.put("lost", "the other one")
    with pytest.raises(RuntimeError, match="is lost"):
        dist.init_process_group("gloo", store=TorchStore(shared, 60.0, name="here", lost="lost"), rank=0, world_size=2)
    sessions.end_session()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None and dist.group.WORLD.group_name == "0"
    finally:
        sessions.end_session()
        shared.close()


def test_a_world_that_cannot_be_closed_is_no_hindrance_to_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("communicator was aborted")

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(dist, "destroy_process_group", fails)
    sessions.end_session()
    assert not dist.is_initialized()


def test_no_module_of_a_session_stays_in_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each held a process group, with its threads and connections, for as many sessions as the cache has places."""
    monkeypatch.setattr(RotaryEmbedding, "get_emb", lambda *_: torch.zeros(16, 1, 1, 8))  # by itself it asks for CUDA
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group: Any = dist.new_group([0])
        module = RotaryEmbedding(8, rotary_percent=1.0, use_cpu_initialization=True, cp_group=group)
        module(16)
        ends: list[Any] = [weakref.ref(module), weakref.ref(group)]
        del module, group
        assert ends[0]() is not None, "Megatron's cache does not hold it any more: what clears the cache can go"
    finally:
        sessions.end_session()
    assert [end() for end in ends] == [None, None]


@pytest.mark.parametrize(("loads", "began", "stays"), [(True, None, True), (True, 4, False), (False, None, False)])
def test_a_plan_that_the_flags_refuse_does_not_end_a_worker_that_holds_state(
    loads: bool, began: int | None, stays: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def entry(_: Any) -> None:
        raise SystemExit(2)

    monkeypatch.setattr(sessions, "end_session", lambda: None)
    monkeypatch.setattr(sessions.sys, "argv", [])
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
    boundary: Any = Session(is_saving=False)
    boundary.generation, boundary.began = Generation(1, plan([[1]]), (1,), (), ("n1",), loads), began
    if not stays:
        with pytest.raises(SystemExit):
            sessions.run_session(boundary, [], tmp_path, entry)
    else:
        outcome = sessions.run_session(boundary, [], tmp_path, entry)
        assert outcome.how == "failed" and outcome.is_refused
