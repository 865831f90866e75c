"""The distributed optimizer with torch's Adam: three repairs in one subclass.

With neither Apex nor Transformer Engine installed, upstream's ``DistributedOptimizer`` drives
``torch.optim.Adam``, which keeps a ``step`` tensor per parameter.  Upstream (0.19.2)

* asserts in ``state_dict()`` before the first step, so that a resume cannot build its template,
* copies into leaf parameters outside ``no_grad``, and takes ``step`` from a payload that either
  does not hold it (``fully_reshardable``) or holds the zero of the template, not the saved value
  (``dp_reshardable``),
* puts one and the same ``step`` tensor into the state of all parameters on load; Adam advances it
  once per parameter and iteration, so a resumed run trains on with wrong bias corrections.
"""

from __future__ import annotations

from typing import Any

from megatron_het.upstream.registry import Patch

_MODULE = "megatron.core.optimizer.distrib_optimizer"
_CLASS = f"{_MODULE}.DistributedOptimizer"


def _uses_torch_adam() -> bool:
    from megatron.core.optimizer import distrib_optimizer

    return not distrib_optimizer.HAVE_APEX_OR_TE


def _build(original: type) -> type:
    import torch

    class TorchAdamDistributedOptimizer(original):  # type: ignore[misc, valid-type]
        """``DistributedOptimizer`` whose saves and loads are right for ``torch.optim.Adam``."""

        def _allocate_states(self) -> None:
            optimizer = self.optimizer
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    state = optimizer.state[parameter]
                    if state:
                        continue
                    state["step"] = torch.tensor(0.0, dtype=torch.float32)
                    for key in self.optimizer_state_keys:
                        state[key] = torch.zeros_like(parameter.data)

        def state_dict(self) -> dict[str, Any]:
            if self.optimizer is not None and isinstance(self.optimizer, torch.optim.Adam):
                self._allocate_states()
            return super().state_dict()

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            for state in self.optimizer.state.values():
                if "step" in state:
                    state["step"] = state["step"].detach().clone()

        def _set_main_param_and_optimizer_states(
            self, model_param: torch.Tensor, tensors: dict[str, Any]
        ) -> None:
            # "step" has come with the parameter groups; None makes upstream leave it alone.
            with torch.no_grad():
                super()._set_main_param_and_optimizer_states(
                    model_param, {**tensors, "step": None}
                )

    TorchAdamDistributedOptimizer.__qualname__ = original.__qualname__
    return TorchAdamDistributedOptimizer


PATCHES = (
    Patch(
        name="torch_adam",
        group="stock",
        target="megatron.core.optimizer.DistributedOptimizer",
        reason=(
            "torch's Adam under the distributed optimizer cannot resume, or resumes with wrong "
            "bias corrections; the optimizer class is not configurable"
        ),
        sources={
            f"{_CLASS}.state_dict": (
                "bced2858fb20321b7a5a019a8a2f669f56cf0578b1c547333de022864dd1943b"
            ),
            f"{_CLASS}.load_state_dict": (
                "0d637bc1bda39ca855681b432d7ddbd34d5e77b72d20dd413b5bdcdccb9f8e51"
            ),
            f"{_CLASS}._set_main_param_and_optimizer_states": (
                "3cc712951380de5bd4ceffc7c8ee893c4b38fbcc7006db6ea33a0f6567ea1c97"
            ),
        },
        build=_build,
        applies=_uses_torch_adam,
    ),
)
