"""What a rank does after an iteration, and after its last one."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import SummaryWriter

from megatron_het.device import activate
from megatron_het.runtime import training
from megatron_het.runtime.training import leaving_together, sum_indexer_losses

_EVENTS = 8


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch):
    write = RecordWriter.write

    def slow_write(self: Any, data: bytes) -> None:
        time.sleep(0.05)
        write(self, data)

    monkeypatch.setattr(RecordWriter, "write", slow_write)


@pytest.mark.usefixtures("alone", "slow_disk")
@pytest.mark.parametrize("stop", [None, SystemExit(0)], ids=["end", "planned stop"])
def test_all_events_are_in_the_file_and_no_group_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stop: BaseException | None
):
    writer = SummaryWriter(str(tmp_path / "events"))
    held = SimpleNamespace(_GLOBAL_TENSORBOARD_WRITER=writer)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", held)
    try:
        with leaving_together(over_gloo=True):
            for step in range(_EVENTS):
                writer.add_scalar("loss", 1.0, step)
            if stop is not None:
                raise stop
    except SystemExit:
        assert stop is not None
    (file,) = (tmp_path / "events").iterdir()
    steps = [event.step for event in EventFileLoader(str(file)).Load() if event.HasField("summary")]
    assert steps == list(range(_EVENTS))
    assert not dist.is_initialized()
    writer.close()


@pytest.mark.parametrize("error", [RuntimeError("a peer has gone"), SystemExit(1)], ids=["failure", "exit code 1"])
def test_after_a_failure_nobody_is_waited_for(alone: None, error: BaseException):
    with pytest.raises(type(error)), leaving_together(over_gloo=True):
        raise error
    assert dist.is_initialized()


def test_ctrl_c_ends_a_rank_with_one_line(
    alone: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """It wrote a trace of a hundred lines."""
    for name in ("guard_forks", "RollCall", "_initialize_distributed"):
        monkeypatch.setattr(training, name, Mock(return_value=Mock(rank=3)))
    hook = training.PretrainHook(None, Mock(outlives_sessions=False))
    hook._run = Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(SystemExit, match="130"):
        hook.wrap(len)(None, None)
    assert capsys.readouterr().err == "megatron_het: rank 3 was interrupted\n"


def test_groups_of_nccl_are_left_to_megatron(alone: None):
    with leaving_together(over_gloo=False):
        pass
    assert dist.is_initialized()


def test_losses_of_indexers_are_summed_over_all_ranks(alone: None, monkeypatch: pytest.MonkeyPatch):
    """A pipeline group, over which Megatron sums them, is none; a stage without such layers takes part."""
    activate()
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper as Log

    monkeypatch.setattr(Log, "reduce_loss_in_tracker", Log.reduce_loss_in_tracker)
    for counts, recorded, expected in ((True, torch.ones(2), 0.5), (False, torch.ones(2), 0.0), (True, None, 0.0)):
        monkeypatch.setattr(Log, "tracker", {} if recorded is None else {"values": recorded})
        sum_indexer_losses(2, counts=counts)
        total: dict[str, torch.Tensor] = {}
        Log.track_indexer_metrics(0.5, 1, None, total_loss_dict=total)
        assert total["indexer loss"] == expected
