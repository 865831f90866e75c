"""Updating one ministage at a time with Megatron's distributed optimizer.

There is one distributed optimizer over all ministages, so that schedulers, gradient norm, overflow
checks and checkpoints are Megatron's own.  A ministage is updated by showing the inner optimizer
only the ministage's part of every parameter group.  Main parameters live in the shards, so an
update needs no whole parameters.

The exact update leaves ``optimizer.step()`` to Megatron up to the inner step: unscaling, overflow
check, norm, clipping.  Instead of stepping, the gradients (clipped by then) and the parameter
groups (with this iteration's learning rate) are kept, and each ministage is stepped when it is next
opened.  An iteration that overflows never gets there, so nothing is undone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_het.runtime.window_chunk import Bucket, ChunkWindow

Groups = list[dict[str, Any]]


class ChunkedOptimizer:
    """Steps Megatron's optimizer chunk by chunk.

    Args:
        optimizer: What ``get_megatron_optimizer`` returned.
        chunks: The windows, by chunk.
        updates_early: Updates happen inside the iteration; ``optimizer.step()`` does nothing.
    """

    def __init__(self, optimizer: Any, chunks: Sequence[ChunkWindow], updates_early: bool) -> None:
        parts = getattr(optimizer, "chained_optimizers", [optimizer])
        if len(parts) != 1 or not isinstance(parts[0], DistributedOptimizer):
            names = ", ".join(type(part).__name__ for part in parts)
            raise TypeError(f"the parameter window needs one DistributedOptimizer, found: {names}")
        self._optimizer: DistributedOptimizer = parts[0]
        self._chunks = chunks
        self._updates_early = updates_early
        self._entries: list[list[_Entry]] = [[] for _ in chunks]
        self._pending: dict[int, tuple[Groups, list[tuple[torch.Tensor, torch.Tensor]]]] = {}
        self._groups: dict[int, Groups] = {}
        self._collect_entries()
        # Instance attributes: this optimizer's gradients and parameters are not where the methods
        # of its class look for them.
        self._optimizer._copy_model_grads_to_main_grads = self._attach_all  # type: ignore[method-assign]
        self._optimizer.step_with_ready_grads = self._defer  # type: ignore[method-assign]

    def _collect_entries(self) -> None:
        """Find every main parameter's shard, and let fp32 main parameters live in the shards."""
        owner = {
            p: (c, bucket)
            for c, chunk in enumerate(self._chunks)
            for bucket in chunk.buckets
            for p in bucket.source.params_list
        }
        optimizer = self._optimizer
        for models, mains, in_shard in (
            (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, False),
            (optimizer.model_fp32_groups, optimizer.shard_fp32_groups, True),
        ):
            for group, (model_group, main_group) in enumerate(zip(models, mains, strict=True)):
                for model, main in zip(model_group, main_group, strict=True):
                    c, bucket = owner[model]
                    span = optimizer._get_model_param_range_map(model)["gbuf_local"]
                    entry = _Entry(main, bucket, span.start, span.end, group, in_shard)
                    if in_shard:
                        main.data = entry.of(bucket.shard)
                    self._entries[c].append(entry)

    # -- what Megatron's optimizer calls -------------------------------------------------------

    @torch.no_grad()
    def _attach_all(self) -> None:
        """In place of the copy from the (freed) gradient buffers."""
        for c in range(len(self._chunks)):
            self._attach(c)

    @torch.no_grad()
    def _defer(self) -> bool:
        """In place of the inner step and the gather: keep what the steps need."""
        if self._updates_early:
            return True
        for c, entries in enumerate(self._entries):
            kept = [(e.main, e.main.grad) for e in entries if e.main.grad is not None]
            self._pending[c] = (self._groups_of(c), kept)
        return True

    # -- what the window calls -----------------------------------------------------------------

    def begin(self) -> None:
        """A new iteration: shards of gradients that nobody waits for (a skipped step) are dropped."""
        self._groups.clear()
        for c, chunk in enumerate(self._chunks):
            if c not in self._pending:
                chunk.drop_gradient_shards()

    def has_pending(self, chunk: int) -> bool:
        """Whether a chunk's update is due before its parameters are used."""
        return chunk in self._pending

    @torch.no_grad()
    def apply_pending(self, chunk: int) -> None:
        """Make the chunk's update that was kept by ``optimizer.step()``, if there is one."""
        if chunk not in self._pending:
            return
        groups, kept = self._pending.pop(chunk)
        for main, gradient in kept:
            main.grad = gradient
        self._step(chunk, groups)

    @torch.no_grad()
    def step_now(self, chunk: int) -> None:
        """Update a chunk with its gradient shards, which are summed and scaled."""
        if not self._groups:
            self._groups = {c: self._groups_of(c) for c in range(len(self._chunks))}
        self._attach(chunk)
        self._step(chunk, self._groups[chunk])

    # -- helpers -------------------------------------------------------------------------------

    def _attach(self, chunk: int) -> None:
        for entry in self._entries[chunk]:
            if entry.bucket.gradient is not None:
                entry.main.grad = entry.of(entry.bucket.gradient).float()

    def _groups_of(self, chunk: int) -> Groups:
        """The chunk's part of the parameter groups, with their present hyperparameters."""
        return [
            {**group, "params": [e.main for e in self._entries[chunk] if e.group == g]}
            for g, group in enumerate(self._optimizer.optimizer.param_groups)
        ]

    def _step(self, chunk: int, groups: Groups) -> None:
        inner = self._optimizer.optimizer
        whole = inner.param_groups
        inner.param_groups = groups
        try:
            inner.step()
        finally:
            inner.param_groups = whole
        for group, stepped in zip(whole, groups, strict=True):
            if "step" in stepped:  # optimizers that count steps per group
                group["step"] = stepped["step"]
        for entry in self._entries[chunk]:
            entry.main.grad = None
            if not entry.in_shard:
                entry.of(entry.bucket.shard).copy_(entry.main)
        self._chunks[chunk].drop_gradient_shards()


class _Entry:
    """A main parameter and its place ``[start, stop)`` in the shard of its bucket."""

    __slots__ = ("bucket", "group", "in_shard", "main", "start", "stop")

    def __init__(
        self, main: torch.Tensor, bucket: Bucket, start: int, stop: int, group: int, in_shard: bool
    ) -> None:
        self.main, self.bucket, self.start, self.stop = main, bucket, start, stop
        self.group, self.in_shard = group, in_shard

    def of(self, shard: torch.Tensor) -> torch.Tensor:
        """The parameter's part of a shard (of parameters or gradients)."""
        return shard[self.start : self.stop]
