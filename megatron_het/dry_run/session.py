"""A session that is watched by a tracker."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from megatron_het.device import Platform
from megatron_het.distributed import loss_source
from megatron_het.dry_run.ledger import GRADIENTS, OPTIMIZER, PARAMETERS
from megatron_het.dry_run.tracker import Tracker
from megatron_het.launch.megatron_args import HetConfig
from megatron_het.lowering.ranks import RankOp
from megatron_het.report.run_report import optimizer_tensors
from megatron_het.report.timeline import Timeline
from megatron_het.runtime.feature import Call, Iteration, optimizer_of
from megatron_het.runtime.losses import MESSAGE_BYTES, Reports
from megatron_het.runtime.session import HetSession


class _WatchedTimeline(Timeline):
    """Tells the tracker which operation runs."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self._tracker = tracker

    @contextlib.contextmanager
    def measure(self, op: RankOp) -> Iterator[None]:
        """See :class:`Timeline`."""
        self._tracker.operation(op.kind.name.lower(), op.label)
        with super().measure(op):
            yield
        self._tracker.phase("between operations")


class WatchedSession(HetSession):
    """The session of a run that a tracker counts.

    Args:
        config, platform, rank: As for :class:`HetSession`.
        tracker: Of this process.
    """

    def __init__(self, config: HetConfig, platform: Platform, rank: int, tracker: Tracker) -> None:
        super().__init__(config, platform, rank)
        self._tracker = tracker
        self._timeline = _WatchedTimeline(tracker)
        self.last_figures: dict[str, Mapping[str, int]] = {}
        """What features counted in the last iteration, by title."""

    def forward_backward(self, **keywords: Any) -> list[Any]:
        """See :class:`HetSession`."""
        # Objects in circles would be collected at some time or other, and tensors with them.
        gc.collect()
        gc.disable()
        if not keywords.get("forward_only", False):
            self._tracker.start_iteration()
        result = super().forward_backward(**keywords)
        self.mark_state()
        for feature in self._features:
            self.last_figures |= feature.figures()
        self._tracker.phase("optimizer")
        return result

    def _finalize(self, call: Call, state: Iteration, force_all_reduce: bool) -> None:
        self._tracker.phase("gradient reduction")
        super()._finalize(call, state, force_all_reduce)

    def _passed_on(self, reports: Reports) -> Reports:
        """Losses have no values here: as many bytes travel, and those of the rank that logs them are zeros."""
        group = self.groups.get("loss")
        if group is None:
            return reports
        letters = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device=self._platform.device)
        dist.broadcast(letters, src=loss_source(self.placement), group=group)
        return reports or [{"lm loss": torch.zeros(2, device=self._platform.device)}]

    def finish_report(self) -> None:
        """See :class:`HetSession`."""
        self.mark_state()
        super().finish_report()

    def mark_state(self) -> None:
        """Tell the tracker what this rank keeps between iterations."""
        from megatron.core.utils import get_model_config

        if not self._models:
            return
        found: list[Any] = [getattr(model, "buffers", None) for model in self._models]  # DDP's is a list of them
        buffers = [buffer for buffers in found if isinstance(buffers, list) for buffer in buffers]
        optimizer = optimizer_of(get_model_config(self._models[0]))
        self._tracker.mark({OPTIMIZER: optimizer_tensors(optimizer)})
        for feature in self._features:
            self._tracker.mark(feature.kept())
        self._tracker.mark(
            {
                GRADIENTS: (b.grad_data for b in buffers),
                PARAMETERS: (p.data for m in self._models for p in m.parameters()),
            }
        )
