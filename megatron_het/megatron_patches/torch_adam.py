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


def uses_torch_adam() -> bool:
    """Whether upstream falls back to torch's Adam on this machine."""
    from megatron.core.optimizer import distrib_optimizer

    return not distrib_optimizer.HAVE_APEX_OR_TE


def repaired(original: type) -> type:
    """The distributed optimizer with the repairs."""
    import torch

    class TorchAdamDistributedOptimizer(original):
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

        def _set_main_param_and_optimizer_states(self, model_param: torch.Tensor, tensors: dict[str, Any]) -> None:
            # "step" has come with the parameter groups; None makes upstream leave it alone.
            with torch.no_grad():
                super()._set_main_param_and_optimizer_states(model_param, {**tensors, "step": None})

    TorchAdamDistributedOptimizer.__qualname__ = original.__qualname__
    return TorchAdamDistributedOptimizer
