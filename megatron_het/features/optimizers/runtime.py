"""Lion in the distributed optimizer, as a feature of a rank.

Megatron has built its distributed optimizer around an Adam.  Only the step of that Adam is replaced: Adam still
updates the parameters that stock Megatron leaves to it, and Lion updates the matrices of the layers.  Shards, windows,
offload, norms and checkpoints are not affected.  The state of all parameters has Adam's form: Lion stores its momentum
in the first moment, and the second one of a matrix stays zero.
"""

from collections.abc import Iterator
from typing import Any

import torch

from megatron_het.runtime.feature import Call, Iteration, OpenContext, RuntimeFeature


class LionBesideAdam(RuntimeFeature):
    """Replaces Adam's step from the first iteration of training on."""

    def __init__(self, betas: tuple[float, float]) -> None:
        self._betas = betas
        self._steps: list[LionSteps] = []

    def begin(self, call: Call, state: Iteration) -> None:
        """Replace the step once Megatron's optimizer exists; see :class:`RuntimeFeature`."""
        if self._steps or call.forward_only or call.optimizer is None:
            return
        for part in getattr(call.optimizer, "chained_optimizers", [call.optimizer]):
            if part.optimizer is not None:  # None on ranks without parameters
                self._steps.append(LionSteps(part.optimizer, set(matrices(part)), self._betas))

    def close(self) -> None:
        while self._steps:
            self._steps.pop().undo()


def matrices(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yields the main parameters of a distributed optimizer that Lion updates: this rank's shards of matrices."""
    from megatron.core.optimizer.emerging_optimizers import _is_nonlinear_or_embedding

    for models, mains in (
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
    ):
        for model_group, main_group in zip(models, mains, strict=True):
            for model, main in zip(model_group, main_group, strict=True):
                if not _is_nonlinear_or_embedding(model):
                    yield main


class LionSteps:
    """Replaces the ``step`` of an Adam, so that Lion updates some of its parameters.

    Args:
        adam: Adam of torch, Apex or Transformer Engine.
        chosen: The parameters that Lion updates.
    """

    def __init__(self, adam: Any, chosen: set[torch.Tensor], betas: tuple[float, float]) -> None:
        from emerging_optimizers.scalar_optimizers import Lion

        self._adam, self._chosen, self._betas = adam, chosen, betas
        self._adam_step = adam.step
        self._counts_each = isinstance(adam, torch.optim.Adam)  # the others count steps by group
        self._lion = Lion([torch.zeros(0)], betas=betas)  # torch requires a parameter; the groups are set at every step
        adam.step = self._step

    def undo(self) -> None:
        """Restore Adam's own step, and drop the references to its parameters."""
        vars(self._adam).pop("step", None)
        self._chosen.clear()
        self._lion.param_groups.clear()
        self._lion.state.clear()

    @torch.no_grad()
    def _step(self) -> None:
        """Update the parameters of Adam's groups."""
        groups = self._adam.param_groups
        for_adam = [{**g, "params": [p for p in g["params"] if p not in self._chosen]} for g in groups]
        for_lion = [
            {**g, "params": [p for p in g["params"] if p in self._chosen], "betas": self._betas} for g in groups
        ]
        self._adam.param_groups = for_adam
        try:
            self._adam_step()
        finally:
            self._adam.param_groups = groups
        self._step_lion(for_lion)
        if not self._counts_each:
            for group in groups:
                if group["params"]:
                    group["step"] = group.get("step", 0) + 1

    def _step_lion(self, groups: list[dict[str, Any]]) -> None:
        state = self._adam.state
        for parameter in (p for group in groups for p in group["params"] if p.grad is not None):
            own = state[parameter]
            if not own:
                own.update(exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
            if self._counts_each:
                own["step"] = own.get("step", torch.tensor(0.0)) + 1
        self._lion.param_groups, self._lion.state = groups, state
        self._lion.step()
        self._lion.param_groups, self._lion.state = [], {}


def open_feature(context: OpenContext) -> RuntimeFeature:
    """The feature on this rank."""
    args = context.args
    # As upstream, where --lion-beta1 and --lion-beta2 apply only to the Lion beside Muon.
    return LionBesideAdam((args.adam_beta1, args.adam_beta2))
