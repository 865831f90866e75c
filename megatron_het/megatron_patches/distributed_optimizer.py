"""Megatron's distributed optimizer as this project needs it: one patch, for several subclasses.

It is repaired here for torch's Adam, and for its checkpoints.  What features need of it they
say themselves (``Feature.optimizer_layers``): buffers that are divided unequally, chunks that are not all whole at
once.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from megatron_het.features import FEATURES
from megatron_het.megatron_patches.registry import Patch
from megatron_het.megatron_patches.releases import installed_release

# The distributed optimizer's state in checkpoints, where a bucket ends with padding.
#
# For a fully reshardable checkpoint upstream (0.19.2) puts the state of all buckets of a buffer together without their
# padding, and cuts it into parameters at their offsets in the buffer, which count the padding.  So after every padded
# bucket the state of a parameter is taken from a later place, and the end of the last one is zeros: a run that loads
# the checkpoint goes on with other moments, without a word.  Tied embeddings are in a bucket of their own, and a padded
# one comes before them as soon as a layer has a parameter of few elements, such as a softmax offset per head.


def placed(original: type) -> type:
    """The distributed optimizer that finds every parameter's state where it is."""

    class PlacedDistributedOptimizer(original):
        """``DistributedOptimizer`` whose fully reshardable checkpoints are right for padded buckets."""

        def sharded_param_state_fully_reshardable(self, *positional: Any, **keywords: Any) -> Any:
            with contextlib.ExitStack() as stack:
                for buffer in self.buffers:
                    stack.enter_context(_with_padding(buffer))
                return super().sharded_param_state_fully_reshardable(*positional, **keywords)

    PlacedDistributedOptimizer.__qualname__ = original.__qualname__
    return PlacedDistributedOptimizer


@contextlib.contextmanager
def _with_padding(buffer: Any) -> Iterator[None]:
    """While inside, count the padding between the buckets of a buffer as content; what follows the last is none."""
    *padded, _ = buffer.buckets
    sizes = [bucket.numel_unpadded for bucket in padded]
    total = buffer.numel_unpadded
    for bucket in padded:
        bucket.numel_unpadded = bucket.grad_data.numel()
    buffer.numel_unpadded = sum(bucket.numel_unpadded for bucket in buffer.buckets)
    try:
        yield
    finally:
        buffer.numel_unpadded = total
        for bucket, size in zip(padded, sizes, strict=True):
            bucket.numel_unpadded = size


# The distributed optimizer with torch's Adam: three repairs in one subclass.
#
# With neither Apex nor Transformer Engine installed, upstream's ``DistributedOptimizer`` drives ``torch.optim.Adam``,
# which keeps a ``step`` tensor per parameter.  Upstream (0.19.2)
#
# * asserts in ``state_dict()`` before the first step, so that a resume cannot build its template,
# * copies into leaf parameters outside ``no_grad``, and takes ``step`` from a payload that either
# does not hold it (``fully_reshardable``) or holds the zero of the template, not the saved value
# (``dp_reshardable``),
# * puts one and the same ``step`` tensor into the state of all parameters on load; Adam advances it
# once per parameter and iteration, so a resumed run trains on with wrong bias corrections.


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


_CLASS = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer"


def _build(original: type) -> type:
    found = repaired(original) if uses_torch_adam() else original
    if installed_release().name == "0.19":  # later ones count the padding themselves
        found = placed(found)
    for layer in (layer for feature in FEATURES for layer in feature.optimizer_layers):
        module, _, name = layer.rpartition(".")
        found = getattr(importlib.import_module(module), name)(found)
    return found


PATCHES = (
    Patch(
        name="distributed_optimizer",
        group="stock",
        target="megatron.core.optimizer.DistributedOptimizer",
        reason=(
            "torch's Adam under the distributed optimizer cannot resume, or resumes with wrong "
            "bias corrections; checkpoints take state from the wrong place after a padded bucket; it "
            "divides its buffers into equal parts only; and it reads all parameters at once. "
            "The optimizer class is not configurable"
        ),
        sources={
            f"{_CLASS}.state_dict": ("bced2858fb20321b7a5a019a8a2f669f56cf0578b1c547333de022864dd1943b"),
            f"{_CLASS}.load_state_dict": ("0d637bc1bda39ca855681b432d7ddbd34d5e77b72d20dd413b5bdcdccb9f8e51"),
            f"{_CLASS}._set_main_param_and_optimizer_states": (
                "3cc712951380de5bd4ceffc7c8ee893c4b38fbcc7006db6ea33a0f6567ea1c97"
            ),
            f"{_CLASS}._build_model_and_main_param_groups": (
                "4eff3e32c4df93f9c17b9024e6091c7f8f05c51853b9209bcd908ff801fa741b"
            ),
            f"{_CLASS}._build_model_gbuf_range": ("146c23c0162e79784486a7fb19d48b89f22403dccc536cacc6514b25c302f03c"),
            f"{_CLASS}._build_model_gbuf_param_range_map": (
                "8fe2491d028331c7d5b5fc353cafb4cd4c17f4c16ab32148e2975e4189dd5a9b"
            ),
            f"{_CLASS}.get_parameter_state_dp_zero": (
                "a7537986df345b2e851319557f67e93d1135b32c62d422cd42e061a887dbf0d0"
            ),
            f"{_CLASS}.sharded_param_state_fully_reshardable": (
                "bf472bb565068290a4707a1d000ebf63cc9257b57ea44cc19d52aa26ebc6f7b4"
            ),
            f"{_CLASS}.sharded_state_dict": ("1c6a18684e96c6cdf981b5277eebe0c0e8775a4fc38881ab9a1e0896f4f9dd9e"),
            f"{_CLASS}.load_parameter_state_from_fully_reshardable": (
                "e960fcc3f28797a79b0af6c8ebc05a1a1564d01afdd0b841d4ed5de72e728220"
            ),
        },
        build=_build,
    ),
)
