"""Breaks the product on purpose inside a rank process, to show that a comparison can fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks import probe


def _no_class_exchange() -> None:
    """Replicas of different TP, and tied copies, keep their own gradients."""
    from megatron_het.distributed.gradient_sums import GradientFinalizer

    GradientFinalizer._sum_across_classes = lambda self, model: None
    GradientFinalizer._sum_reduced_across_classes = lambda self, model, are_whole: None


def _wrong_routing() -> None:
    """A replica of the first stage reads another microbatch than the last stage scores."""
    from megatron_het.runtime import data

    original = data.RoutedBatchSampler.__init__

    def init(self: Any, batches: Any, microbatches: Any, batches_of: Any) -> None:
        from megatron.core import parallel_state

        shift = parallel_state.get_pipeline_model_parallel_rank() == 0
        moved = [(m + shift) % len(batches_of) for m in microbatches]
        original(self, batches, moved, batches_of)

    data.RoutedBatchSampler.__init__ = init


def _no_duplicate_mark() -> None:
    """Every copy of a parameter counts in the gradient norm."""
    from megatron_het.runtime import session

    session.mark_duplicates = lambda *_args, **_keywords: None


def _gated_as_plain() -> None:
    """The exchange cuts gated weights as if gate and up projection were one block."""
    from megatron_het.distributed import resharding

    original = resharding.segments

    def segments(full_size: int, tp: int, tp_rank: int, stride: Any = 1) -> Any:
        return original(full_size, tp, tp_rank, 1)

    resharding.segments = segments


def _own_token_count() -> None:
    """Gradients are divided by the token count of two global batches."""
    from megatron.core.distributed import DistributedDataParallel

    original = DistributedDataParallel.scale_gradients
    DistributedDataParallel.scale_gradients = lambda self, scale: original(self, scale / 2)


ACCIDENTS: dict[str, Callable[[], None]] = {
    "no class exchange": _no_class_exchange,
    "wrong routing": _wrong_routing,
    "no duplicate mark": _no_duplicate_mark,
    "gated as plain": _gated_as_plain,
    "own token count": _own_token_count,
}


def break_and_observe(*, rank: int, accident: str, **options: Any) -> None:
    """A job's setup: break one thing, then observe as usual."""
    ACCIDENTS[accident]()
    probe.observe(rank=rank, **options)
