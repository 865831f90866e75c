"""A setup that breaks split backward passes, to show that the comparison can fail."""

from typing import Any

from testing import probe


def lose_weight_gradients(*, rank: int, out: str, gradients: bool = False) -> None:
    """The BACKWARD_WEIGHT of microbatch 1 adds nothing."""
    from megatron_het.features.zero_bubble.runtime import WeightGradients

    original = WeightGradients.compute

    def compute(self: WeightGradients, key: tuple[int, int, int], ready: Any = None) -> None:
        if key[0] == 1:
            self._waiting.pop(key)
        else:
            original(self, key, ready)

    WeightGradients.compute = compute  # type: ignore[method-assign]
    probe.observe(rank=rank, out=out, gradients=gradients)
