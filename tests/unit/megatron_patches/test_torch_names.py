"""Private names of torch: known, and looked at before they are leaned on."""

from __future__ import annotations

import contextlib

import pytest
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers the backend

from megatron_het.distributed import GroupError
from megatron_het.distributed import groups as creation
from megatron_het.megatron_patches import torch_names
from megatron_het.megatron_patches.torch_names import TorchName, differences


def test_the_installed_torch_has_all_names() -> None:
    assert differences() == []


def test_what_is_missing_or_different_is_named() -> None:
    gone = TorchName("torch.distributed.distributed_c10d._no_such_name", (), "of a test")
    other = TorchName("torch.distributed.distributed_c10d._process_group_name", ("ranks",), "of a test")
    assert "_no_such_name is not there; of a test" in differences([gone])[0]
    assert "takes ranks, use_hashed_name, not ranks; of a test" in differences([other])[0]


@pytest.fixture
def world():
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_a_group_has_the_name_that_it_was_given(world: None) -> None:
    group = creation.create_group("stage", [0, 1], "fake", 5.0)
    assert group.group_name == creation.group_name("stage.fake", [0, 1]) + "/0"


def test_a_torch_that_names_groups_otherwise_is_refused(world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(creation, "_named", lambda name: contextlib.nullcontext())
    with pytest.raises(GroupError, match="does not name process groups as expected"):
        creation.create_group("stage", [0, 1], "fake", 5.0)


def test_a_torch_without_the_name_is_refused(world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = TorchName("torch.distributed.distributed_c10d._no_such_name", (), "of a test")
    monkeypatch.setattr(torch_names, "TORCH_NAMES", (gone,))
    with pytest.raises(GroupError, match="_no_such_name is not there"):
        creation.create_group("stage", [0, 1], "fake", 5.0)
