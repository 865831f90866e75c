"""The distributed optimizer over buffers that are divided unequally (``features/window/shards.py``).

Upstream derives every range of parameters, gradients and state from one method, which cuts buckets
into equal parts.  Of what it does with the ranges, two things need equal parts: the gather of the
state for a checkpoint, and the assertion that every rank has an optimizer step to report.  Buffers
without shares are left to upstream.
"""

from __future__ import annotations

from typing import Any

_NOBODY = "no parameter"  # a key of the inner optimizer's state that belongs to no parameter


def divided(original: type) -> type:
    """The distributed optimizer that follows the shares of its buffers."""
    import torch

    class UnevenDistributedOptimizer(original):
        """``DistributedOptimizer`` with parts of unequal size."""

        _steps = 0.0

        @classmethod
        def _build_model_gbuf_range(cls, buffer: Any, bucket_index: int) -> dict[str, Any]:
            own = _own_range(buffer, bucket_index)
            if own is None:
                return super()._build_model_gbuf_range(buffer, bucket_index)
            offset = buffer.buckets[bucket_index].offset
            return {"param_map": cls._build_model_gbuf_param_range_map(buffer.param_index_map, own, offset)}

        def get_parameter_state_dp_zero(
            self, use_gloo_comm: bool = True, empty_data: bool = False, return_on_all_ranks: bool = False
        ) -> dict[Any, Any] | None:
            uneven = _is_divided(self)
            state = super().get_parameter_state_dp_zero(use_gloo_comm, empty_data or uneven, return_on_all_ranks)
            if uneven and not empty_data:
                for index, by_type in enumerate(self.gbuf_ranges):
                    ((key, ranges),) = by_type.items()
                    into = None if state is None else state[index][key]
                    _gather_buffer(self, self.buffers[index], ranges, into, use_gloo_comm)
            return state

        def sharded_state_dict(self, *positional: Any, **keywords: Any) -> Any:
            if _is_divided(self):
                self._steps = _agreed_steps(self)
            return super().sharded_state_dict(*positional, **keywords)

        def state_dict(self) -> dict[str, Any]:
            inner = self.optimizer
            if not _is_divided(self) or any(group["params"] for group in inner.param_groups):
                return super().state_dict()
            # A rank whose share is empty reports the step of the others.
            if isinstance(inner, torch.optim.Adam):  # which keeps it with every parameter
                inner.state[_NOBODY] = {"step": torch.tensor(self._steps)}  # type: ignore[index]
                try:
                    return super().state_dict()
                finally:
                    del inner.state[_NOBODY]  # type: ignore[arg-type]
            saved = super().state_dict()
            for group in saved["optimizer"]["param_groups"]:
                group["step"] = int(self._steps)
            return saved

    UnevenDistributedOptimizer.__qualname__ = original.__qualname__
    return UnevenDistributedOptimizer


def _is_divided(optimizer: Any) -> bool:
    from megatron_het.features.window.shards import shares_of

    return any(shares_of(buffer) is not None for buffer in getattr(optimizer, "buffers", ()))


def _own_range(buffer: Any, bucket_index: int) -> Any:
    """This rank's part of a bucket, in elements of the buffer; None where the parts are equal."""
    from megatron.core.optimizer.distrib_optimizer import Range

    from megatron_het.features.window.shards import shares_of
    from megatron_het.plan.shares import cuts

    shares = shares_of(buffer)
    if shares is None:
        return None
    bucket = buffer.buckets[bucket_index]
    edges = cuts(bucket.grad_data.numel(), shares)
    rank = buffer.data_parallel_group.rank()
    return Range(bucket.offset + edges[rank], bucket.offset + edges[rank + 1])


def _gather_buffer(
    optimizer: Any, buffer: Any, ranges: list[dict[str, Any]], into: dict[str, Any] | None, gloo: bool
) -> None:
    """Collective: put everybody's state of one buffer into upstream's tensors, which have no padding."""
    import torch

    from megatron_het.features.window.shards import UnequalParts, shares_of

    group = optimizer.data_parallel_group_gloo if gloo else optimizer.data_parallel_group
    device = torch.device("cpu") if gloo else buffer.param_data.device
    shares = shares_of(buffer)
    assert shares is not None  # or upstream's own method would have been taken
    parts = UnequalParts(group, shares)
    base = 0
    for bucket, bucket_ranges in zip(buffer.buckets, ranges, strict=True):
        wholes = {
            name: torch.zeros(bucket.grad_data.numel(), dtype=torch.float32, device=device)
            for name in ("param", *optimizer.optimizer_state_keys)
        }
        for parameter, spans in bucket_ranges["param_map"].items():
            tensors = optimizer._get_main_param_and_optimizer_states(parameter)
            span = spans["gbuf_local"]
            for name, whole in wholes.items():
                parts.own(whole)[span.start : span.end].copy_(tensors[name].detach())
        for name, whole in wholes.items():
            parts.gather(whole, parts.own(whole).clone()).wait()
            if into is not None:
                count = bucket.numel_unpadded
                into[name][base : base + count].copy_(whole[:count])
        base += bucket.numel_unpadded


def _agreed_steps(optimizer: Any) -> float:
    """Collective: the number of updates, from the ranks that have parameters."""
    import torch
    import torch.distributed as dist

    inner = optimizer.optimizer
    counts = [float(s["step"]) for s in inner.state.values() if "step" in s]
    if any(group["params"] for group in inner.param_groups):
        counts += [float(g["step"]) for g in inner.param_groups if "step" in g]
    steps = torch.tensor(max(counts, default=0.0), device=optimizer.buffers[0].param_data.device)
    dist.all_reduce(steps, op=dist.ReduceOp.MAX, group=optimizer.data_parallel_group)
    return float(steps.item())
