"""All patches of Megatron, each with its reason: group ``stock`` for every run, group ``plan`` for runs with a plan.

Stock: norms, compiled helpers, machines without CUDA, the distributed optimizer.
"""

import contextlib
import copy
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megatron_het.features import FEATURES
from megatron_het.megatron_patches import Patch
from megatron_het.megatron_patches.releases import installed_release

_CORE, _LOOP = "megatron.core", "megatron.training.training"
_NORM = f"{_CORE}.transformer.torch_norm.WrappedTorchNorm.__new__"
_HELPERS = f"{_CORE}.datasets.utils.compile_helpers"
_START = f"{_LOOP}.initialize_megatron"
_INFERENCE = f"{_CORE}.tensor_parallel.inference_layers.is_inference_column_parallel_linear"

# torch's LayerNorm and RMSNorm under sequence parallelism, and with zero-centred weights.
#
# Upstream refuses both in the local layer specs.  Under sequence parallelism a norm weight's gradient is a partial
# sum per tensor-parallel rank.  ``finalize_model_grads`` sums it if the weight is marked ``sequence_parallel``, like
# the weights of upstream's fused norms.  With zero-centred weights (``--apply-layernorm-1p``) the scale is the weight
# plus one.


def _norms(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def new_norm(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not (config.sequence_parallel or config.layernorm_zero_centered_gamma):
            return original(cls, config, *args, **kwargs)
        # A plain copy: dataclasses.replace() would run the checks of the whole config again.
        without = copy.copy(config)
        without.sequence_parallel = without.layernorm_zero_centered_gamma = False
        norm = original(cls, without, *args, **kwargs)
        if config.layernorm_zero_centered_gamma:
            kind: Any = type(norm)
            norm = _centred(kind)(norm.normalized_shape, eps=norm.eps)
        if config.sequence_parallel:
            for parameter in norm.parameters():
                parameter.sequence_parallel = True
        return norm

    return new_norm


@functools.cache
def _centred(kind: type) -> type:
    """A subclass of one of torch's norms with the scale ``weight + 1``."""
    import torch
    from torch.nn import functional

    class ZeroCentred(kind):
        """Scales by ``weight + 1``; the weight starts at zero."""

        def reset_parameters(self) -> None:
            super().reset_parameters()
            torch.nn.init.zeros_(self.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Normalise ``[..., normalized_shape]``."""
            if isinstance(self, torch.nn.LayerNorm):
                return functional.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)
            return functional.rms_norm(x, self.normalized_shape, self.weight + 1, self.eps)

    ZeroCentred.__name__ = ZeroCentred.__qualname__ = f"ZeroCentred{kind.__name__}"
    return ZeroCentred


def _helpers_are_compiled() -> bool:
    try:
        importlib.import_module(f"{_CORE}.datasets.helpers_cpp")
    except ImportError:
        return False
    return True


def _no_make(original: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(original)
    def compile_helpers() -> None:
        """Nothing to do: the extension module is installed."""

    return compile_helpers


def _has_no_cuda() -> bool:
    import torch

    return not torch.cuda.is_available()


def _without_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def initialize_megatron(*args: Any, **kwargs: Any) -> Any:
        kwargs["allow_no_cuda"] = True
        return original(*args, **kwargs)

    return initialize_megatron


def _none_of_inference(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    @functools.wraps(original)
    def is_inference_column_parallel_linear(module: Any) -> bool:
        """Returns False: such layers exist only with Transformer Engine."""
        return False

    return is_inference_column_parallel_linear


OF_RELEASES: Mapping[str, tuple[Patch, ...]] = {
    "0.20": (
        Patch(
            name="inference_layers",
            group="stock",
            target="megatron.core.transformer.multi_token_prediction.is_inference_column_parallel_linear",
            reason=(
                "every layer for multi-token prediction asks whether its parts are of a class that is a stand-in, and "
                "no class, without Transformer Engine"
            ),
            sources={_INFERENCE: "3467e044ab79edf8"},
            build=_none_of_inference,
            applies=lambda: importlib.util.find_spec("transformer_engine") is None,
            version="0.20.0",
        ),
    )
}
"""Patches of names that exist only in some releases, by release."""

_FUNCTION_PATCHES = (
    *OF_RELEASES.get(installed_release().name, ()),
    Patch(
        name="torch_norm",
        group="stock",
        target=_NORM,
        reason=(
            "the local layer specs refuse sequence parallelism and zero-centred weights with torch norms; four "
            "modules have bound the class by name, so its constructor is the one place that serves all"
        ),
        sources={
            _NORM: "cc9c1081725484cd",
            "megatron.core.distributed.finalize_model_grads._allreduce_non_tensor_model_parallel_grads": (
                "b8b3681b2ba049de"
            ),
        },
        build=_norms,
    ),
    Patch(
        name="dataset_helpers",
        group="stock",
        target=_HELPERS,
        reason=(
            "the wheel of megatron-core ships helpers_cpp compiled and without its Makefile; "
            "upstream runs make regardless and exits when that fails"
        ),
        sources={_HELPERS: "7d377207e3e51a8f"},
        build=_no_make,
        applies=_helpers_are_compiled,
    ),
    Patch(
        name="no_cuda",
        group="stock",
        target=_START,
        reason=(
            "pretrain() calls it without allow_no_cuda and so asserts torch.cuda.is_available(), "
            "which has to stay False without CUDA: torch's own code decides by it"
        ),
        sources={_START: "c813ba71782bfc73"},
        build=_without_cuda,
        applies=_has_no_cuda,
    ),
)


# Megatron's distributed optimizer: one patch that applies several subclasses.  Features add their own subclasses with
# ``Feature.optimizer_layers``.


# The distributed optimizer's state in checkpoints, where a bucket ends with padding.
#
# For a fully reshardable checkpoint upstream (0.19.2) puts the state of all buckets of a buffer together without their
# padding, and cuts it into parameters at their offsets in the buffer, which count the padding.  So after every padded
# bucket the state of a parameter is taken from a later place, and the end of the last one is zeros: a run that loads
# the checkpoint continues with wrong moments, without an error.  Tied embeddings have their own bucket, and a padded
# bucket precedes it if a layer has a parameter of few elements, such as a softmax offset per head.


def placed(original: type) -> type:
    """The subclass of the distributed optimizer whose checkpoints read every parameter's state at the right offset."""

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
    """Counts the padding of all buckets of a buffer but the last as content, while the context is open."""
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
# * fails an assertion in ``state_dict()`` before the first step, so that a resume cannot build its template,
# * copies into leaf parameters outside ``no_grad``, and takes ``step`` from a payload that either
# does not have it (``fully_reshardable``) or has the template's zero instead of the saved value
# (``dp_reshardable``),
# * puts one ``step`` tensor into the state of all parameters on load; Adam advances it
# once per parameter and iteration, so a resumed run continues with wrong bias corrections.


def uses_torch_adam() -> bool:
    """Whether upstream falls back to torch's Adam on this machine."""
    from megatron.core.optimizer import distrib_optimizer

    return not distrib_optimizer.HAVE_APEX_OR_TE


def repaired(original: type) -> type:
    """The subclass of the distributed optimizer with the three repairs."""
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
            # "step" was loaded with the parameter groups; with None upstream does not set it.
            with torch.no_grad():
                super()._set_main_param_and_optimizer_states(model_param, {**tensors, "step": None})

    TorchAdamDistributedOptimizer.__qualname__ = original.__qualname__
    return TorchAdamDistributedOptimizer


_CLASS = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer"


def _build(original: type) -> type:
    found = repaired(original) if uses_torch_adam() else original
    if installed_release().name == "0.19":  # later releases count the padding themselves
        found = placed(found)
    for layer in (layer for feature in FEATURES for layer in feature.optimizer_layers):
        module, _, name = layer.rpartition(".")
        found = getattr(importlib.import_module(module), name)(found)
    return found


_OPTIMIZER_PATCHES = (
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
            f"{_CLASS}.state_dict": "bced2858fb20321b",
            f"{_CLASS}.load_state_dict": "0d637bc1bda39ca8",
            f"{_CLASS}._set_main_param_and_optimizer_states": "3cc712951380de5b",
            f"{_CLASS}._build_model_and_main_param_groups": "4eff3e32c4df93f9",
            f"{_CLASS}._build_model_gbuf_range": "146c23c0162e7978",
            f"{_CLASS}._build_model_gbuf_param_range_map": "8fe2491d028331c7",
            f"{_CLASS}.get_parameter_state_dp_zero": "a7537986df345b2e",
            f"{_CLASS}.sharded_param_state_fully_reshardable": "bf472bb565068290",
            f"{_CLASS}.sharded_state_dict": "1c6a18684e96c6cd",
            f"{_CLASS}.load_parameter_state_from_fully_reshardable": "e960fcc3f28797a7",
        },
        build=_build,
    ),
)


# The functions of ``megatron.training`` that a run with a plan replaces or wraps.
#
# Their builders belong to one run, so ``megatron_het.arguments.hooks`` passes them to ``install``.


_ARGUMENTS = "megatron.training.arguments"

_PLAN_PATCHES = (
    Patch(
        name="plan_arguments",
        group="plan",
        target=f"{_ARGUMENTS}.validate_args",
        reason=(
            "TP size, layers and batch of this rank come from the plan and must be set between "
            "parsing and validation; there is no hook in between"
        ),
        sources={f"{_ARGUMENTS}.validate_args": "f379171b89b5c726"},
    ),
    Patch(
        name="plan_pretrain",
        group="plan",
        target="megatron.training.pretrain",
        reason=(
            "opens the plan's session around the training of a script that knows nothing of "
            "plans, and passes the arguments that pretrain() offers for it"
        ),
        sources={"megatron.training.pretrain": "0d90d0271b9f49fd"},
    ),
    Patch(
        name="plan_schedule",
        group="plan",
        target=f"{_LOOP}.get_forward_backward_func",
        reason="the schedule is looked up by this name for every run and cannot be passed in",
        sources={
            f"{_LOOP}.get_forward_backward_func": "5a5b8975bc77a8fd",
            # Functions that the executor calls, and those that the builder of several chunks imitates.
            "megatron.core.pipeline_parallel.schedules.forward_step": "679f915a477e3c0c",
            "megatron.core.pipeline_parallel.schedules.backward_step": "4f9c30f42c323553",
            "megatron.core.pipeline_parallel.schedules.deallocate_output_tensor": "fb1e6eaa2fd3a42f",
            "megatron.training.models.gpt.GPTModelBuilder.build_distributed_models": "85df9d383a74ef40",
            "megatron.training.models.dist_utils.prepare_existing_model_chunks_for_distributed_training": (
                "c64b5a70420eeefd"
            ),
            "megatron.training.models.base.compose_hooks": "fa982ba1a07d7efb",
        },
    ),
    Patch(
        name="plan_log",
        group="plan",
        target=f"{_LOOP}.training_log",
        reason=(
            "sums of losses are not reset after the first iteration, so that the second loss in the log of every "
            "session would be a mean of two; they are known to this function only"
        ),
        sources={f"{_LOOP}.training_log": "8fb3e6b1ee07cfe5"},
    ),
    Patch(
        name="plan_save",
        group="plan",
        target="megatron.training.checkpointing.generate_state_dict",
        reason=(
            "what is saved depends on the layout in three places (stacked layers, one random "
            "state per grid cell, every class of replicas writes); there is no hook before the save"
        ),
        sources={"megatron.training.checkpointing.generate_state_dict": "b3931725128ba13b"},
    ),
    Patch(
        name="plan_load",
        group="plan",
        target=f"{_LOOP}.load_checkpoint",
        reason=(
            "decisions about a checkpoint compare this rank's TP size, which differs by rank "
            "under a plan, so that ranks would load different things"
        ),
        sources={f"{_LOOP}.load_checkpoint": "98cef76fe442dcd6"},
    ),
)

PATCHES = (*_FUNCTION_PATCHES, *_OPTIMIZER_PATCHES, *_PLAN_PATCHES)
